"""How much of a tensor is valid, and what became invalid or valid in a call.

Where a result has the positions of an operand (elementwise operators, scans, norms, writes), the masks are compared
element by element. An operator that moves elements changes the validity of none. Everything else, a reduction or a
product, makes new elements: there the shares are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from masked_dispatch.seeing.calls import Change, Operand
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry.records.tracing import has_values

# Categories whose results have the positions of their operands, which broadcast to them.
_IN_PLACE = {"elementwise", "scan", "normalization", "choice", "random", "assignment", "accumulation"}
# Of them those that write to their first operand.
_WRITES = {"assignment", "accumulation"}
# Categories that move elements: a join, a view, a pad, a lookup.
_MOVES = {"movement", "join", "indexing", "factory", "plumbing", "query", "derivative"}
# Our own operators that make a plain tensor of every element, invalid ones included.
EXPORTS = {"to_tensor", "get_data", "to_torch_sparse"}


class Snapshot(NamedTuple):
    """The mask of a tensor before a call: the validity as stored, None if all is valid; for dense storage."""

    shape: torch.Size
    validity: Tensor | None
    known: bool


def is_countable(tensor: Tensor) -> bool:
    """Whether a masked tensor has a mask that can be looked at."""
    if not isinstance(tensor, MaskedTensor):
        return True
    if tensor._carries_transform:
        return False
    return has_values(tensor._kept_values if isinstance(tensor, SparseMaskedTensor) else tensor._data)


@torch.no_grad()
def valid_count(tensor: Tensor) -> int | None:
    """The number of valid elements; None where it cannot be known."""
    if not isinstance(tensor, MaskedTensor):
        return tensor.numel()
    if not is_countable(tensor):
        return None
    if isinstance(tensor, SparseMaskedTensor):
        return int(tensor.record.count(range(tensor.ndim)))
    validity = tensor._validity
    if validity is None:
        return tensor.numel()
    return int(validity.sum()) * (tensor.numel() // validity.numel()) if validity.numel() else 0


def storage_name(tensor: Tensor) -> str:
    """How a tensor is stored, in a word."""
    if isinstance(tensor, SparseMaskedTensor):
        name = str(tensor._pattern.layout.name).removeprefix("torch.").removeprefix("sparse_")
        name = "packed" if name == "jagged" else name
        return name if tensor._order is None else f"{name}, permuted"
    return "dense" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.sparse_")


def operand_of(name: str, tensor: Tensor, source: tuple[int, ...] = ()) -> Operand:
    """What a trace keeps of a tensor."""
    return Operand(
        name,
        isinstance(tensor, MaskedTensor),
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        storage_name(tensor),
        valid_count(tensor),
        tensor.numel(),
        source,
    )


@torch.no_grad()
def snapshot(tensor: Tensor, written: bool) -> Snapshot:
    """The mask of a tensor before a call; a copy if the call writes to it."""
    if type(tensor) is not MaskedTensor or not is_countable(tensor):
        return Snapshot(tensor.shape, None, False)
    validity = tensor._validity
    return Snapshot(tensor.shape, validity.clone() if written and validity is not None else validity, True)


def change_of(
    category: str,
    name: str,
    operands: Sequence[Operand],
    before: Sequence[Snapshot],
    results: Sequence[Operand],
    after: Sequence[Tensor],
) -> Change:
    """What became invalid or valid in a call of an operator of `category`.

    operands, before  its masked operands, and their masks before the call
    results, after    its results
    """
    if not operands or not results or any(o.valid is None for o in (*operands, *results)):
        return Change()
    if not any(result.masked for result in results):
        missing = sum(o.numel - (o.valid or 0) for o in operands[:1])
        exports = name in EXPORTS and missing > 0
        return Change(grown=exports, grown_elements=missing if exports else None)
    if category in _WRITES:  # what it writes arrives with its validity
        operands, before = operands[:1], before[:1]
    if category in _IN_PLACE or name in ("mask_with", "mask_like"):
        found = [
            compared
            for result, tensor in zip(results, after, strict=True)
            if result.masked and (compared := _element_by_element(result, tensor, operands, before)) is not None
        ]
        if found:
            lost, grown = max(a for a, _ in found), max(b for _, b in found)
            return Change(lost > 0, grown > 0, lost, grown)
    return Change() if category in _MOVES else _by_share(operands, results)


@torch.no_grad()
def _element_by_element(
    result: Operand, tensor: Tensor, operands: Sequence[Operand], before: Sequence[Snapshot]
) -> tuple[int, int] | None:
    """Elements of the result that are invalid though an operand's are valid, and valid though all operands' are not.

    Operands are those that broadcast to the result; None if there are none.
    """
    pairs = [(o, s) for o, s in zip(operands, before, strict=True) if _broadcasts(o.shape, result.shape)]
    if not pairs:
        return None
    if type(tensor) is not MaskedTensor or not all(s.known for _, s in pairs):
        same = [o.valid or 0 for o, _ in pairs if o.shape == result.shape]
        valid = result.valid or 0
        return (max(0, max(same) - valid), max(0, valid - max(same))) if same else None
    now = _mask(tensor._validity, result.shape, tensor)
    masks = [_mask(s.validity, s.shape, tensor) for _, s in pairs]
    some = functools.reduce(torch.bitwise_or, masks)
    return int((some & ~now).sum()), int((now & ~some).sum())


def _mask(validity: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    if validity is None:
        return torch.ones(1, dtype=torch.bool, device=like.device).expand(shape)
    return validity.to(torch.bool).expand(shape)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))


def _by_share(operands: Sequence[Operand], results: Sequence[Operand]) -> Change:
    before = [o.share for o in operands if o.share is not None]
    after = [r.share for r in results if r.masked and r.share is not None]
    if not before or not after:
        return Change()
    return Change(lost=min(after) < min(before), grown=max(after) > max(before))
