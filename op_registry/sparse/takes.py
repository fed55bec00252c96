"""The calls that a lowering takes, stated in front of its body.

A lowering refuses a call for one of a few reasons: an operand is stored in another way, or has elements nowhere, or
operands differ in dtype or in their number of dimensions, or nothing may be read while tracing. They are stated by the
names of arguments, and the text of the refusal follows::

    @on_call(sparse="self", one_dtype="self, values", eager=True)
    def index_put(c): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from op_registry.autocast import autocast_on
from op_registry.bound import Bound
from op_registry.records.dense import Dense, map_tensors
from op_registry.records.dims import known_to_hold, shape_alone
from op_registry.records.tracing import being_traced
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import Sparse


@dataclass(frozen=True)
class Takes:
    """What has to hold of a call. Arguments are named in one string, "self, weight"; those that are None always fit.

    sparse        stored sparsely, with dense dimensions last; of a list, each
    dense         stored densely
    no_dense_dims if stored sparsely, without dense dimensions
    one_dtype     operands of one dtype
    one_ndim      operands of one number of dimensions
    floats        operands of float32 or float64, outside of autocast: the operator computes in their own dtype
    eager         whether sizes depend on numbers, which are not known while tracing
    elements      whether each operand needs an element; torch's results for none are computed densely
    only          values that arguments must have: the operator's other variants run densely
    """

    sparse: str = ""
    dense: str = ""
    no_dense_dims: str = ""
    one_dtype: str = ""
    one_ndim: str = ""
    floats: str = ""
    eager: bool = False
    elements: bool = False
    only: tuple[tuple[str, Any], ...] = ()

    def misfit(self, c: Bound) -> str | None:
        """Why the call is not taken, as a clause; None if it is."""
        return next(self._misfits(c), None)

    def _misfits(self, c: Bound) -> Iterator[str]:
        yield from self._of_storage(c)
        for names, what, of in ((self.one_dtype, "dtypes", _dtype), (self.one_ndim, "numbers of dimensions", _ndim)):
            found = {name: of(x) for name in _listed(names) if (x := c.named.get(name)) is not None}
            if len(set(found.values())) > 1:
                values = " and ".join(f"`{name}` has {value}" for name, value in found.items())
                yield f"its operands have different {what}: {values}"
        for name in _listed(self.floats):
            x = c.named.get(name)
            if x is not None and (x.dtype not in (torch.float32, torch.float64) or autocast_on(x.device)):
                yield f"it computes `{name}`, of {x.dtype}, in another dtype"
        for name, value in self.only:
            if name in c and c[name] is not value and c[name] != value:
                yield f"{name}={c[name]!r}, and only {name}={value!r} is written for sparse storage"
        for record in _records(c) if self.eager else ():
            if being_traced(_stored(record)):
                yield "its result has as many elements as the numbers say, which are unknown while tracing"
        for record in _records(c) if self.elements else ():
            if any(known_to_hold(size == 0) for size in record.shape):
                yield f"an operand of shape {tuple(record.shape)} has no elements"

    def _of_storage(self, c: Bound) -> Iterator[str]:
        for name in _listed(self.sparse):
            for record in _each(c.named.get(name)):
                if isinstance(record, Dense):
                    yield f"`{name}` is stored densely"
                elif isinstance(record, Permuted):
                    yield f"`{name}` has dense dimensions before sparse ones"
        for name in _listed(self.no_dense_dims):
            if any(isinstance(record, Sparse) and record.dense_sizes for record in _each(c.named.get(name))):
                yield f"`{name}` has dense dimensions"
        for name in _listed(self.dense):
            if any(isinstance(record, (Sparse, Permuted)) for record in _each(c.named.get(name))):
                yield f"`{name}` is stored sparsely"


ANY_CALL = Takes()


def raise_error_of_torch(c: Bound) -> None:
    """Raises torch's error for operands of these shapes: the operator runs on tensors without memory.

    They hold bytes, since torch refuses a strided tensor of 2**63 bytes; integers keep their dtype, for indices.
    """

    def alone(record: Any) -> torch.Tensor:
        floats = record.dtype.is_floating_point or record.dtype.is_complex
        return shape_alone(record.shape).to(torch.uint8 if floats else record.dtype)

    c.map(alone, (Dense, Sparse, Permuted)).applied(c.op)


def _listed(names: str) -> list[str]:
    return names.replace(",", " ").split()


def _each(value: Any) -> list[Any]:
    """The records in an argument: none, one, or those of a list."""
    found: list[Any] = []
    map_tensors(found.append, [value], (Dense, Sparse, Permuted))
    return found


def _records(c: Bound) -> list[Any]:
    return _each(list(c.named.values()))


def _stored(record: Any) -> torch.Tensor:
    base = record.base if isinstance(record, Permuted) else record
    data: torch.Tensor = base.values.data if isinstance(base, Sparse) else base.data
    return data


def _dtype(record: Any) -> Any:
    return record.dtype


def _ndim(record: Any) -> Any:
    return record.ndim
