"""The calls that a lowering takes, stated in front of its body.

A lowering refuses a call for one of a few reasons: an operand is stored in another way, or has elements nowhere, or
operands differ in dtype or in their number of dimensions, or nothing may be read while tracing. They are stated by the
names of arguments, and the text of the refusal follows::

    @on_call(sparse="self", one_dtype="self, values", eager=True)
    def index_put(c): ...
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from op_registry.autocast import autocast_on
from op_registry.bound import Bound
from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.dense import Dense
from op_registry.records.dims import shape_alone
from op_registry.records.tracing import being_traced
from op_registry.sparse.permuted import RECORDS, Permuted
from op_registry.sparse.record import Sparse


@dataclass(frozen=True)
class Takes:
    """What has to hold of a call. Arguments are named in one string, "self, weight"; those that are None always fit.

    sparse        stored sparsely, with dense dimensions last; of a list, each
    dense         stored densely; of a list, each
    packed        packed batches of sequences, whose dimensions may be shown in another order
    no_dense_dims if stored sparsely, without dense dimensions
    one_dtype     operands of one dtype
    one_ndim      operands of one number of dimensions
    floats        operands of float32 or float64, outside of autocast: the operator computes in their own dtype
    only          values that arguments must have: the operator's other variants run densely
    eager         whether sizes depend on numbers, which are not known while tracing
    elements      operands that need an element, or True for each; torch's results for none are computed densely
    """

    sparse: str = ""
    dense: str = ""
    packed: str = ""
    no_dense_dims: str = ""
    one_dtype: str = ""
    one_ndim: str = ""
    floats: str = ""
    only: tuple[tuple[str, Any], ...] = ()
    eager: bool = False
    elements: bool | str = False

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments that the conditions name."""
        stated = [getattr(self, field.name) for field in fields(self)]
        return (*[name for value in stated if isinstance(value, str) for name in listed(value)], *dict(self.only))

    def misfit(self, c: Bound) -> str | None:
        """Why the call is not taken, as a clause; None if it is."""
        for check, stated in self._stated:
            for reason in check(c, stated):
                return reason
        return None

    @functools.cached_property
    def _stated(self) -> list[tuple[Callable[[Bound, Any], Iterator[str]], Any]]:
        """The conditions that are stated, each with the names of its arguments, or with its value."""
        given = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(_CHECKS[name], listed(value) if isinstance(value, str) else value) for name, value in given if value]


def listed(names: str) -> list[str]:
    """The names in a condition."""
    return names.replace(",", " ").split()


# Each yields why a call does not meet a condition: stated of arguments, or of the call.


def _sparse(c: Bound, names: list[str]) -> Iterator[str]:
    for name in names:
        for record in _each(c.named.get(name)):
            if isinstance(record, Dense):
                yield f"`{name}` is stored densely"
            elif isinstance(record, Permuted):
                yield f"`{name}` has dense dimensions before sparse ones"


def _dense(c: Bound, names: list[str]) -> Iterator[str]:
    for name in names:
        if not all(isinstance(record, Dense) for record in _each(c.named.get(name))):
            yield f"`{name}` is stored sparsely"


def _packed(c: Bound, names: list[str]) -> Iterator[str]:
    for name in names:
        for record in _each(c.named.get(name)):
            base = record.base if isinstance(record, Permuted) else record
            if isinstance(base, Dense) or not base.pattern.layout.of_sequences:
                yield f"`{name}` is no packed batch"


def _no_dense_dims(c: Bound, names: list[str]) -> Iterator[str]:
    for name in names:
        if any(isinstance(record, Sparse) and record.dense_sizes for record in _each(c.named.get(name))):
            yield f"`{name}` has dense dimensions"


def _differ(what: str, of: Callable[[Any], Any]) -> Callable[[Bound, list[str]], Iterator[str]]:
    def check(c: Bound, names: list[str]) -> Iterator[str]:
        found = {name: of(x) for name in names if (x := c.named.get(name)) is not None}
        if len(set(found.values())) > 1:
            values = " and ".join(f"`{name}` has {value}" for name, value in found.items())
            yield f"its operands have different {what}: {values}"

    return check


def _floats(c: Bound, names: list[str]) -> Iterator[str]:
    for name in names:
        x = c.named.get(name)
        if x is not None and (x.dtype not in (torch.float32, torch.float64) or autocast_on(x.device)):
            yield f"it computes `{name}`, of {x.dtype}, in another dtype"


def _only(c: Bound, values: tuple[tuple[str, Any], ...]) -> Iterator[str]:
    for name, value in values:
        if name in c and c[name] is not value and c[name] != value:
            yield f"{name}={c[name]!r}, and only {name}={value!r} is written for sparse storage"


def _eager(c: Bound, stated: bool) -> Iterator[str]:
    for record in _each(list(c.named.values())):
        if being_traced(_stored(record)):
            yield "its result has as many elements as the numbers say, which are unknown while tracing"


def _elements(c: Bound, stated: bool | list[str]) -> Iterator[str]:
    for record in _each([c.named.get(name) for name in (c.named if stated is True else stated or ())]):
        stored = record.base if isinstance(record, Permuted) else record
        if known_to_hold(math.prod(stored.shape) == 0):
            yield f"an operand of shape {tuple(record.shape)} has no elements"


_CHECKS: dict[str, Callable[[Bound, Any], Iterator[str]]] = {
    "sparse": _sparse,
    "dense": _dense,
    "packed": _packed,
    "no_dense_dims": _no_dense_dims,
    "one_dtype": _differ("dtypes", lambda x: x.dtype),
    "one_ndim": _differ("numbers of dimensions", lambda x: x.ndim),
    "floats": _floats,
    "only": _only,
    "eager": _eager,
    "elements": _elements,
}


ANY_CALL = Takes()


def raise_error_of_torch(c: Bound) -> None:
    """Raises torch's error for operands of these shapes: the operator runs on tensors without memory.

    They hold bytes, since torch refuses a strided tensor of 2**63 bytes; integers keep their dtype, for indices.
    """

    def alone(record: Any) -> torch.Tensor:
        floats = record.dtype.is_floating_point or record.dtype.is_complex
        return shape_alone(record.shape).to(torch.uint8 if floats else record.dtype)

    c.map(alone, RECORDS).applied(c.op)


def _each(value: Any) -> list[Any]:
    """The records in an argument: none, one, or those of a list."""
    if isinstance(value, RECORDS):
        return [value]
    return [record for item in value for record in _each(item)] if isinstance(value, (list, tuple)) else []


def _stored(record: Any) -> torch.Tensor:
    base = record.base if isinstance(record, Permuted) else record
    return base.values.data if isinstance(base, Sparse) else base.data
