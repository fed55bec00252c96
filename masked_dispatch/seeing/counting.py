"""Count the valid elements of a tensor, and find the elements that became invalid or valid in a call.

If a result has the positions of an operand (elementwise operators, scans, norms, writes), the masks are compared
element by element. An operator that moves elements never changes their validity. All other operators, such as
reductions and products, make new elements, so only the shares of valid elements are compared.
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

# Results in these categories have the positions of their operands, after broadcasting.
_IN_PLACE = {"elementwise", "scan", "normalization", "choice", "random", "assignment", "accumulation"}
# Operators in these categories write to their first operand.
_WRITES = {"assignment", "accumulation"}
# Operators in these categories move elements: joins, views, pads, lookups.
_MOVES = {"movement", "join", "indexing", "factory", "plumbing", "query", "derivative"}
# These operators of this library return a plain tensor of all elements, including invalid ones.
EXPORTS = {"to_tensor", "get_data", "to_torch_sparse"}


class Snapshot(NamedTuple):
    """The mask of a dense tensor before a call: its stored validity, or None if all elements are valid."""

    shape: torch.Size
    validity: Tensor | None
    known: bool


def is_countable(tensor: Tensor) -> bool:
    """Return whether a masked tensor has a mask with readable values."""
    if not isinstance(tensor, MaskedTensor):
        return True
    if tensor._carries_transform:
        return False
    return has_values(tensor._kept_values if isinstance(tensor, SparseMaskedTensor) else tensor._data)


def valid_count(tensor: Tensor) -> int | None:
    """Return the number of valid elements; None if the mask has no readable values."""
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
    """Return a word for the storage of a tensor."""
    if isinstance(tensor, SparseMaskedTensor):
        name = str(tensor._pattern.layout.name).removeprefix("torch.").removeprefix("sparse_")
        name = "packed" if name == "jagged" else name
        return name if tensor._order is None else f"{name}, permuted"
    return "dense" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.sparse_")


def operand_of(name: str, tensor: Tensor, source: tuple[int, ...] = ()) -> Operand:
    """Build the trace's record of a tensor."""
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


def snapshot(tensor: Tensor, written: bool) -> Snapshot:
    """Keep the mask of a tensor before a call; copy it if the call writes to the tensor."""
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
    """Return the change of validity in a call of an operator of `category`.

    operands, before  its masked operands, and their masks before the call
    results, after    its results
    """
    if not operands or not results or any(o.valid is None for o in (*operands, *results)):
        return Change()
    if not any(result.masked for result in results):
        missing = sum(o.numel - (o.valid or 0) for o in operands[:1])
        exports = name in EXPORTS and missing > 0
        return Change(grown=exports, grown_elements=missing if exports else None)
    if category in _WRITES:  # the written values bring their own validity
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


def _element_by_element(
    result: Operand, tensor: Tensor, operands: Sequence[Operand], before: Sequence[Snapshot]
) -> tuple[int, int] | None:
    """Count the result's elements that are invalid though some operand's is valid, and valid though no operand's is.

    Only operands that broadcast to the result count; None if there are none.
    """
    pairs = [(o, s) for o, s in zip(operands, before, strict=True) if _broadcasts(o.shape, result.shape)]
    if not pairs:
        return None
    if type(tensor) is not MaskedTensor or not all(s.known for _, s in pairs):
        same = [o.valid or 0 for o, _ in pairs if o.shape == result.shape]
        valid = result.valid or 0
        return (max(0, max(same) - valid), max(0, valid - max(same))) if same else None
    now = mask_of(tensor._validity, result.shape, tensor)
    masks = [mask_of(s.validity, s.shape, tensor) for _, s in pairs]
    some = functools.reduce(torch.bitwise_or, masks)
    return int((some & ~now).sum()), int((now & ~some).sum())


def mask_of(validity: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    if validity is None:
        return torch.ones((), dtype=torch.bool, device=like.device).expand(shape)
    return validity.to(torch.bool).expand(shape)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))


def _by_share(operands: Sequence[Operand], results: Sequence[Operand]) -> Change:
    before = [o.share for o in operands if o.share is not None]
    after = [r.share for r in results if r.masked and r.share is not None]
    if not before or not after:
        return Change()
    return Change(lost=min(after) < min(before), grown=max(after) > max(before))
