"""Losses on bare records, against torch's own losses of what is valid, row by row or element by element.

Every check compares values, masks and gradients, and repeats the call with other garbage under the mask (labels
included): nothing may change, bit for bit.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from bare_records import apply, seen
from op_registry.authoring import Dense

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
FLOATS = (math.nan, math.inf, -math.inf, 1e38, 0.0)
INTEGERS = (-(2**63), 2**63 - 1, -1, 7, 0)


def garbage(data, mask, which):
    if mask is None:
        return data.clone()
    values = FLOATS if data.is_floating_point() else INTEGERS
    value = values[which] if data.dtype is not torch.uint8 else values[which] % 256
    return torch.where(mask, data, torch.full_like(data, value))


def record(data, mask, which=0, requires_grad=False):
    leaf = garbage(data.detach(), mask, which).requires_grad_(requires_grad and data.is_floating_point())
    return Dense(leaf, None if mask is None else mask.to(torch.int8))


def gradients(values, leaves):
    loss = (torch.linspace(0.5, 2, values.numel(), dtype=values.dtype).reshape(values.shape) * values).sum()
    if not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def check(call, expected, operands):
    """`call(*records)` against `expected(*leaves)`, which gives (values with zeros under the mask, mask).

    An operand is (data, mask), or (data, mask, False) where torch has no derivative for it.
    """
    wants = [data.is_floating_point() and not rest for data, _, *rest in operands]
    leaves = [data.detach().requires_grad_(wanted) for (data, *_), wanted in zip(operands, wants, strict=True)]
    floating = [n for n, wanted in enumerate(wants) if wanted]
    want, want_mask = expected(*leaves)
    wanted = gradients(want, [leaves[n] for n in floating])
    first = None
    for which in range(len(FLOATS)):
        records = [record(data, mask, which, wanted) for (data, mask, *_), wanted in zip(operands, wants, strict=True)]
        mask, values = seen(call(*records))
        assert torch.equal(mask, want_mask)
        torch.testing.assert_close(values, want, equal_nan=True)
        found = gradients(values, [records[n].data for n in floating])
        for n, mine, theirs in zip(floating, found, wanted, strict=True):
            torch.testing.assert_close(records[n].like(mine).filled(0), theirs, equal_nan=True)
        again = [values.detach(), *(records[n].like(g).filled(0) for n, g in zip(floating, found, strict=True))]
        first = first or again
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, again, strict=True))


def half(shape, seed):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------- elementwise


def signs(*shape):
    return torch.where(torch.rand(shape) < 0.5, -1.0, 1.0).to(torch.float64)


ELEMENTWISE = {
    "mse_loss": (aten.mse_loss.default, (normal, normal), ()),
    "l1_loss": (aten.l1_loss.default, (normal, normal), ()),
    "smooth_l1_loss": (aten.smooth_l1_loss.default, (normal, normal), (0.7,)),
    "huber_loss": (aten.huber_loss.default, (normal, normal), (0.7,)),
    "soft_margin_loss": (aten.soft_margin_loss.default, (normal, signs), ()),
    "kl_div": (aten.kl_div.default, (normal, lambda *s: normal(*s).sigmoid()), ()),
}


@pytest.mark.parametrize(
    ("name", "reduction"), [*((name, MEAN) for name in ELEMENTWISE), ("kl_div", NONE), ("kl_div", SUM)]
)
def test_elementwise_losses(name, reduction):
    op, make, rest = ELEMENTWISE[name]
    for masks in (
        (half((3, 4), 1), half((3, 4), 2)),
        (half((3, 1), 1), None),
        (torch.zeros(3, 4, dtype=torch.bool), None),
    ):
        operands = [(m(3, 4), mask) for m, mask in zip(make, masks, strict=True)]
        if op is aten.soft_margin_loss.default:
            operands[1] = (*operands[1], False)
        both = torch.ones(3, 4, dtype=torch.bool)
        for mask in masks:
            both = both if mask is None else both & mask

        def expected(x, y, both=both):
            if reduction == NONE:
                return torch.where(both, op(x, y, NONE, *rest), 0), both
            if not both.any():
                return x.new_zeros(()), torch.tensor(False)
            return op(x[both], y[both], reduction, *rest), torch.tensor(True)

        check(lambda x, y: apply(op, x, y, reduction, *rest), expected, operands)


def test_a_mean_by_hand():
    x = Dense(torch.tensor([1.0, math.nan, 5.0]), torch.tensor([1, 0, 1], dtype=torch.int8))
    y = Dense(torch.tensor([0.0, 0.0, 3.0]))
    assert apply(aten.mse_loss.default, x, y).data.item() == 2.5
    assert apply(aten.l1_loss.default, x, y, SUM).data.item() == 3.0


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_binary_cross_entropies_with_weights(reduction):
    shape = (3, 4)
    masks = [half(shape, n) for n in range(3)]
    both = masks[0] & masks[1] & masks[2]
    x, t, w = normal(*shape).sigmoid(), normal(*shape).sigmoid(), normal(*shape).abs()
    for op in (aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default):
        with_logits = op is aten.binary_cross_entropy_with_logits.default
        extra = (None,) if with_logits else ()

        def expected(x, t, w, op=op, extra=extra):
            if reduction == NONE:
                return torch.where(both, op(x, t, w, *extra, NONE), 0), both
            return op(x[both], t[both], w[both], *extra, reduction), torch.tensor(True)

        operands = [(x, masks[0]), (t, masks[1]), (w, masks[2], False)]
        check(lambda *r, op=op, extra=extra: apply(op, *r, *extra, reduction), expected, operands)


def test_sums_of_half_precision_are_rounded_once():
    x = torch.full((3000,), 1.0, dtype=torch.bfloat16)
    mask = torch.ones(3000, dtype=torch.int8)
    mask[1::3] = 0
    result = apply(aten.mse_loss.default, Dense(x, mask), Dense(torch.zeros_like(x)))
    assert result.dtype is torch.bfloat16
    assert result.data.item() == 1.0


def test_losses_are_float32_under_autocast():
    x = Dense(torch.randn(4, 3, dtype=torch.bfloat16), half((4, 3), 0).to(torch.int8))
    labels = Dense(torch.tensor([0, 1, 2, 0]))
    y = Dense(torch.randn(4, 3, dtype=torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for result in (
            apply(aten.mse_loss.default, x, y),
            apply(aten.l1_loss.default, x, y),
            apply(aten.cross_entropy_loss.default, x, labels),
            apply(aten.cross_entropy_loss.default, x, labels, label_smoothing=0.1),
            apply(aten.triplet_margin_loss.default, x, y, y),
            apply(aten.multi_margin_loss.default, x, labels),
        ):
            assert result.dtype is torch.float32


def test_nothing_valid_is_invalid_with_zero_gradients():
    x = torch.full((3, 4), math.nan, requires_grad=True)
    nothing = torch.zeros(3, 4, dtype=torch.int8)
    y = torch.randn(3, 4, requires_grad=True)
    for reduction in (MEAN, SUM):
        result = apply(aten.mse_loss.default, Dense(x, nothing), Dense(y), reduction)
        assert not result.valid.any()
        assert result.data.isfinite()
        assert torch.autograd.grad(result.data, y)[0].eq(0).all()


# ------------------------------------------------------------------------------------------------------ over classes


def rows_of(x, dim=1):
    """(N, C, …) as rows of classes."""
    return x.movedim(dim, -1).reshape(-1, x.shape[dim])


def row_loss(x, x_mask, target, weight, smoothing):
    """Cross entropy of one row over its valid classes, by torch on the compressed row."""
    kept = x_mask.nonzero()[:, 0]
    place = int((kept == target).nonzero()[0])
    w = None if weight is None else weight[kept]
    one = F.cross_entropy(x[kept][None], torch.tensor([place]), w, reduction="sum", label_smoothing=smoothing)
    return one


# Any two of shape, smoothing and reduction meet.
@pytest.mark.parametrize(
    ("shape", "smoothing", "reduction"),
    [
        *(((7, 4), 0.0, NONE), ((7, 4), 0.2, MEAN), ((7, 4), 0.0, SUM)),
        *(((2, 4, 3), 0.2, NONE), ((2, 4, 3), 0.0, MEAN), ((2, 4, 3), 0.2, SUM)),
        *(((2, 4, 2, 2), 0.0, NONE), ((2, 4, 2, 2), 0.2, MEAN), ((2, 4, 2, 2), 0.0, SUM)),
        *(((4,), 0.2, NONE), ((4,), 0.0, MEAN), ((4,), 0.2, SUM)),
    ],
    ids=str,
)
def test_cross_entropy(shape, smoothing, reduction):
    dim = 1 if len(shape) > 1 else 0
    target_shape = (*shape[:dim], *shape[dim + 1 :])
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(4, target_shape, generator=generator)
    if target.ndim:
        target.view(-1)[0] = -100
    x, weight = normal(*shape), normal(4).abs() + 0.1
    for x_mask, t_mask, w in (
        (half(shape, 1), half(target_shape, 2), None),
        (half(shape, 3), None, weight),
        (half(target_shape, 4).unsqueeze(dim), half(target_shape, 5), weight),
    ):
        full = x_mask.expand(shape)
        t_full = torch.ones(target_shape, dtype=torch.bool) if t_mask is None else t_mask

        def expected(x, target, full=full, t_full=t_full, w=w):
            losses, known, weights = [], [], []
            for row, mask, t, ok in zip(
                rows_of(x, dim),
                rows_of(full, dim),
                target.reshape(-1).tolist(),
                t_full.reshape(-1).tolist(),
                strict=True,
            ):
                ignored = t == -100
                known.append(ok and (ignored or bool(mask[t])))
                counted = known[-1] and not ignored
                losses.append(row_loss(row, mask, t, w, smoothing) if counted else x.new_zeros(()))
                weights.append((w[t] if w is not None else 1.0) if counted else 0.0)
            if reduction == NONE:
                return torch.stack(losses).reshape(target_shape), torch.tensor(known).reshape(target_shape)
            if not any(known):
                return x.new_zeros(()), torch.tensor(False)
            total = torch.stack(losses).sum()
            return total / sum(weights) if reduction == MEAN else total, torch.tensor(True)

        def call(x, target, w=w):
            weights = None if w is None else Dense(w)
            return apply(aten.cross_entropy_loss.default, x, target, weights, reduction, -100, smoothing)

        check(call, expected, [(x, x_mask), (target, t_mask)])


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_of_probabilities(smoothing, reduction):
    x, target, weight = normal(5, 4), normal(5, 4).softmax(1), normal(4).abs()
    x_mask, t_mask = half((5, 4), 1), half((5, 4), 2)
    x_mask[4] = False

    def expected(x, target):
        losses = []
        for row, mask, t, t_ok in zip(x, x_mask, target, t_mask, strict=True):
            both = (mask & t_ok)[mask]
            if not both.any():
                losses.append(None)
                continue
            share = t[mask] * (1 - smoothing) + smoothing / int(mask.sum())
            losses.append(-(row[mask].log_softmax(0) * share * weight[mask])[both].sum())
        known = torch.tensor([loss is not None for loss in losses])
        if reduction == NONE:
            return torch.stack([x.new_zeros(()) if loss is None else loss for loss in losses]), known
        total = sum(loss for loss in losses if loss is not None)
        return total / known.sum() if reduction == MEAN else total, torch.tensor(True)

    def call(x, target):
        return apply(aten.cross_entropy_loss.default, x, target, Dense(weight), reduction, -100, smoothing)

    check(call, expected, [(x, x_mask), (target, t_mask)])


@pytest.mark.parametrize(
    "op,shape", [(aten.nll_loss.default, (6, 3)), (aten.nll_loss2d.default, (2, 3, 2, 2))], ids=str
)
@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_nll_loss(op, shape, reduction):
    target_shape = (shape[0], *shape[2:])
    target = torch.randint(3, target_shape, generator=torch.Generator().manual_seed(5))
    x, weight = normal(*shape), normal(3).abs()
    w_mask = torch.tensor([True, False, True])
    x_mask, t_mask = half(shape, 1), half(target_shape, 2)

    def expected(x, target, weight):
        known = t_mask & x_mask.gather(1, target.unsqueeze(1)).squeeze(1) & w_mask[target]
        data = op(torch.where(x_mask, x, 0), torch.where(known, target, -100), weight.detach(), reduction)
        return data, known if reduction == NONE else known.any()

    check(lambda *r: apply(op, *r, reduction), expected, [(x, x_mask), (target, t_mask), (weight, w_mask, False)])


def test_ignored_rows_are_valid_zeros_and_a_mean_of_them_is_torchs():
    x = Dense(torch.randn(2, 3), torch.zeros(2, 3, dtype=torch.int8))
    ignored = Dense(torch.tensor([-100, -100]))
    for op in (aten.nll_loss_nd.default, aten.cross_entropy_loss.default):
        assert torch.equal(seen(apply(op, x, ignored, None, NONE))[0], torch.tensor([True, True]))
        mean = apply(op, x, ignored, None, MEAN)
        assert mean.valid is None or mean.valid.item()
        assert mean.data.isnan()


def test_a_label_out_of_range_is_refused_where_it_is_valid():
    x = Dense(torch.randn(2, 3), torch.tensor([[1, 0, 1], [1, 1, 0]], dtype=torch.int8))
    with pytest.raises(IndexError, match="out of bounds"):
        apply(aten.cross_entropy_loss.default, x, Dense(torch.tensor([0, 5])))
    apply(aten.cross_entropy_loss.default, x, Dense(torch.tensor([0, 5]), torch.tensor([1, 0], dtype=torch.int8)))


def test_small_labels_can_be_ignored_too():
    x = Dense(torch.randn(3, 4))
    labels = Dense(torch.tensor([1, 2, 255], dtype=torch.uint8), torch.tensor([1, 1, 0], dtype=torch.int8))
    result = apply(aten.nll_loss.default, x, labels)
    torch.testing.assert_close(result.data, -(x.data[0, 1] + x.data[1, 2]) / 2)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("reduction", [NONE, MEAN])
def test_margins_over_valid_classes(p, reduction):
    x, x_mask, t_mask = normal(6, 4), half((6, 4), 1), half((6,), 8)
    target = torch.randint(4, (6,), generator=torch.Generator().manual_seed(6))

    def expected(x, target):
        losses = []
        for row, mask, t, ok in zip(x, x_mask, target.tolist(), t_mask.tolist(), strict=True):
            place = int(mask[:t].sum())
            known = ok and bool(mask[t])
            losses.append(F.multi_margin_loss(row[mask][None], torch.tensor([place]), p) if known else None)
        known = torch.tensor([loss is not None for loss in losses])
        if reduction == NONE:
            return torch.stack([x.new_zeros(()) if loss is None else loss for loss in losses]), known
        return sum(loss for loss in losses if loss is not None) / known.sum(), torch.tensor(True)

    def call(x, target):
        return apply(aten.multi_margin_loss.default, x, target, p, 1, None, reduction)

    check(call, expected, [(x, x_mask), (target, t_mask)])


def test_many_labels_end_at_the_first_that_is_minus_one():
    x = Dense(torch.tensor([[0.1, math.nan, 0.4, 0.8]] * 3), torch.tensor([[1, 0, 1, 1]] * 3, dtype=torch.int8))
    labels = Dense(
        torch.tensor([[3, -1, 99, 99], [3, 0, -1, 99], [1, -1, 0, 0]]),
        torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]], dtype=torch.int8),
    )
    mask, values = seen(apply(aten.multilabel_margin_loss.default, x, labels, NONE))
    # The second row's labels have a hole, the third's point at an invalid class.
    assert mask.tolist() == [True, False, False]
    alone = F.multilabel_margin_loss(torch.tensor([[0.1, 0.4, 0.8]]), torch.tensor([[2, -1, 0]]))
    torch.testing.assert_close(values[0], alone)


# ------------------------------------------------------------------------------------------------ between two vectors


def test_a_cosine_over_common_coordinates():
    a, b, target = normal(5, 4), normal(5, 4), torch.tensor([1, -1, 1, -1, 1])
    a_mask, b_mask = half((5, 4), 1), half((5, 4), 2)
    a_mask[3] = False

    def expected(a, b, target):
        losses = []
        for x, y, t, both in zip(a, b, target, a_mask & b_mask, strict=True):
            losses.append(F.cosine_embedding_loss(x[both], y[both], t, margin=0.1) if both.any() else None)
        known = [loss for loss in losses if loss is not None]
        return sum(known) / len(known), torch.tensor(True)

    def call(a, b, target):
        return apply(aten.cosine_embedding_loss.default, a, b, target, 0.1, MEAN)

    check(call, expected, [(a, a_mask), (b, b_mask), (target, None)])


@pytest.mark.parametrize("swap", [False, True])
def test_a_triplet_of_distances_over_common_coordinates(swap):
    vectors = [normal(6, 4) for _ in range(3)]
    masks = [half((6, 4), n) for n in (1, 2, 3)]
    masks[0][0] = False

    def expected(*vectors):
        def distance(i, j, row):
            both = masks[i][row] & masks[j][row]
            return F.pairwise_distance(vectors[i][row][both], vectors[j][row][both]) if both.any() else None

        losses = []
        for row in range(6):
            found = [distance(0, 1, row), distance(0, 2, row), distance(1, 2, row) if swap else vectors[0].new_ones(())]
            if any(d is None for d in found):
                losses.append(None)
                continue
            nearest = torch.minimum(found[1], found[2]) if swap else found[1]
            losses.append((1 + found[0] - nearest).clamp_min(0))
        known = torch.tensor([loss is not None for loss in losses])
        return torch.stack([vectors[0].new_zeros(()) if loss is None else loss for loss in losses]), known

    def call(*vectors):
        return apply(aten.triplet_margin_loss.default, *vectors, swap=swap, reduction=NONE)

    check(call, expected, list(zip(vectors, masks, strict=True)))
