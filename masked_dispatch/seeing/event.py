"""A call as an audit checks it, with its tensors, and notes on tensors, which traces make too."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.weak import WeakTensorKeyDictionary

from masked_dispatch.seeing.calls import Call
from masked_dispatch.seeing.counting import is_countable, mask_of
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.bound import Bound
from op_registry.dimensions.labels import Labels
from op_registry.extents.factors import there
from op_registry.records.dense import Dense
from op_registry.records.tracing import has_values
from op_registry.resolve import resolve


@dataclass(frozen=True)
class Found:
    """What a check has found in a call: a kind of :data:`masked_dispatch.seeing.audit.KINDS`, and how many elements.

    count  None if nobody has counted, because it would have waited for a device
    """

    kind: str
    count: int | None


class Line(NamedTuple):
    """A line of the caller's."""

    file: str
    number: int


@dataclass(eq=False)
class Taken:
    """A tensor argument, with its mask before the call."""

    name: str
    tensor: Tensor
    validity: Tensor | None

    @functools.cached_property
    def valid(self) -> Tensor:
        return mask_of(self.validity, self.tensor.shape, self.tensor)

    @functools.cached_property
    def there(self) -> Tensor:
        return there_of(self.tensor)

    @property
    def is_masked(self) -> bool:
        return isinstance(self.tensor, MaskedTensor)


@dataclass
class Event:
    """A call that has ended, of dense tensors, at a line of a caller's.

    op, name, category  the overload, the operator's name without "_" at its end, and the category of its rule
    named               the arguments by name
    batch_end           what a view has said of an end of the batch
    """

    op: OpOverload
    name: str
    category: str
    call: Call
    named: Mapping[str, Any]
    operands: list[Taken]
    writes: bool
    batch_end: str = ""
    results: list[Tensor] = field(default_factory=list)

    @functools.cached_property
    def labels(self) -> Labels | None:
        """The labels of the dimensions of operands and results, if a rule states them."""
        rule = resolve(self.op).rule
        return None if rule is None else Bound(rule, self.op, self.named).labels

    @functools.cached_property
    def dims(self) -> list[Sequence[Any]]:
        """The labels of the dimensions of each operand; none if no rule states them."""
        if self.name == "einsum":
            letters: list[Sequence[Any]] = self.named["equation"].replace(" ", "").partition("->")[0].split(",")
            return letters if len(letters) == len(self.operands) else []
        found: list[Sequence[Any]] = [] if self.labels is None else [*self.labels.operands.values()]
        return found if len(found) == len(self.operands) else []

    def dim_in_result(self, taken: Taken, dim: int, number: int) -> int | None:
        """The dimension of a result that is this one of an operand (of numbers, the first); None if nobody knows."""
        ndim = self.results[number].ndim
        results = () if self.labels is None else self.labels.results
        if self.name == "einsum":
            results = (self.named["equation"].replace(" ", "").partition("->")[2],)
        if not any(results) or not ndim or not self.dims:
            return dim if ndim == taken.tensor.ndim else None
        label = self.dims[next(i for i, t in enumerate(self.operands) if t is taken)][dim : dim + 1]
        labels = results[number] if number < len(results) else ()
        return next((d for d, other in enumerate(labels) if (other,) == tuple(label)), None)

    def again(self, instead: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        """The first result of the call with other tensors `instead`, None for the same; None if that is refused.

        The same are copies: the call may write to them, as to running statistics.
        """

        def given(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [given(item) for item in value]
            if not isinstance(value, Tensor):
                return value
            other = instead(value)
            return value.clone() if other is None else other

        devices = {t.tensor.device for t in self.operands if t.tensor.device.type == "cuda"}
        try:
            with torch.random.fork_rng(devices=devices):
                result = self.op(**{name: given(value) for name, value in self.named.items()})
        except (RuntimeError, ValueError, TypeError):
            return None
        first = result[0] if isinstance(result, (list, tuple)) else result
        return first if isinstance(first, Tensor) else None

    @property
    def masked(self) -> list[Taken]:
        return [taken for taken in self.operands if taken.is_masked]

    @property
    def result(self) -> MaskedTensor | None:
        """The first result, if it is masked."""
        first = self.results[0] if self.results else None
        return first if isinstance(first, MaskedTensor) else None


class Check(Protocol):
    def __call__(self, event: Event, line: Line) -> Iterator[Found]: ...


def valid_of(tensor: Tensor) -> Tensor:
    """bool of the tensor's shape: its mask; a plain tensor is valid everywhere."""
    return mask_of(tensor._validity if isinstance(tensor, MaskedTensor) else None, tensor.shape, tensor)


def can_be_read(tensor: Tensor) -> bool:
    """Whether an audit looks at the tensor: it is stored densely, and has values."""
    if isinstance(tensor, MaskedTensor):
        return type(tensor) is MaskedTensor and is_countable(tensor)
    return has_values(tensor)


def record_of(x: MaskedTensor) -> Dense:
    """The record of a dense tensor."""
    return Dense(x._data, x._validity, x._extent)


def there_of(tensor: Tensor) -> Tensor:
    """bool of the tensor's shape: which positions are there."""
    if not isinstance(tensor, MaskedTensor) or tensor._extent is None:
        return mask_of(None, tensor.shape, tensor)
    return there(record_of(tensor))


def any_of_row(elements: Tensor) -> Tensor:
    return elements.flatten(1).any(1) if elements.ndim > 1 else elements.reshape(-1)


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
