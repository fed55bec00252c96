"""torch's gradient formulas called by hand, against autograd through the oracles of the operators they belong to.

An oracle says in loops over compressed slices what an operator has to give, and is differentiable: its gradient is the
one that is wanted. Under the masks here lies NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradient_formulas import hidden, saved
from masked_dispatch import is_masked_tensor, masked_tensor
from op_registry.conformance.oracles import expected
from op_registry.conformance.oracles.call import Expected

aten = torch.ops.aten
MEAN, SUM, NONE = 1, 2, 0
ALL_THREE = [True, True, True]


@dataclass(frozen=True)
class Case:
    """A formula, and the operator that it is the gradient of.

    inputs    shapes of the tensors that hold numbers, or the tensors themselves; all get masks
    forward   the operator on them, as a person calls it
    backward  the formula, given the gradient and the masked tensors
    by        which of the inputs it gives gradients of
    """

    name: str
    inputs: tuple[Any, ...]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    by: tuple[int, ...] = (0,)
    # Tensors that stay plain: indices, or what the formula has no argument for.
    plain: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return self.name


def layer_norm_backward(grad, x, w, b):
    mean, rstd = saved(aten.native_layer_norm, x, [4], w, b, 1e-3)
    return aten.native_layer_norm_backward(grad, x, [4], mean, rstd, w, b, ALL_THREE)


def group_norm_backward(grad, x, w):
    n, c, length = x.shape
    mean, rstd = saved(aten.native_group_norm, x, w, None, n, c, length, 2, 1e-3)
    return aten.native_group_norm_backward(grad, x, mean, rstd, w, n, c, length, 2, ALL_THREE)[:2]


def batch_norm_backward(training):
    def backward(grad, x, w, mean, var):
        results = aten.native_batch_norm(x, w, None, None, None, True, 0.1, 1e-3)[1:] if training else (None, None)
        return aten.native_batch_norm_backward(grad, x, w, mean, var, *results, training, 1e-3, ALL_THREE)[:2]

    return backward


def batch_norm(training):
    def forward(x, w, mean, var):
        statistics = (None, None) if training else (mean, var)
        return F.batch_norm(x, *statistics, w, None, training, 0.1, 1e-3)

    return forward


def max_pool_backward(grad, x):
    indices = saved(aten.max_pool2d_with_indices, x, [2, 2], [1, 1], [1, 1], [1, 1], False)[0]
    return aten.max_pool2d_with_indices_backward(grad, x, [2, 2], [1, 1], [1, 1], [1, 1], False, indices)


def adaptive_max_pool_backward(grad, x):
    return aten.adaptive_max_pool2d_backward(grad, x, saved(aten.adaptive_max_pool2d, x, [2, 3])[0])


def attention_backward(grad, q, k, v):
    op = aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = op(q, k, v, 0.0, True)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, logsumexp, 0.0, True)


def convolution(stride, transposed, groups):
    def forward(x, w):
        convolve = F.conv_transpose2d if transposed else F.conv2d
        return convolve(x, w, None, stride, 1, groups=groups)

    def backward(grad, x, w):
        geometry = ([stride, stride], [1, 1], [1, 1], transposed, [0, 0], groups)
        return aten.convolution_backward(grad, x, w, None, *geometry, [True, True, False])[:2]

    return forward, backward


def slow_convolution_backward(grad, x, w):
    return aten._slow_conv2d_backward.output_mask(grad, x, w, [3, 3], [2, 2], [1, 1], [True, True, False])[:2]


def cdist_backward(grad, x, y):
    return aten._cdist_backward(grad, x, y, 3.0, aten._cdist_forward(x, y, 3.0, None))


def weight_norm_backward(grad, v, g):
    norms = saved(aten._weight_norm_interface, v, g, 1)[0]
    return aten._weight_norm_interface_backward(grad, v, g, norms, 1)


def softmax_backward(log):
    forward = torch.log_softmax if log else torch.softmax
    formula = aten._log_softmax_backward_data if log else aten._softmax_backward_data
    return Case(
        "log_softmax" if log else "softmax",
        ((3, 5),),
        lambda x: forward(x, 1),
        lambda grad, x: formula(grad, forward(x, 1), 1, torch.float64),
    )


LABELS = torch.tensor([1, 0, 3, 2, 1])
LABELS_2D = torch.tensor([[[1, 0, -100], [2, 3, 0]], [[3, 3, 1], [0, 1, 2]]])
SIGNS = torch.tensor([[1.0, -1.0, 1.0, 1.0], [-1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
MULTILABEL = torch.tensor([[1, 3, -1, 0], [2, -1, 0, 0]])
IS_TARGET = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
LENGTHS = torch.tensor([2, 0, 3, 1])


def pair_loss(name, reduction, forward, *options):
    formula = getattr(aten, f"{name}_backward")
    names = {NONE: "none", MEAN: "mean", SUM: "sum"}
    return Case(
        f"{name}-{names[reduction]}",
        ((4, 3), (4, 3)),
        lambda x, y: forward(x, y, reduction=names[reduction]),
        lambda grad, x, y: formula(grad, x, y, reduction, *options),
    )


CASES = [
    softmax_backward(log=False),
    softmax_backward(log=True),
    Case("glu", ((3, 6),), lambda x: F.glu(x, 1), lambda grad, x: aten.glu_backward(grad, x, 1)),
    Case(
        "prelu",
        ((3, 6), (1, 6)),
        lambda x, w: aten._prelu_kernel(x, w),
        lambda grad, x, w: (lambda a, b: (a, b.sum(0, keepdim=True)))(*aten._prelu_kernel_backward(grad, x, w)),
        by=(0,),
    ),
    *(pair_loss("mse_loss", r, F.mse_loss) for r in (NONE, MEAN, SUM)),
    *(pair_loss("smooth_l1_loss", r, lambda *a, **k: F.smooth_l1_loss(*a, **k, beta=0.5), 0.5) for r in (NONE, MEAN)),
    *(pair_loss("huber_loss", r, lambda *a, **k: F.huber_loss(*a, **k, delta=0.5), 0.5) for r in (MEAN, SUM)),
    Case(
        "soft_margin_loss",
        ((2, 4), SIGNS),
        F.soft_margin_loss,
        lambda grad, x, y: aten.soft_margin_loss_backward(grad, x, y, MEAN),
    ),
    Case(
        "binary_cross_entropy",
        ((2, 4), (2, 4), (2, 4)),
        lambda x, y, w: F.binary_cross_entropy(x.abs().frac(), y.abs().frac(), w),
        lambda grad, x, y, w: (
            aten.binary_cross_entropy_backward(grad, x.abs().frac(), y.abs().frac(), w, MEAN) * x.sign()
        ),
    ),
    Case(
        "nll_loss",
        ((5, 4), (4,), LABELS),
        lambda x, w, y: F.nll_loss(x, y, w),
        lambda grad, x, w, y: aten.nll_loss_backward(
            grad, x, y, w, MEAN, -100, *saved(aten.nll_loss_forward, x, y, w, MEAN, -100)
        ),
    ),
    Case(
        "nll_loss2d",
        ((2, 4, 2, 3), LABELS_2D),
        lambda x, y: F.nll_loss(x, y, reduction="none"),
        lambda grad, x, y: aten.nll_loss2d_backward(
            grad, x, y, None, NONE, -100, *saved(aten.nll_loss2d_forward, x, y, None, NONE, -100)
        ),
    ),
    Case(
        "multi_margin_loss",
        ((5, 4), LABELS),
        F.multi_margin_loss,
        lambda grad, x, y: aten.multi_margin_loss_backward(grad, x, y, 1, 1, None, MEAN),
    ),
    Case(
        "multilabel_margin_loss",
        ((2, 4), MULTILABEL),
        F.multilabel_margin_loss,
        lambda grad, x, y: aten.multilabel_margin_loss_backward(grad, x, y, MEAN, IS_TARGET),
        plain=(1,),
    ),
    Case(
        "avg_pool2d",
        ((2, 2, 5, 5),),
        lambda x: F.avg_pool2d(x, 2, 2, 1, count_include_pad=False),
        lambda grad, x: aten.avg_pool2d_backward(grad, x, [2, 2], [2, 2], [1, 1], False, False, None),
    ),
    Case(
        "avg_pool3d",
        ((1, 2, 4, 4, 3),),
        lambda x: F.avg_pool3d(x, 2, 1),
        lambda grad, x: aten.avg_pool3d_backward(grad, x, [2, 2, 2], [1, 1, 1], [0, 0, 0], False, True, None),
    ),
    Case(
        "adaptive_avg_pool2d",
        ((2, 2, 5, 5),),
        lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
        aten._adaptive_avg_pool2d_backward,
    ),
    Case(
        "adaptive_avg_pool3d",
        ((1, 2, 4, 3, 3),),
        lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)),
        aten._adaptive_avg_pool3d_backward,
    ),
    Case("max_pool2d", ((1, 2, 5, 4),), lambda x: F.max_pool2d(x, 2, 1, 1), max_pool_backward),
    Case(
        "adaptive_max_pool2d", ((1, 2, 5, 4),), lambda x: F.adaptive_max_pool2d(x, (2, 3)), adaptive_max_pool_backward
    ),
    *(
        Case(f"convolution-{stride}-{transposed}-{groups}", ((2, 4, 5, 5), (4, 4 // groups, 3, 3)), *both, by=(0, 1))
        for stride, transposed, groups in ((1, False, 1), (2, False, 2), (2, True, 2))
        for both in [convolution(stride, transposed, groups)]
    ),
    Case(
        "slow_convolution",
        ((2, 4, 5, 5), (3, 4, 3, 3)),
        lambda x, w: F.conv2d(x, w, None, 2, 1),
        slow_convolution_backward,
        by=(0, 1),
    ),
    Case(
        "layer_norm",
        ((3, 5, 4), (4,), (4,)),
        lambda x, w, b: F.layer_norm(x, (4,), w, b, 1e-3),
        layer_norm_backward,
        by=(0, 1, 2),
    ),
    Case(
        "group_norm",
        ((3, 4, 5), (4,)),
        lambda x, w: F.group_norm(x, 2, w, None, 1e-3),
        group_norm_backward,
        by=(0, 1),
    ),
    *(
        Case(
            f"batch_norm-{'training' if training else 'eval'}",
            ((3, 4, 5), (4,), (4,), torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)),
            batch_norm(training),
            batch_norm_backward(training),
            by=(0, 1),
        )
        for training in (True, False)
    ),
    Case(
        "weight_norm",
        ((3, 4), (1, 4)),
        lambda v, g: v * (g / torch.linalg.vector_norm(v, 2, 0, keepdim=True)),
        weight_norm_backward,
        by=(0, 1),
    ),
    Case("cdist", ((3, 4), (5, 4)), lambda x, y: torch.cdist(x, y, 3.0), cdist_backward),
    Case(
        "pdist",
        ((4, 3),),
        lambda x: torch.pdist(x, 3.0),
        lambda grad, x: aten._pdist_backward(grad, x, 3.0, aten._pdist_forward(x, 3.0)),
    ),
    Case(
        "segment_reduce",
        ((6, 3),),
        lambda x: torch.segment_reduce(x, "mean", lengths=LENGTHS, initial=0.0),
        lambda grad, x: aten._segment_reduce_backward(
            grad,
            torch.segment_reduce(x, "mean", lengths=LENGTHS, initial=0.0),
            x,
            "mean",
            lengths=LENGTHS,
            initial=0.0,
        ),
    ),
    Case(
        "attention",
        ((1, 2, 5, 4),) * 3,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        attention_backward,
        by=(0, 1, 2),
    ),
    *(
        Case(
            f"{mode}_pad{n}d",
            ((2, 2, *[4] * n),),
            lambda x, mode=mode, n=n: F.pad(x, [1, 2] * n, mode={"reflection": "reflect"}.get(mode, "replicate")),
            lambda grad, x, mode=mode, n=n: getattr(aten, f"{mode}_pad{n}d_backward")(grad, x, [1, 2] * n),
        )
        for mode in ("reflection", "replication")
        for n in (1, 2, 3)
    ),
]


def given(case: Case) -> tuple[list[Tensor], list[Tensor | None]]:
    """The inputs and their masks, with an empty row and a full one."""
    generator = torch.Generator().manual_seed(sum(map(ord, case.name)))
    tensors: list[Tensor] = []
    masks: list[Tensor | None] = []
    for n, value in enumerate(case.inputs):
        data = value if isinstance(value, Tensor) else torch.randn(value, generator=generator, dtype=torch.float64)
        mask = torch.rand(data.shape, generator=generator) < 0.7
        if mask.ndim > 1:
            mask[0], mask[-1] = False, True
        tensors.append(data)
        masks.append(None if n in case.plain else mask)
    return tensors, masks


def wanted(case: Case, tensors: list[Tensor], masks: list[Tensor | None]) -> tuple[list[Tensor], Tensor, Tensor]:
    """By the oracle: a gradient for each of `case.by`, given an incoming gradient and its mask, which come too."""
    leaves = [t.clone().requires_grad_(n in case.by) for n, t in enumerate(tensors)]
    noted = {id(t): m for t, m in zip(leaves, masks, strict=True) if m is not None}
    result = expected(case.forward, leaves, {}, noted)
    data, mask = (result.data, result.mask) if isinstance(result, Expected) else (result, torch.ones_like(result) == 1)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(data.shape, generator=generator, dtype=torch.float64)
    known = torch.rand(data.shape, generator=generator) < 0.8 if data.ndim else torch.tensor(True)
    counted = torch.where(mask & known, data * grad, 0).sum()
    found = torch.autograd.grad(counted, [leaves[n] for n in case.by], allow_unused=True)
    return [torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(case.by, found, strict=True)], grad, known


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_the_formula_is_the_gradient_of_the_masked_operator(case):
    tensors, masks = given(case)
    gradients, grad, known = wanted(case, tensors, masks)
    results = case.backward(hidden(grad, known), *map(hidden, tensors, masks))
    results = results if isinstance(results, (list, tuple)) else [results]
    for n, result, gradient in zip(case.by, results, gradients, strict=False):
        mask = masks[n]
        assert torch.equal(result.get_mask(), torch.ones_like(gradient) == 1 if mask is None else mask)
        torch.testing.assert_close(result.to_tensor(0), torch.where(result.get_mask(), gradient, 0))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_with_nothing_masked_it_is_torchs_own(case):
    tensors, masks = given(case)
    _, grad, _ = wanted(case, tensors, [None] * len(masks))
    plain = case.backward(grad, *tensors)
    mine = case.backward(
        masked_tensor(grad), *(t if m is None else masked_tensor(t) for t, m in zip(tensors, masks, strict=True))
    )
    for a, b in zip(*(r if isinstance(r, (list, tuple)) else [r] for r in (mine, plain)), strict=True):
        assert is_masked_tensor(a)
        assert a._validity is None
        assert a.get_data().equal(b)


@pytest.mark.parametrize("log", [False, True])
def test_autocast_leaves_the_formulas_alone(log):
    case = softmax_backward(log)
    tensors, masks = given(case)
    _, grad, known = wanted(case, tensors, masks)
    x, g = hidden(tensors[0], masks[0]), hidden(grad, known)
    pool = [[1, 2], [1, 2], [0, 0], False, True, None]
    outside = aten.avg_pool2d_backward(g[None, :, :4:2], x[None], *pool)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = aten.avg_pool2d_backward(g[None, :, :4:2], x[None], *pool)
    assert inside.dtype is outside.dtype is torch.float64
    assert inside.to_tensor(0).equal(outside.to_tensor(0))
