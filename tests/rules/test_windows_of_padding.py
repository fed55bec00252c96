"""windows("padding"): a padded batch through convolutions and pooling equals the loop over its samples."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import masked_dispatch as md
from op_registry.ops.windows import padding as rules
from op_registry.records.dense import Dense
from op_registry.windows import overlay_for_padding
from ragged_samples import CHANNELS, ragged, stack


def assert_equals_loop(fn: Callable[[Tensor], Tensor], samples, batch, offset=lambda start: start, starts=None):
    """Values, masks and gradients of the batch and of the samples one by one."""
    leaves = [batch.detach().requires_grad_(), *(sample.detach().requires_grad_() for sample in samples)]
    with md.windows("padding"):
        out = fn(leaves[0])
    covered = torch.zeros(out.shape, dtype=torch.bool)
    total = torch.zeros((), dtype=torch.float64)
    for number, sample in enumerate(leaves[1:]):
        expected = fn(sample.unsqueeze(0)).squeeze(0)
        start = offset(starts[number]) if starts else (0,) * (expected.ndim - 1)
        box = (number, slice(None), *(slice(s, s + n) for s, n in zip(start, expected.shape[1:], strict=True)))
        known = expected.get_mask() if md.is_masked_tensor(expected) else torch.ones_like(expected, dtype=torch.bool)
        assert torch.equal(out.get_mask()[box], known)
        values = expected.to_tensor(0) if md.is_masked_tensor(expected) else expected
        torch.testing.assert_close(out.to_tensor(0)[box], values, rtol=1e-12, atol=1e-12)
        covered[box] = True
        total = total + (values.sin()).sum()
    assert not out.get_mask()[~covered].any()
    grads = torch.autograd.grad(out.to_tensor(0).sin().sum(), leaves[0])
    expected_grads = torch.autograd.grad(total, leaves[1:])
    flat = torch.cat([g.to_tensor(0)[s.get_mask()] for g, s in zip(expected_grads, samples, strict=True)])
    torch.testing.assert_close(
        torch.cat([g.to_tensor(0)[m] for g, m in zip(grads[0].unbind(0), batch.get_mask().unbind(0), strict=True)]),
        flat,
        rtol=1e-10,
        atol=1e-10,
    )


def weights(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# Geometries, chosen so that any two values of two parameters meet in one of them; in two and in three dimensions, where
# a dimension is treated as in one, a few.
CONVOLUTIONS = {  # stride, padding, dilation, kernel
    1: [
        (1, 0, 1, 2), (2, 0, 2, 3), (1, 1, 1, 2), (2, 1, 2, 3), (1, 3, 1, 3),
        (2, 3, 2, 2), (1, "same", 1, 3), (1, "same", 2, 2), (2, "valid", 1, 3), (1, "valid", 2, 2),
    ],
    2: [(2, 1, 2, 3), (1, "same", 1, 3)],
    3: [(1, 1, 1, 3), (2, 3, 2, 2)],
}  # fmt: skip
TRANSPOSED = {  # stride, padding, dilation, output_padding
    1: [(1, 0, 1, 0), (1, 1, 2, 1), (2, 0, 2, 0), (2, 1, 1, 1), (3, 0, 2, 1), (3, 1, 1, 0)],
    2: [(2, 1, 1, 1)],
    3: [(3, 0, 2, 1)],
}
AVERAGES = {  # stride, padding, ceil_mode, count_include_pad
    1: [
        (1, 0, False, True), (1, 1, True, False), (2, 0, True, True),
        (2, 1, False, False), (3, 0, False, False), (3, 1, True, True),
    ],
    2: [(3, 1, True, True)],
    3: [(2, 1, False, False)],
}  # fmt: skip
MAXIMA = {  # stride, padding, dilation, ceil_mode
    1: [(1, 0, 1, False), (1, 1, 2, True), (2, 0, 2, True), (2, 1, 1, True), (2, 1, 2, False)],
    2: [(2, 0, 2, True)],
    3: [(2, 1, 1, True)],
}
NORMS = {1: [(1, False), (2, True), (3, True)], 2: [(2, True)], 3: [(3, False)]}  # stride, ceil_mode
ADAPTIVE = {1: [1, 2, 5], 2: [2], 3: [5]}


def convolutions(n):
    """Convolutions of n dimensions, with a name for each."""
    conv = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    for stride, padding, dilation, kernel in CONVOLUTIONS[n]:
        w, b = weights(6, CHANNELS // 2, *[kernel] * n), weights(6)
        yield (
            f"conv{n}d-s{stride}-p{padding}-d{dilation}-k{kernel}",
            lambda x, w=w, b=b, s=stride, p=padding, d=dilation: conv(x, w, b, s, p, d, 2),
        )
    transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n - 1]
    for stride, padding, dilation, extra in TRANSPOSED[n]:
        w, b = weights(CHANNELS, 3, *[2] * n), weights(3)
        yield (
            f"conv_transpose{n}d-s{stride}-p{padding}-d{dilation}-o{extra}",
            lambda x, w=w, b=b, a=(stride, padding, extra, 1, dilation): transposed(x, w, b, *a),
        )


def poolings(n):
    """Pooling of n dimensions, with a name for each."""
    average = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[n - 1]
    for stride, padding, ceil, include in AVERAGES[n]:
        yield (
            f"avg_pool{n}d-s{stride}-p{padding}-{'ceil' if ceil else 'floor'}-{'with' if include else 'without'}",
            lambda x, a=(3, stride, padding, ceil, include): average(x, *a),
        )
    if n > 1:
        yield f"avg_pool{n}d-divisor", lambda x: average(x, 2, 2, 1, divisor_override=5)
    maximum = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
    for stride, padding, dilation, ceil in MAXIMA[n]:
        yield (
            f"max_pool{n}d-s{stride}-p{padding}-d{dilation}-{'ceil' if ceil else 'floor'}",
            lambda x, a=(2, stride, padding, dilation, ceil): maximum(x, *a),
        )
    norm = (F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)[n - 1]
    for stride, ceil in NORMS[n]:
        yield (
            f"lp_pool{n}d-s{stride}-{'ceil' if ceil else 'floor'}",
            lambda x, a=(3, stride, ceil): norm(x.square() + 0.1, 2.0, *a),
        )
    adaptive = (
        (F.adaptive_avg_pool1d, F.adaptive_max_pool1d),
        (F.adaptive_avg_pool2d, F.adaptive_max_pool2d),
        (F.adaptive_avg_pool3d, F.adaptive_max_pool3d),
    )[n - 1]
    for pool, size in itertools.product(adaptive, ADAPTIVE[n]):
        yield f"{pool.__name__}-{size}", lambda x, pool=pool, size=size: pool(x, size)


SIZES = {
    1: ([(9,), (5,), (12,), (7,)], (13,)),
    2: ([(9, 6), (5, 10), (7, 7)], (10, 11)),
    3: ([(6, 5, 7), (7, 6, 5)], (8, 7, 7)),
}
# Every other one with holes in the samples.
CASES = [
    pytest.param(n, fn, holes, id=f"{name}-holes" if holes else name)
    for n in SIZES
    for (name, fn), holes in zip((*convolutions(n), *poolings(n)), itertools.cycle((0.0, 0.7)), strict=False)
]


@pytest.mark.parametrize(("n", "fn", "holes"), CASES)
def test_a_batch_padded_at_the_end_equals_the_loop(n, fn, holes):
    sizes, shape = SIZES[n]
    samples, batch = ragged(sizes, [(0,) * n] * len(sizes), shape, holes=holes)
    assert_equals_loop(fn, samples, batch)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.conv1d(x, weights(2, CHANNELS, 3), None, 2, 1),
        lambda x: F.avg_pool1d(x, 3, 2, 1),
        lambda x: F.max_pool1d(x, 3, 2, 1, ceil_mode=True),
        lambda x: F.adaptive_avg_pool1d(x, 3),
        lambda x: F.adaptive_max_pool1d(x, 3),
    ],
    ids=["conv", "avg", "max", "adaptive avg", "adaptive max"],
)
def test_a_box_may_begin_anywhere_that_the_stride_divides(fn):
    starts = [(0,), (2,), (4,)]
    samples, batch = ragged([(9,), (6,), (7,)], starts, (14,), holes=0.3)
    adaptive = fn(batch).shape[-1] == 3
    assert_equals_loop(fn, samples, batch, offset=lambda start: (0 if adaptive else start[0] // 2,), starts=starts)


def test_transposed_convolutions_scale_the_start():
    starts = [(0,), (1,), (3,)]
    samples, batch = ragged([(4,), (5,), (3,)], starts, (7,))
    w = weights(CHANNELS, 2, 3)
    assert_equals_loop(
        lambda x: F.conv_transpose1d(x, w, None, 2, 1), samples, batch, lambda start: (start[0] * 2,), starts
    )


def test_where_the_stride_does_not_divide_the_start_those_windows_count_that_lie_within():
    x = md.masked_tensor(torch.arange(9.0)[None, None], torch.tensor([[[0, 1, 1, 1, 1, 1, 1, 0, 0]]]).bool())
    with md.windows("padding"):
        y = F.max_pool1d(x, 2, 2)
    # The batch's windows begin at 0, 2, 4, 6: of these the second and third lie within [1, 6].
    assert y.get_mask().tolist() == [[[False, True, True, False]]]


def test_a_sample_without_valid_elements_stays_invalid():
    x = md.masked_tensor(torch.zeros(2, 1, 5), torch.tensor([[[True]], [[False]]]).expand(2, 1, 5))
    with md.windows("padding"):
        for y in (
            F.conv1d(x, torch.ones(1, 1, 3), torch.ones(1), padding=3),
            F.avg_pool1d(x, 3, padding=1),
            F.adaptive_avg_pool1d(x, 2),
            F.adaptive_max_pool1d(x, 2),
        ):
            assert y.get_mask()[0].all()
            assert not y.get_mask()[1].any()


def test_nothing_under_the_mask_is_seen():
    _, batch = ragged([(9,), (5,)], [(0,), (0,)], (11,))
    for garbage in (float("inf"), 1e300, -0.0):
        other = md.masked_tensor(torch.where(batch.get_mask(), batch.get_data(), garbage), batch.get_mask())
        with md.windows("padding"):
            for _, fn in (*convolutions(1), *poolings(1)):
                assert torch.equal(fn(batch), fn(other))


def test_samples_without_a_batch_dimension():
    _, batch = ragged([(9,)], [(0,)], (12,))
    with md.windows("padding"):
        for _, fn in (*convolutions(1), *poolings(1)):
            together, alone = fn(batch), fn(batch[0])
            assert torch.equal(together[0], alone)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.pad(x, (1, 1), mode="reflect"),
        lambda x: F.pad(x, (1, 1), mode="replicate"),
        lambda x: F.pad(x, (1, 1), mode="circular"),
        lambda x: F.fractional_max_pool2d(x.unsqueeze(2).expand(-1, -1, 4, -1), 2, 2),
        nn.Conv1d(CHANNELS, 1, 3, padding=1, padding_mode="circular", dtype=torch.float64),
    ],
    ids=["reflect", "replicate", "circular", "fractional", "module"],
)
def test_what_reads_beyond_the_box_is_refused(fn):
    _, batch = ragged([(9,), (5,)], [(0,), (0,)], (12,))
    full = md.masked_tensor(batch.to_tensor(0))
    with md.windows("padding"):
        fn(full)
        with pytest.raises(
            md.MaskedSemanticsError, match=r"has no meaning inside masked_dispatch.windows\('padding'\)"
        ):
            fn(batch)
    fn(batch)


# ------------------------------------------------------------------------------------------------------------ the scope


def test_scopes_nest_and_end():
    _, batch = ragged([(9,), (5,)], [(0,), (0,)], (12,))
    net = stack()
    missing = net(batch).count()
    with md.windows("padding"):
        padding = net(batch).count()
        with md.windows("missing"):
            assert net(batch).count() == missing
            with md.windows("padding"), md.windows("padding"):
                assert net(batch).count() == padding
        assert net(batch).count() == padding
    assert net(batch).count() == missing != padding
    with pytest.raises(ValueError, match="windows takes 'missing' or 'padding', not 'pad'"):
        md.windows("pad")


def test_a_module_may_have_a_meaning_of_its_own():
    _, batch = ragged([(9,), (5,)], [(0,), (0,)], (12,))
    net = stack()
    with md.windows("padding"):
        expected = net(batch)
    missing = net(batch)
    inner, outer = md.windows("missing", stack()), md.windows("padding", nn.Sequential(stack()))
    assert torch.equal(outer(batch), expected)
    for copied in (copy.deepcopy(outer), pickle.loads(pickle.dumps(outer))):
        assert torch.equal(copied(batch), expected)
    with md.windows("padding"):
        assert torch.equal(inner(batch), missing)
        assert torch.equal(net(batch), expected)
    with pytest.raises(RuntimeError):
        outer(torch.ones(1, CHANNELS + 1, 3, dtype=torch.float64))
    assert torch.equal(net(batch), missing)  # a call that fails leaves its scope


def test_a_checkpointed_module_with_its_own_meaning():
    _, batch = ragged([(9,), (5,)], [(0,), (0,)], (12,))
    net = md.windows("padding", stack())
    gradients = []
    for call in (net, lambda x: checkpoint(net, x, use_reentrant=False)):
        net.zero_grad()
        call(batch).square().sum().backward()
        gradients.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(*gradients)


def test_sparse_storage_has_the_same_meaning():
    _, batch = ragged([(9,), (5,)], [(0,), (0,)], (12,))
    net = stack()
    with md.windows("padding"):
        assert torch.equal(net(batch.to_sparse()).to_dense(), net(batch))


def test_nobody_else_pays():
    """The rules are put in the registry when the scope is first entered, and for windows alone."""
    overlay = overlay_for_padding()
    names = {op._schema.name for op in overlay.rules}
    assert all("conv" in name or "pool" in name or "_pad" in name for name in names)


# ------------------------------------------------------------------------------------------------ broken on purpose


def whole_batch(crop: rules.Crop) -> rules.Crop:
    return dataclasses.replace(crop, start=torch.zeros_like(crop.start), length=torch.full_like(crop.length, crop.size))


def first_for_all(crop: rules.Crop) -> rules.Crop:
    return dataclasses.replace(
        crop, start=crop.start[:1].expand_as(crop.start), length=crop.length[:1].expand_as(crop.length)
    )


def longer(crop: rules.Crop) -> rules.Crop:
    return dataclasses.replace(crop, length=(crop.length + 1).clamp(max=crop.size))


def of_crops(change: Callable[[rules.Crop], rules.Crop]):
    crops = rules.crops
    return rules, "crops", lambda x, spatial: [change(crop) for crop in crops(x, spatial)]


def of_bins(change: Callable[[rules.Crop], rules.Crop]):
    bins = rules.adaptive_bins
    return rules, "adaptive_bins", lambda crop, out: bins(change(crop), out)


right_crops = rules.crops


def counted_by_valid_indices(x: Dense, spatial: int) -> list[rules.Crop]:
    """The length of a box is how many indices have something valid, which holes make fewer."""
    valid = x.validity.bool().expand(x.shape).any(1)
    number = [valid.any([1 + o for o in range(spatial) if o != d]) if spatial > 1 else valid for d in range(spatial)]
    crops = right_crops(x, spatial)
    return [dataclasses.replace(crop, length=n.sum(1)) for crop, n in zip(crops, number, strict=True)]


def of_windows(kind: type, **changes: object):
    """Whether the size formula gives a crop an output, computed with a part of the geometry changed."""
    of_crop = kind.of_crop
    return kind, "of_crop", lambda self, crop: of_crop(dataclasses.replace(self, **changes), crop)


def by_crop_alone(along, x: Dense, valid: Tensor | None) -> Tensor:
    return rules.per_sample([window.of_crop(box) for window, box in along], x)


def by_taps_alone(along, x: Dense, valid: Tensor | None) -> Tensor:
    of_crop = by_crop_alone(along, x, valid)
    return torch.ones_like(of_crop) if valid is None else valid.bool()


def by_both_alone(along, x: Dense, valid: Tensor | None) -> Tensor:
    return by_crop_alone(along, x, valid) & by_taps_alone(along, x, valid)


# Where each is wrong: an object, its attribute, and what is put there.
BROKEN = {
    "padding is a part of each sample": lambda: of_crops(whole_batch),
    "every sample has the box of the first": lambda: of_crops(first_for_all),
    "a box has one index too many": lambda: of_crops(longer),
    "holes shorten the box": lambda: (rules, "crops", counted_by_valid_indices),
    "masks are those of missing values": lambda: (rules, "crop_validity", by_taps_alone),
    "a window with holes alone is valid": lambda: (rules, "crop_validity", by_crop_alone),
    "a window in the crop's padding alone is invalid": lambda: (rules, "crop_validity", by_both_alone),
    "windows are counted without padding": lambda: of_windows(rules.Geometry, before=0, after=0),
    "windows are counted without dilation": lambda: of_windows(rules.Geometry, dilation=1),
    "windows are counted without ceil_mode": lambda: of_windows(rules.Geometry, by_ceil=False),
    "transposed windows are counted without output_padding": lambda: of_windows(
        rules.TransposedGeometry, output_padding=0
    ),
    "transposed windows are counted without padding": lambda: of_windows(rules.TransposedGeometry, padding=0),
    "an average divides by the size of its window": lambda: (
        rules, "numeric_validity", lambda x, spatial: torch.ones(x.shape, dtype=x.dtype)
    ),
    "an average does not count the crop's padding": lambda: (
        rules.Geometry, "with_padding", rules.Geometry.elements
    ),
    "an average counts the batch's padding": lambda: (
        rules.Geometry, "elements", rules.Geometry.with_padding
    ),
    "bins are those of the batch": lambda: of_bins(whole_batch),
    "bins begin where the batch does": lambda: of_bins(
        lambda crop: dataclasses.replace(crop, start=torch.zeros_like(crop.start))
    ),
    "bins read what they do not have": lambda: (
        rules, "gather_bins",
        lambda t, dim, index, inside, outside, gather=rules.gather_bins: gather(
            t, dim, index, torch.ones_like(inside), outside
        ),
    ),
    "data under the mask counts": lambda: (Dense, "filled", lambda self, value: self.data),
}  # fmt: skip


def loops_that_hold() -> bool:
    """Whether padded batches equal their loops, in a few of the calls from above."""
    w, into = weights(2, CHANNELS, 3), weights(CHANNELS, 2, 3)
    at_the_end = [
        lambda x: F.conv1d(x, w, weights(2), 2, 3),
        lambda x: F.conv1d(x, w, None, 1, 0, 2),
        lambda x: F.conv_transpose1d(x, into, weights(2), 3, 1, 1),
        lambda x: F.avg_pool1d(x, 3, 2, 1),
        lambda x: F.avg_pool1d(x, 3, 2, 1, True, False),
        lambda x: F.max_pool1d(x, 2, 2, 1, 1, True),
        lambda x: F.adaptive_avg_pool1d(x, 5),
        lambda x: F.adaptive_max_pool1d(x, 5),
    ]
    try:
        for holes, fn in itertools.product((0.0, 0.7), at_the_end):
            samples, batch = ragged([(9,), (5,), (12,), (7,)], [(0,)] * 4, (13,), holes=holes)
            assert_equals_loop(fn, samples, batch)
        for fn in (lambda x: F.adaptive_avg_pool1d(x, 3), lambda x: F.adaptive_max_pool1d(x, 3)):
            starts = [(0,), (2,), (4,)]
            samples, batch = ragged([(9,), (6,), (7,)], starts, (14,))
            assert_equals_loop(fn, samples, batch, lambda start: (0,), starts)
    except AssertionError:
        return False
    return True


def test_the_loops_hold_for_the_rules_themselves():
    assert loops_that_hold()


@pytest.mark.parametrize("way", BROKEN)
def test_a_rule_that_is_wrong_in_one_way_is_noticed(way, monkeypatch):
    """The laws run outside of the scope, so that the table of mutants has no line for these rules."""
    monkeypatch.setattr(*BROKEN[way]())
    assert not loops_that_hold()
