"""What `audit` names in linear algebra: rows that are lost, sums of different rows, and outputs of pruned weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import masked_dispatch as md
from audited_calls import advice_of, findings_in
from op_registry.laws.categories import CONTRACTION

GENERATOR = torch.Generator().manual_seed(0)
# Features around 5, and a target.
MASK = torch.rand(40, 3, generator=GENERATOR) > 0.2
A = md.masked_tensor(5 + torch.randn(40, 3, generator=GENERATOR), MASK)
TARGET = torch.randn(40, 1, generator=GENERATOR)
WITH_ONES = torch.cat([A, torch.ones(40, 1)], 1)
ROWS = MASK.all(1)
CENTRED = A - A.mean(0)
PADDED = md.from_lengths(torch.randn(3, 5, 4, generator=GENERATOR), torch.tensor([5, 2, 3]))
ROWS_MISSING = A.to_tensor(0) + md.masked_tensor(torch.zeros(40, 1), ROWS[:, None])


@pytest.mark.parametrize(
    "f",
    [
        lambda: torch.linalg.solve(A.mT @ A, A.mT @ TARGET),
        lambda: torch.matmul(A.T, A),
        lambda: A.mT.mm(A),
        lambda: WITH_ONES.mT @ WITH_ONES,
        lambda: A.unsqueeze(0).mT @ A.unsqueeze(0),
    ],
)
def test_a_product_with_its_own_transpose(f: Callable[[], Any]) -> None:
    assert findings_in(f) == [("own transpose", int((~MASK).sum()))]


def test_what_it_says() -> None:
    assert advice_of(lambda: A.mT @ A) == [
        "    a tensor with holes was multiplied by its own transpose: its sums leave out different rows, and do not "
        f"fit one another: {int((~MASK).sum())} elements",
        "    -> centre first, x - x.mean(0); or take the rows without holes, x[x.get_mask().all(1)]; or torch.cov(x.T)",
    ]
    assert advice_of(lambda: torch.linalg.lstsq(A, TARGET)) == [
        "    a matrix with holes has no result: an invalid element makes all of it invalid: 3 rows",
        "    -> take the rows without holes, x[x.get_mask().all(1)]; or centre the columns and fill them, "
        "(x - x.mean(0)).to_tensor(0)",
    ]


@pytest.mark.parametrize(
    "f",
    [
        lambda: CENTRED.mT @ CENTRED,
        lambda: torch.cov(A.T),
        lambda: torch.corrcoef(A.T),
        lambda: torch.linalg.lstsq(A[ROWS], TARGET[ROWS]),
        lambda: A[ROWS].mT @ A[ROWS],
        lambda: torch.linalg.lstsq(CENTRED.to_tensor(0), TARGET),
        lambda: ROWS_MISSING @ ROWS_MISSING.mT,
        lambda: ROWS_MISSING.mT @ ROWS_MISSING,
        lambda: PADDED @ PADDED.mT,
        lambda: PADDED.mT @ PADDED,
        lambda: A.mT @ CENTRED,
        lambda: torch.linalg.cholesky(md.masked_tensor(torch.eye(3), torch.zeros(3, 3).bool())),
    ],
)
def test_what_is_right_is_silent(f: Callable[[], Any]) -> None:
    assert findings_in(f) == []


@pytest.mark.parametrize("f", [torch.linalg.pinv, torch.linalg.qr, lambda a: torch.linalg.inv(a[:3])])
def test_a_matrix_that_a_hole_makes_invalid(f: Callable[[Any], Any]) -> None:
    one_hole = md.masked_tensor(torch.eye(40)[:, :3] + 1, torch.arange(120).view(40, 3) != 4)
    assert [kind for kind, _ in findings_in(lambda: f(one_hole))] == ["lost matrix"]


# ------------------------------------------------------------------------------ outputs of which all weights are pruned

aten = torch.ops.aten
BIAS = torch.tensor([1.0, 10.5])


def pruned(*shape: int, dim: int = 0) -> md.MaskedTensor:
    """Weights, of which all are pruned whose index of a dimension is 1."""
    index = torch.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return md.masked_tensor(torch.ones(shape), (index != 1).expand(shape))


def convolution(n: int, transposed: bool) -> tuple[Any, ...]:
    weight = pruned(4, 2, *[3] * n, dim=1) if transposed else pruned(2, 4, *[3] * n)
    return torch.ones(2, 4, *[5] * n), weight, BIAS, [1] * n, [1] * n, [1] * n, transposed, [0] * n, 1


X = torch.ones(3, 4)
LAST = (False, False, True)
# A call of every product that adds a bias.
CALLS: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: F.linear(X, pruned(2, 4), BIAS),
    "addmm": lambda: torch.addmm(BIAS, X, pruned(4, 2, dim=1)),
    "addmm of a row": lambda: torch.addmm(BIAS[None], X, pruned(4, 2, dim=1)),
    "_addmm_activation": lambda: aten._addmm_activation(BIAS, X, pruned(4, 2, dim=1)),
    "baddbmm": lambda: torch.baddbmm(BIAS, X[None], pruned(4, 2, dim=1)[None]),
    "addbmm": lambda: torch.addbmm(BIAS, X[None], pruned(4, 2, dim=1)[None]),
    "conv1d": lambda: F.conv1d(torch.ones(2, 4, 5), pruned(2, 4, 3), BIAS),
    "conv2d": lambda: F.conv2d(torch.ones(2, 4, 5, 5), pruned(2, 2, 3, 3), BIAS, groups=2),
    "conv3d": lambda: F.conv3d(torch.ones(2, 4, 5, 5, 5), pruned(2, 4, 3, 3, 3), BIAS, padding="same"),
    "_convolution_mode": lambda: aten._convolution_mode(
        torch.ones(2, 4, 5), pruned(2, 4, 3), BIAS, [1], "valid", [1], 1
    ),
    "conv_transpose1d": lambda: F.conv_transpose1d(torch.ones(2, 4, 5), pruned(4, 2, 3, dim=1), BIAS),
    "conv_transpose2d": lambda: F.conv_transpose2d(torch.ones(2, 4, 5, 5), pruned(4, 2, 3, 3, dim=1), BIAS),
    "conv_transpose3d": lambda: F.conv_transpose3d(torch.ones(2, 4, 3, 3, 3), pruned(4, 2, 3, 3, 3, dim=1), BIAS),
    "convolution": lambda: aten.convolution(*convolution(2, True)),
    "_convolution": lambda: aten._convolution(*convolution(1, False), *LAST, False),
    "conv_tbc": lambda: torch.conv_tbc(torch.ones(5, 2, 4), pruned(3, 4, 2, dim=2), BIAS),
    "bilinear": lambda: F.bilinear(X, X, pruned(2, 4, 4), BIAS),
    "gru": lambda: recurrent(nn.GRU, 6)(torch.ones(3, 2, 4))[0],
    "lstm": lambda: recurrent(nn.LSTM, 8)(torch.ones(3, 2, 4))[0],
    "layer_norm": lambda: F.layer_norm(X[:, :2], (2,), pruned(2), BIAS),
    "batch_norm": lambda: F.batch_norm(X[:, :2], None, None, pruned(2), BIAS, True),
    "group_norm": lambda: F.group_norm(X[:, :2], 1, pruned(2), BIAS),
    "matmul": lambda: X @ pruned(2, 4).T + BIAS,
    "matmul before": lambda: BIAS + X @ pruned(2, 4).T,
    "matmul in place": lambda: (X @ pruned(2, 4).T).add_(BIAS),
    "bmm": lambda: torch.bmm(X[None], pruned(2, 4).mT[None]) - BIAS,
    "mm": lambda: torch.mm(X, pruned(2, 4).mT) + BIAS,
    "einsum": lambda: torch.einsum("ij,kj->ik", X, pruned(2, 4)) + BIAS,
}
# They have no dimension of samples, or are written for a GPU, or have a bias for each group of rows.
OTHERS = {"addmv", "addr", "_grouped_mm"}


def recurrent(kind: Callable[..., nn.Module], rows: int) -> nn.Module:
    layer = kind(4, 2)
    layer.weight_ih_l0 = nn.Parameter(pruned(rows, 4))
    return layer


def test_every_product_with_a_bias_is_asked() -> None:
    with_bias = set()
    for rule in md.registry.rules():
        for op in rule.ops if rule.category is CONTRACTION else ():
            if "bias" in [a.name for a in op._schema.arguments] or "+" in str(rule.dims):
                with_bias.add(op._schema.name.partition("::")[2])
    assert with_bias - CALLS.keys() == OTHERS


@pytest.mark.parametrize("name", CALLS)
def test_an_output_without_weights_is_named(name: str) -> None:
    with md.audit() as report:
        result = CALLS[name]()
    (finding,) = report.findings
    assert (finding.kind, finding.count) == ("pruned output", 1)
    assert not result.get_mask().all()


LAYERS: dict[str, tuple[nn.Module, Tensor]] = {
    "Linear": (nn.Linear(4, 2), torch.ones(3, 4)),
    "Conv1d": (nn.Conv1d(4, 2, 3), torch.ones(3, 4, 5)),
    "ConvTranspose2d": (nn.ConvTranspose2d(4, 2, 3), torch.ones(3, 4, 5, 5)),
    "Bilinear": (nn.Bilinear(4, 4, 2), torch.ones(3, 4)),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_named_at_the_line_that_calls_it(name: str, grad: bool) -> None:
    layer, x = LAYERS[name]
    dim = 1 if "Transpose" in name else 0
    layer.weight = nn.Parameter(pruned(*layer.weight.shape, dim=dim))
    model = nn.Sequential(layer) if name != "Bilinear" else layer
    with torch.set_grad_enabled(grad), md.audit() as report:
        y = model(x, x) if name == "Bilinear" else model(x)
        if grad:
            y.sum().backward()
    (finding,) = report.findings
    assert finding.code.startswith("y = model(x, x)")
    assert str(finding).partition(": ")[2] == (
        "all weights of an output are invalid, so that its bias is lost and it is invalid in every sample (1 output): "
        "if pruned weights are zeros, write them, weight.to_tensor(0.); or give the outputs a value, y.to_tensor(0.)"
    )


def test_a_padded_batch() -> None:
    x = md.from_lengths(torch.ones(3, 5, 4), torch.tensor([4, 2, 0]))
    with md.audit() as report:
        F.linear(x, pruned(2, 4), BIAS)
    assert [(f.kind, f.count) for f in report.findings] == [("pruned output", 1)]


def hidden(shape: tuple[int, ...], *index: Any) -> md.MaskedTensor:
    mask = torch.ones(shape, dtype=torch.bool)
    mask[index] = False
    return md.masked_tensor(torch.ones(shape), mask)


# Nothing valid, but not for want of weights; or no bias is lost.
SILENT: dict[str, Callable[[], Tensor]] = {
    "a feature that all samples lack": lambda: F.linear(hidden((3, 4), slice(None), 3), torch.ones(2, 4), BIAS),
    "the only feature of an output": lambda: F.linear(
        hidden((3, 4), slice(None), 3), hidden((2, 4), 1, slice(3)), BIAS
    ),
    "nothing valid": lambda: F.linear(hidden((3, 4), ...), torch.ones(2, 4), BIAS),
    "nothing valid, addmm": lambda: torch.addmm(BIAS, hidden((3, 4), ...), torch.ones(4, 2)),
    "a missing channel of a group": lambda: F.conv1d(
        hidden((3, 4, 5), slice(None), slice(2)), torch.ones(2, 2, 3), BIAS, groups=2
    ),
    "a missing sample": lambda: F.linear(hidden((3, 4), 1), torch.ones(2, 4), BIAS),
    "a missing sample, and a sum": lambda: hidden((3, 4), 1) @ torch.ones(4, 2) + BIAS,
    "a missing sample, and its own": lambda: torch.addmm(torch.ones(3, 2), hidden((3, 4), 1), torch.ones(4, 2)),
    "some weights": lambda: F.linear(X, hidden((2, 4), 1, slice(3)), BIAS),
    "without a bias": lambda: F.linear(X, pruned(2, 4)),
    "an invalid bias": lambda: F.linear(X, pruned(2, 4), hidden((2,), 1)),
    "zeros": lambda: F.linear(X, pruned(2, 4).to_tensor(0.0), BIAS),
    "a residual": lambda: X[:, :2] + X @ pruned(2, 4).T,
}


@pytest.mark.parametrize("name", SILENT)
def test_other_holes_are_none_of_it(name: str) -> None:
    with md.audit() as report:
        SILENT[name]()
    assert "pruned output" not in [finding.kind for finding in report.findings]


def test_asking_changes_nothing() -> None:
    mean, generator = torch.zeros(2), torch.get_rng_state()
    with md.audit() as report:
        F.batch_norm(X[:, :2], mean, torch.ones(2), pruned(2), BIAS, True)
    assert len(report) == 1
    assert torch.equal(mean, torch.full((2,), 0.1))
    assert torch.equal(torch.get_rng_state(), generator)
