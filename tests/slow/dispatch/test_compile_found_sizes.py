"""Compiled regions in which a size depends on data, as that of ``x[mask]`` does, under masks of every kind.

Such a size is not known while the graph is made. What asks whether it is 1 or 0 must not decide anything by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from storages import storages_but

DATA = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 2, 3)
MASKS = {
    "stored in full": DATA.sin() < 0.5,
    "of each row": torch.tensor([True, False, True, True])[:, None, None],
    "of each column": torch.tensor([True, False, True])[None, None, :],
    "of the dimension between": torch.tensor([True, False])[None, :, None],
}
CHOSEN = torch.tensor([True, False, True, True])

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda rows: rows.flatten(1),
    "flatten with what was found": lambda rows: rows.flatten(0, 1),
    "unflatten": lambda rows: rows.flatten(1).unflatten(1, (2, 3)),
    "slice": lambda rows: rows[1:],
    "repeat": lambda rows: rows.repeat(2, 1, 1).flatten(1),
    "cat along what was found": lambda rows: torch.cat([rows, rows]),
    "linear": lambda rows: F.linear(rows, torch.ones(5, 3, dtype=torch.float64)).flatten(1),
    "sum": lambda rows: rows.sum(0),
    "amax": lambda rows: rows.amax(),
    "softmax": lambda rows: rows.softmax(-1),
    "cumsum": lambda rows: rows.cumsum(0),
    "sort": lambda rows: rows.sort(0).values,
    "topk": lambda rows: rows.topk(2).values,
    "median": lambda rows: rows.median(),
    "median of a dimension": lambda rows: rows.median(0).values,
    "mse_loss": lambda rows: F.mse_loss(rows, 2 * rows),
    "index_select": lambda rows: rows.index_select(0, torch.tensor([1])),
}


@pytest.fixture(autouse=True)
def sizes_are_captured() -> Iterator[None]:
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_follows_a_boolean_index(name: str) -> None:
    def program(x: Tensor, chosen: Tensor) -> Tensor:
        return PROGRAMS[name](x[chosen])

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    for kind in MASKS if name == "flatten" else ("stored in full", "of the dimension between"):
        x = md.masked_tensor(DATA, MASKS[kind])
        found, wanted = compiled(x, CHOSEN), program(x, CHOSEN)
        assert torch.equal(found.get_mask(), wanted.get_mask()), kind
        assert torch.equal(found.to_tensor(0), wanted.to_tensor(0)), kind


@pytest.mark.parametrize("kind", ["stored in full", "of the dimension between"])
def test_what_was_found_may_be_nothing(kind: str) -> None:
    """One graph for any number of rows found, none among them: the sum of nothing is valid, and 0."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = x[chosen]
        return rows.sum(0), rows.flatten(1), F.mse_loss(rows, 2 * rows)

    x = md.masked_tensor(DATA, MASKS[kind])
    compiled(x, CHOSEN)
    total, flat, loss = compiled(x, torch.zeros(4, dtype=torch.bool))
    assert total.get_mask().all()
    assert not total.get_data().any()
    assert flat.shape == (0, 6)
    assert loss.isnan()  # torch's own 0 / 0
    assert loss.get_mask()


def test_a_number_read_in_a_graph() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x: Tensor) -> Tensor:
        return x * x.sum().item()

    x = md.masked_tensor(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, True, False]))
    assert compiled(x).to_tensor(0).tolist() == [3.0, 6.0, 0.0]


# ------------------------------------------------------------------------- beside matrices that are stored sparsely

MATRIX = torch.linspace(-1, 2, 16, dtype=torch.float64).reshape(4, 4)
MATRIX_MASKS = {"partly valid": MATRIX.cos() > 0.2, "nothing valid": torch.zeros(4, 4, dtype=torch.bool)}
SOME = storages_but("dense", "coo", "csr", "bsc", "permuted")

OF_STORED: dict[str, Callable[[Tensor], Any]] = {
    "gradient, one of its results": lambda x: torch.gradient(x, dim=1)[0] * 2,
    "gradient": lambda x: torch.gradient(x),
    "rows @ stored": lambda x: MATRIX[CHOSEN] @ x.mT,
    "masked rows @ stored": lambda x: md.as_masked_tensor(MATRIX, MATRIX_MASKS["partly valid"])[CHOSEN] @ x.mT,
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x * x, MATRIX, log_input=False),
    "mse_loss, summed": lambda x: F.mse_loss(x, MATRIX, reduction="sum"),
    "huber_loss of each": lambda x: F.huber_loss(x, MATRIX, reduction="none"),
    "quantile": lambda x: x.index_select(-1, torch.tensor([0, 1, 0])).quantile(0.5, -1),
    "columns by a mask": lambda x: x.to_dense()[:, CHOSEN].mask_with(x.to_dense()[:, CHOSEN].get_mask()),
}


@pytest.mark.parametrize("mask", MATRIX_MASKS)
@pytest.mark.parametrize("storage", SOME)
@pytest.mark.parametrize("name", OF_STORED)
def test_beside_a_stored_matrix(name: str, storage: str, mask: str) -> None:
    x = SOME[storage](md.masked_tensor(MATRIX, MATRIX_MASKS[mask]))
    expected = OF_STORED[name](x)
    found = torch.compile(OF_STORED[name], fullgraph=True, backend="aot_eager")(x)
    md.testing.assert_close(found, expected)
