"""windows("padding"): a padded batch through convolutions and pooling equals the loop over its samples.

P9 asks the same rules of every geometry, with gradients, along positions that a batch knows of. Here are the scope,
boxes that the masks alone show, and what is refused.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import masked_dispatch as md
from networks_with_samples import CHANNELS, ragged, stack
from op_registry.windows import overlay_for_padding


def assert_equals_loop(fn: Callable[[Tensor], Tensor], samples, batch, starts, to_start: Callable[[int], int]):
    """Values and masks of the batch and of the samples one by one, each of which begins where `to_start` says."""
    with md.windows("padding"):
        out = fn(batch)
    covered = torch.zeros(out.shape, dtype=torch.bool)
    for number, (sample, (start,)) in enumerate(zip(samples, starts, strict=True)):
        expected = fn(sample.unsqueeze(0)).squeeze(0)
        box = (number, slice(None), slice(to_start(start), to_start(start) + expected.shape[-1]))
        md.testing.assert_close(out[box], expected)
        covered[box] = True
    assert not out.get_mask()[~covered].any()


def weights(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


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
    assert_equals_loop(fn, samples, batch, starts, lambda start: 0 if adaptive else start // 2)


def test_transposed_convolutions_scale_the_start():
    starts = [(0,), (1,), (3,)]
    samples, batch = ragged([(4,), (5,), (3,)], starts, (7,))
    w = weights(CHANNELS, 2, 3)
    assert_equals_loop(lambda x: F.conv_transpose1d(x, w, None, 2, 1), samples, batch, starts, lambda start: start * 2)


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
