"""A call while it runs: its tensors, and their masks before and after. What is kept of it is numbers (calls.py).

If a result has the positions of an operand (elementwise operators, scans, norms, writes), the masks are compared
element by element. An operator that moves elements never changes their validity. All other operators, such as
reductions and products, make new elements, so only the shares of valid elements are compared.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.weak import WeakTensorKeyDictionary

from masked_dispatch.densification import Densification
from masked_dispatch.seeing.calls import Call, Change, Operand
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import schema_of
from op_registry.bound import Bound, bind_by_name
from op_registry.dimensions.labels import Labels
from op_registry.extents.factors import there
from op_registry.records.dense import Dense, map_tensors
from op_registry.records.tracing import has_values
from op_registry.resolve import Meaning


@dataclass(eq=False)
class OpenCall:
    """A call of an operator or a module that has not returned yet.

    call     the record so far
    shows    whether the recorder also records the calls inside it, as for modules and composite operators
    started  the time of its start; `spent` is the time that the thread had spent on counting until then
    module   the identity of the module, 0 for an operator
    """

    call: Call
    shows: bool
    started: float = 0.0
    spent: float = 0.0
    densified: list[Densification] = field(default_factory=list)
    module: int = 0


@dataclass(eq=False)
class Argument:
    """A tensor argument of an operator, with its record and its mask before the call.

    validity  as it is stored; None also where it cannot be read, and then `is_known` is False
    """

    operand: Operand
    tensor: Tensor
    validity: Tensor | None
    is_known: bool = True

    @property
    def name(self) -> str:
        return self.operand.name

    @functools.cached_property
    def valid(self) -> Tensor:
        return mask_of(self.validity, self.tensor.shape, self.tensor)

    @functools.cached_property
    def in_extent(self) -> Tensor:
        return in_extent(self.tensor)

    @property
    def is_masked(self) -> bool:
        return isinstance(self.tensor, MaskedTensor)


@dataclass(eq=False, kw_only=True)
class Event(OpenCall):
    """A call of an operator, with its tensors, while it runs and when it has ended.

    batch_end  what a view has reported of an end of the batch
    """

    op: OpOverload
    meaning: Meaning
    args: Sequence[object]
    kwargs: Mapping[str, object]
    operands: list[Argument] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    batch_end: str = ""

    @functools.cached_property
    def overload_name(self) -> str:
        """The operator's name without its namespace."""
        return schema_of(self.op).name.rpartition("::")[2]

    @property
    def name(self) -> str:
        """The same without "_" at its end."""
        return self.overload_name.rstrip("_")

    @property
    def category(self) -> str:
        """The category of the rule."""
        return "" if self.meaning.rule is None else self.meaning.rule.category.name

    @property
    def writes(self) -> bool:
        return schema_of(self.op).is_mutable

    @functools.cached_property
    def named(self) -> Mapping[str, Any]:
        """The arguments by name."""
        return bind_by_name(self.op, self.args, self.kwargs)

    @functools.cached_property
    def labels(self) -> Labels | None:
        """The labels of the dimensions of operands and results, if a rule states them."""
        rule = self.meaning.rule
        return None if rule is None else Bound(rule, self.op, self.named).labels

    @functools.cached_property
    def dims(self) -> list[Sequence[Any]]:
        """The labels of the dimensions of each operand; none if no rule states them."""
        if self.name == "einsum":
            letters: list[Sequence[Any]] = self.named["equation"].replace(" ", "").partition("->")[0].split(",")
            return letters if len(letters) == len(self.operands) else []
        labels: list[Sequence[Any]] = [] if self.labels is None else [*self.labels.operands.values()]
        return labels if len(labels) == len(self.operands) else []

    def dim_in_result(self, argument: Argument, dim: int, number: int) -> int | None:
        """The dimension of a result that is this one of an operand (of numbers, the first); None if nobody knows."""
        ndim = self.results[number].ndim
        results = () if self.labels is None else self.labels.results
        if self.name == "einsum":
            results = (self.named["equation"].replace(" ", "").partition("->")[2],)
        if not any(results) or not ndim or not self.dims:
            return dim if ndim == argument.tensor.ndim else None
        label = self.dims[next(i for i, a in enumerate(self.operands) if a is argument)][dim : dim + 1]
        labels = results[number] if number < len(results) else ()
        return next((d for d, other in enumerate(labels) if (other,) == tuple(label)), None)

    def again(self, instead: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        """The first result of the call with other tensors `instead`, None for the same; None if that is refused.

        The same are copies: the call may write to them, as to running statistics.
        """

        def replaced(tensor: Tensor) -> Tensor:
            other = instead(tensor)
            return tensor.clone() if other is None else other

        devices = {a.tensor.device for a in self.operands if a.tensor.device.type == "cuda"}
        try:
            with torch.random.fork_rng(devices=devices):
                result = self.op(**{name: map_tensors(replaced, value, Tensor) for name, value in self.named.items()})
        except (RuntimeError, ValueError, TypeError):
            return None
        first = result[0] if isinstance(result, (list, tuple)) else result
        return first if isinstance(first, Tensor) else None

    @property
    def masked(self) -> list[Argument]:
        return [argument for argument in self.operands if argument.is_masked]

    @property
    def result(self) -> MaskedTensor | None:
        """The first result, if it is masked."""
        first = self.results[0] if self.results else None
        return first if isinstance(first, MaskedTensor) else None


def argument_of(name: str, tensor: Tensor, source: tuple[int, ...], is_written: bool) -> Argument:
    """A tensor argument before its call; its mask is copied if the call writes to the tensor."""
    operand = operand_of(name, tensor, source)
    if type(tensor) is not MaskedTensor or not is_countable(tensor):
        return Argument(operand, tensor, None, is_known=not operand.masked)
    validity = tensor._validity
    return Argument(operand, tensor, validity.clone() if is_written and validity is not None else validity)


# ---------------------------------------------------------------------------------------------- masks and their extents


def mask_of(validity: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    if validity is None:
        return torch.ones((), dtype=torch.bool, device=like.device).expand(shape)
    return validity.to(torch.bool).expand(shape)


def valid_of(tensor: Tensor) -> Tensor:
    """bool of the tensor's shape: its mask; a plain tensor is valid everywhere."""
    return mask_of(tensor._validity if isinstance(tensor, MaskedTensor) else None, tensor.shape, tensor)


def in_extent(tensor: Tensor) -> Tensor:
    """bool of the tensor's shape: which positions are in its extent; all of a tensor without one."""
    if not isinstance(tensor, MaskedTensor) or tensor._extent is None:
        return mask_of(None, tensor.shape, tensor)
    return there(record_of(tensor))


def record_of(x: MaskedTensor) -> Dense:
    """The record of a dense tensor."""
    return Dense(x._data, x._validity, x._extent)


def any_of_row(elements: Tensor) -> Tensor:
    return elements.flatten(1).any(1) if elements.ndim > 1 else elements.reshape(-1)


def is_countable(tensor: Tensor) -> bool:
    """Return whether a masked tensor has a mask with readable values."""
    if not isinstance(tensor, MaskedTensor):
        return True
    if tensor._carries_transform:
        return False
    return has_values(tensor._kept_values if isinstance(tensor, SparseMaskedTensor) else tensor._data)


def can_be_read(tensor: Tensor) -> bool:
    """Whether an audit looks at the tensor: it is stored densely, and has values."""
    if isinstance(tensor, MaskedTensor):
        return type(tensor) is MaskedTensor and is_countable(tensor)
    return has_values(tensor)


# -------------------------------------------------------------------------------------------------------------- numbers


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


# -------------------------------------------------------------------------------------------------- lost, and grown

# Results in these categories have the positions of their operands, after broadcasting.
_IN_PLACE = {"elementwise", "scan", "normalization", "choice", "random", "assignment", "accumulation"}
# Operators in these categories write to their first operand.
_WRITES = {"assignment", "accumulation"}
# Operators in these categories move elements: joins, views, pads, lookups.
_MOVES = {"movement", "join", "indexing", "factory", "plumbing", "query", "derivative"}
# These operators of this library return a plain tensor of all elements, including invalid ones.
EXPORTS = {"to_tensor", "get_data", "to_torch_sparse"}


def change_of(event: Event) -> Change:
    """Return the change of validity in a call that has ended."""
    name, arguments = event.overload_name, event.masked
    operands, results = event.call.masked_operands, event.call.results
    if not operands or not results or any(o.valid is None for o in (*operands, *results)):
        return Change()
    if not any(result.masked for result in results):
        missing = sum(o.numel - (o.valid or 0) for o in operands[:1])
        exports = name in EXPORTS and missing > 0
        return Change(grown=exports, grown_elements=missing if exports else None)
    if event.category in _WRITES:  # the written values bring their own validity
        operands, arguments = operands[:1], arguments[:1]
    if event.category in _IN_PLACE or name in ("mask_with", "mask_like"):
        pairs = zip(results, event.results, strict=True)
        counts = [_element_by_element(result, tensor, arguments) for result, tensor in pairs if result.masked]
        if compared := [count for count in counts if count is not None]:
            lost, grown = map(max, zip(*compared, strict=True))
            return Change(lost > 0, grown > 0, lost, grown)
    return Change() if event.category in _MOVES else _by_share(operands, results)


def _element_by_element(result: Operand, tensor: Tensor, arguments: Sequence[Argument]) -> tuple[int, int] | None:
    """Count the result's elements that are invalid though some operand's is valid, and valid though no operand's is.

    Only operands that broadcast to the result count; None if there are none.
    """
    arguments = [argument for argument in arguments if _broadcasts(argument.operand.shape, result.shape)]
    if not arguments:
        return None
    if type(tensor) is not MaskedTensor or not all(argument.is_known for argument in arguments):
        same = [a.operand.valid or 0 for a in arguments if a.operand.shape == result.shape]
        valid = result.valid or 0
        return (max(0, max(same) - valid), max(0, valid - max(same))) if same else None
    now = mask_of(tensor._validity, result.shape, tensor)
    masks = [mask_of(argument.validity, argument.operand.shape, tensor) for argument in arguments]
    some = functools.reduce(torch.bitwise_or, masks)
    return int((some & ~now).sum()), int((now & ~some).sum())


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))


def _by_share(operands: Sequence[Operand], results: Sequence[Operand]) -> Change:
    before = [o.share for o in operands if o.share is not None]
    after = [r.share for r in results if r.masked and r.share is not None]
    if not before or not after:
        return Change()
    return Change(lost=min(after) < min(before), grown=max(after) > max(before))


# ---------------------------------------------------------------------------------------------------- notes on tensors


class Notes:
    """What a trace or a check remembers of tensors, as long as they live."""

    def __init__(self) -> None:
        self._of_plain: Any = WeakTensorKeyDictionary()

    def get(self, tensor: Tensor) -> Any:
        if isinstance(tensor, MaskedTensor):
            return tensor.__dict__.get(_NOTES, {}).get(self)
        return self._of_plain.get(tensor)

    def set(self, tensor: Tensor, note: Any) -> None:
        if isinstance(tensor, MaskedTensor):  # (a weak reference to a parameter keeps nn.Module.to from swapping it)
            tensor.__dict__.setdefault(_NOTES, weakref.WeakKeyDictionary())[self] = note
        else:
            self._of_plain[tensor] = note


_NOTES = "_notes_of_traces"
