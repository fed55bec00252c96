"""Assignment by index in every spelling: ``x[i] = v`` is an assignment, whichever operator torch writes it with.

What is expected is computed on plain tensors from the positions that an index names: they take the value and its
validity; an invalid index names none, and a plain tensor takes no invalid value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from masked_dispatch import functional
from masked_dispatch.api.construct import as_masked_tensor, from_lengths, masked_tensor
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.errors import MaskedSemanticsError

SHAPE = (3, 4)
DATA = torch.arange(1.0, 13.0).reshape(SHAPE)
HOLES = torch.tensor([[True, False, True, True], [False, False, True, True], [True, True, False, True]])
ROWS = torch.tensor([[True], [False], [True]])
LENGTHS = torch.tensor([2, 0, 4])
CHOSEN = torch.tensor([[True, True, False, False], [True, False, False, True], [False, True, True, False]])

MODES = ("eager", "compiled", "vmap", "grad")

# What is written to: a plain tensor, or a masked one in a storage.
TARGETS: dict[str, Callable[[], Tensor]] = {
    "plain": DATA.clone,
    "strided": lambda: masked_tensor(DATA, HOLES),
    "strided, all valid": lambda: as_masked_tensor(DATA.clone()),
    "strided, a mask of rows": lambda: masked_tensor(DATA, ROWS.expand(SHAPE)),
    "strided, a view": lambda: masked_tensor(
        torch.nn.functional.pad(DATA, (1, 1, 1, 1)), torch.nn.functional.pad(HOLES, (1, 1, 1, 1))
    )[1:4, 1:5],
    "coo": lambda: masked_tensor(DATA, HOLES).to_layout(torch.sparse_coo),
    "csr": lambda: masked_tensor(DATA, HOLES).to_layout(torch.sparse_csr),
    "csc": lambda: masked_tensor(DATA, HOLES).to_layout(torch.sparse_csc),
    "bsr": lambda: masked_tensor(DATA, HOLES).to_sparse_bsr((1, 2)),
    "packed": lambda: from_lengths(DATA, LENGTHS).to_packed().without_extent(),
}

# What is written, as a number, and whether it is valid.
VALUES: dict[str, tuple[Callable[[], Any], float, bool]] = {
    "a float": (lambda: 0.5, 0.5, True),
    "an int": (lambda: 7, 7.0, True),
    "a bool": (lambda: True, 1.0, True),
    "a tensor": (lambda: torch.tensor(0.5), 0.5, True),
    "a masked scalar": (lambda: masked_tensor(torch.tensor(0.5), torch.tensor(True)), 0.5, True),
    "an invalid scalar": (lambda: masked_tensor(torch.tensor(0.5), torch.tensor(False)), 0.5, False),
}

_ENTRIES, _VALID = torch.tensor([2, 0, 1]), torch.tensor([True, False, True])


def _masked_indices() -> MaskedTensor:
    return masked_tensor(_ENTRIES, _VALID)


def _invalid_places(x: Tensor) -> Tensor:
    return ~x.get_mask() if isinstance(x, MaskedTensor) else CHOSEN


# The index as a caller writes it, and the plain one that names the positions that are written; or what makes it of `x`.
INDICES: dict[str, tuple[Callable[[], Any], Any]] = {
    "integer": (lambda: 1, 1),
    "integers": (lambda: (2, -1), (2, -1)),
    "slice": (lambda: slice(0, 2), slice(0, 2)),
    "slice of columns": (lambda: (slice(None), slice(1, None, 2)), (slice(None), slice(1, None, 2))),
    "list": (lambda: [0, 1], [0, 1]),
    "list of bools": (lambda: [True, True, False], [True, True, False]),
    "tensor": (lambda: torch.tensor([0, 1]), [0, 1]),
    "tensor without dimensions": (lambda: torch.tensor(1), 1),
    "tensor of columns": (lambda: (slice(None), torch.tensor([1])), (slice(None), [1])),
    "tensors": (lambda: (torch.tensor([0, 1]), torch.tensor([1, 0])), ([0, 1], [1, 0])),
    "tensor and integer": (lambda: (torch.tensor([0, 1]), 1), ([0, 1], 1)),
    "integer and tensor": (lambda: (1, torch.tensor([0, 1])), (1, [0, 1])),
    "boolean": (CHOSEN.clone, CHOSEN),
    "boolean of what is invalid": (lambda: _invalid_places, _invalid_places),
    "boolean of rows": (lambda: CHOSEN[:, 0], CHOSEN[:, 0]),
    "boolean of columns": (lambda: (slice(None), CHOSEN[0]), (slice(None), CHOSEN[0])),
    "boolean and integer": (lambda: (CHOSEN[:, 0], 1), (CHOSEN[:, 0], 1)),
    "ellipsis": (lambda: (..., 1), (..., 1)),
    "all": (lambda: slice(None), slice(None)),
    "new dimension": (lambda: (None, [1]), (None, [1])),
    "masked tensor": (_masked_indices, _ENTRIES[_VALID]),
    "masked tensor and integer": (lambda: (_masked_indices(), 1), (_ENTRIES[_VALID], 1)),
    "masked tensor of columns": (lambda: (slice(None), _masked_indices()), (slice(None), _ENTRIES[_VALID])),
    "masked boolean": (lambda: masked_tensor(CHOSEN, HOLES), CHOSEN & HOLES),
    "masked boolean of rows": (lambda: masked_tensor(CHOSEN[:, 0], _VALID), CHOSEN[:, 0] & _VALID),
}


# Those that read a number from data: torch before 2.15 ends a graph at the first, sparse storage at the others.
END_GRAPHS = ("tensor without dimensions", "boolean of columns", "boolean and integer")


@dataclass(frozen=True)
class Tried:
    """What came of every value and index, for one target in one mode: how many calls, and a line for each exception.

    refused  a MaskedSemanticsError
    wrong    another value or mask than expected, or any other error
    """

    calls: int
    refused: tuple[str, ...]
    wrong: tuple[str, ...]


def tried(mode: str, target: str, values: Sequence[str] = tuple(VALUES)) -> Tried:
    """Every assignment of these values to one target in one mode."""
    refused: list[str] = []
    wrong: list[str] = []
    calls = 0
    for value, index, written in _written(mode, TARGETS[target], values):
        calls += 1
        title = f"{target}, {mode}: x[{index}] = {value}"
        try:
            problem = _problem(TARGETS[target](), written(), index, value, mode)
        except MaskedSemanticsError as error:
            refused.append(f"{title}: {error}")
        except Exception as error:
            wrong.append(f"{title}: {type(error).__name__}: {error}")
        else:
            wrong += [f"{title}: {problem}"] if problem else []
    return Tried(calls, tuple(refused), tuple(wrong))


def _written(
    mode: str, make: Callable[[], Tensor], values: Sequence[str]
) -> Iterator[tuple[str, str, Callable[[], Tensor]]]:
    """For each value and index a function that makes the target, or its gradient, after the assignment."""
    for value in values:
        v = VALUES[value][0]()
        if mode == "compiled":
            yield from _compiled(value, make, v)
            continue
        for index, (make_index, _) in INDICES.items():
            i = make_index()
            assign = functools.partial(_assigned, i=i, v=v, copied=mode != "eager")
            yield value, index, _in_mode(mode, assign, make)


def _assigned(x: Tensor, i: Any, v: Any, copied: bool) -> Tensor:
    y = x.clone() if copied else x
    y[i(y) if callable(i) else i] = v
    return y


def _in_mode(mode: str, assign: Callable[[Tensor], Tensor], make: Callable[[], Tensor]) -> Callable[[], Tensor]:
    if mode == "vmap":
        return lambda: functional.vmap(assign)(torch.stack([make(), make()]))[1]
    if mode == "grad":
        return lambda: functional.grad(lambda x: assign(x).sum())(make())
    return lambda: assign(make())


def _compiled(value: str, make: Callable[[], Tensor], v: Any) -> Iterator[tuple[str, str, Callable[[], Tensor]]]:
    """The writes in one graph, so that a table takes seconds; an index that ends graphs is compiled by itself."""

    def region(x: Tensor, indices: list[Any]) -> list[Tensor]:
        return [_assigned(x, i, v, True) for i in indices]

    @functools.cache
    def run(names: tuple[str, ...]) -> dict[str, Tensor]:
        torch.compiler.reset()
        compiled = torch.compile(region, backend="aot_eager", fullgraph=len(names) > 1)
        return dict(zip(names, compiled(make(), [INDICES[name][0]() for name in names]), strict=True))

    in_one = tuple(index for index in INDICES if index not in END_GRAPHS)
    for index in INDICES:
        names = in_one if index in in_one else (index,)
        yield value, index, lambda index=index, names=names: run(names)[index]  # type: ignore[misc]


def _problem(before: Tensor, after: Tensor, index: str, value: str, mode: str) -> str | None:
    """What is not as expected of a target after an assignment, or of its gradient; None if all is."""
    number, valid = VALUES[value][1:]
    named = INDICES[index][1]
    positions = torch.arange(DATA.numel()).reshape(SHAPE)[named(before) if callable(named) else named].flatten()
    at = torch.zeros(DATA.numel(), dtype=torch.bool).index_fill(0, positions, True).reshape(SHAPE)
    mask = before.get_mask() if isinstance(before, MaskedTensor) else None
    data = before.to_tensor(0) if isinstance(before, MaskedTensor) else before
    if mask is None and not valid:
        at = torch.zeros_like(at)
    if mode == "grad":
        return _difference(after, torch.ones(SHAPE).masked_fill(at, 0.0), mask)
    return _difference(after, data.masked_fill(at, number), None if mask is None else torch.where(at, valid, mask))


def _difference(result: Tensor, data: Tensor, mask: Tensor | None) -> str | None:
    if mask is None:
        same = type(result) is Tensor and torch.equal(result, data)
    else:
        same = isinstance(result, MaskedTensor) and torch.equal(result.get_mask(), mask)
        same = same and torch.equal(result.to_tensor(0), torch.where(mask, data, 0))  # type: ignore[attr-defined]
    return (
        None
        if same
        else f"found {result!r}, expected {data.tolist()} valid at {None if mask is None else mask.tolist()}"
    )
