"""The masked tensor around torchax tensors.

Arrays of jax have neither views nor writes. So a write gives a tensor other arrays, a view is a copy that says so where
it would be noticed, and ``x[index] = value`` writes to the whole tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.dispatch.assign import receive_extent
from masked_dispatch.dispatch.run_rule import has_masked
from masked_dispatch.tensor.assignment import as_source
from masked_dispatch.tensor.masked_tensor import MaskedTensor, with_extent, wrap
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.tensor.traced import wrappers
from masked_dispatch.torch_internals import tracking_views_and_versions, without_dispatch_modes
from masked_dispatch.torchax.internals import has_array, operators_of, to_cpu
from op_registry import MaskedSemanticsError
from op_registry.records.dense import Dense
from op_registry.records.extent import Along, Extent, Factor
from op_registry.records.validity import as_int8
from op_registry.schema import is_view

aten = torch.ops.aten


@dataclass
class Held:
    """What a masked tensor holds; ``x.detach()`` and ``x.data`` hold the same."""

    data: Tensor
    validity: Tensor | None = None


class OnJax(MaskedTensor):
    """A masked tensor whose data and mask are torchax tensors; torch's C++ takes it to be on meta, as it does them.

    On the device "jax" autograd would ask for a runtime that torch does not have, and end the process; it would
    also compute gradients in another thread, where jax knows nothing of the trace.
    """

    _held: Held
    # Whether this is what ``x.detach()`` gave, which jax does not differentiate either.
    _stopped = False
    # Of a view, the version at which it was copied from its base, whose version it shares.
    _copied_at: int | None = None

    @property
    def _data(self) -> Tensor:  # type: ignore[override]
        if self._copied_at is not None and self._version != self._copied_at:
            raise MaskedSemanticsError(read_after_write(self))
        data = self._held.data
        return data.detach() if self._stopped and not has_array(data) else data

    @_data.setter
    def _data(self, data: Tensor) -> None:
        self._held = Held(data)

    @property
    def _stored_validity(self) -> Tensor | None:  # type: ignore[override]
        return self._held.validity

    @_stored_validity.setter
    def _stored_validity(self, validity: Tensor | None) -> None:
        self._held.validity = validity

    @property
    def _family(self) -> None:  # type: ignore[override]
        """None: nothing has memory that others share."""
        return

    @_family.setter
    def _family(self, family: object) -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._held.data.device

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # torch has switched torchax's mode off in here.
        with operators_of(_first_among(args)._held.data):
            if op is aten.copy_.default and isinstance(args[0], OnJax):
                return assigned(args[0], args[1])
            result = super().__torch_dispatch__(op, types, args, kwargs or {})
        if op is aten.detach.default and isinstance(result, OnJax):
            result._held, result._copied_at, result._stopped = args[0]._held, args[0]._copied_at, True
        elif is_view(op):
            for view in result if isinstance(result, (list, tuple)) else [result]:
                view._copied_at = None if view.is_inference() else args[0]._version
        return result

    def __setitem__(self, index: Any, value: Any) -> None:  # type: ignore[override]
        positions = torch.arange(self.numel(), device=self.device).reshape(self.shape)[index]
        value = as_source(value, self)
        if not isinstance(value, Tensor):
            super().__setitem__(index, value)  # raises torch's error
            return
        while value.ndim > positions.ndim and value.shape[0] == 1:
            value = value[0]
        written = torch.index_put(self.reshape(-1), (positions,), value.to(self.dtype))
        self.copy_(written.reshape(self.shape))

    @property
    def _printed_record(self) -> Dense:
        data, validity = self._data, self._held.validity
        if not has_array(data):
            return Dense(data, validity)
        return Dense(to_cpu(data), None if validity is None else to_cpu(validity), moved_extent(self, to_cpu))

    def _all_valid_data(self, method: str) -> Tensor:
        return to_cpu(super()._all_valid_data(method))

    def __reduce_ex__(self, protocol: object) -> NoReturn:  # type: ignore[override]
        raise MaskedSemanticsError(
            f"a masked tensor of shape {tuple(self.shape)} on {self.device} cannot be saved: save x.cpu(), and move "
            "it to jax after loading."
        )


def _first_among(values: Iterable[object]) -> OnJax:
    """The first such masked tensor among the arguments, or in lists among them."""
    for value in values:
        if isinstance(value, OnJax):
            return value
        if isinstance(value, (list, tuple)):
            return _first_among(value)
    raise AssertionError("an operator reached OnJax.__torch_dispatch__ without one")


def assigned(target: OnJax, source: Tensor) -> OnJax:
    """The target, with the values and the validity of `source`, of any dtype and of a shape that can be expanded."""
    if target._copied_at is not None:
        raise MaskedSemanticsError(written_through_view(target))
    written = Dense(source, None)
    if isinstance(source, MaskedTensor):
        written = Dense(source._data, source._validity, source._extent)
    receive_extent(target, written)
    data, validity = written.data, written.validity
    with tracking_views_and_versions():  # so that backward notices
        target._held.data.copy_(data.expand(target.shape))
    target._held.validity = None if validity is None else as_int8(validity.expand(target.shape))
    return target


def claim(values: Sequence[object]) -> contextlib.AbstractContextManager[Any] | None:
    """The context of a call that torchax must leave to torch, because a masked tensor is among its arguments.

    Those of torch's own devices are computed without torchax, which would make jax's arrays of the constants of a rule.
    """
    if not has_masked(values):
        return None
    return contextlib.nullcontext() if _any_on_jax(values) else without_dispatch_modes()


def _any_on_jax(values: Iterable[object]) -> bool:
    return any(
        _any_on_jax(value) if isinstance(value, (list, tuple)) else isinstance(value, OnJax) or type(value) in wrappers
        for value in values
    )


def moved(to: Callable[..., Tensor], x: MaskedTensor, *args: Any, **kwargs: Any) -> Any:
    """``x.to(…)`` of a masked tensor, where `to` moves a plain one.

    To torchax tensors or from them it gives a leaf, like torchax's own tensors; other calls are those of torch.
    """
    if isinstance(x, SparseMaskedTensor):
        return x.to(*args, **kwargs)
    data, validity = to(x._data, *args, **kwargs), x._validity
    if (type(data) in wrappers) is isinstance(x, OnJax):
        return x.to(*args, **kwargs)
    if isinstance(x, OnJax):  # the memory that torchax gives is that of jax's array
        on_cpu = wrap(data.clone(), None if validity is None else to_cpu(validity), requires_grad=x.requires_grad)
        return with_extent(on_cpu, moved_extent(x, to_cpu))
    on_jax = wrap(data, None if validity is None else to(validity, data.device), requires_grad=x.requires_grad)
    return with_extent(on_jax, moved_extent(x, lambda there: to(there, data.device)))


def moved_extent(x: MaskedTensor, move: Callable[[Tensor], Tensor]) -> Extent | None:
    """A tensor's extent, whose booleans are moved."""
    extent = x._extent
    if extent is None:
        return None
    moved = (f if f.said is None else Factor(f.along, move(f.there)) for f in extent.factors)
    return Extent(tuple(moved), extent.is_mask)


def written_through_view(view: OnJax) -> str:
    """The error text of a write that would not reach the base."""
    return (
        f"a write to a view of shape {tuple(view.shape)} of a masked tensor on {view.device}: jax arrays have no "
        "views; this view is a copy, and its base would not change. Assign to the base, x[index] = value (x[index] "
        "= x[index] + 1 for x[index] += 1), or use the operator that returns a tensor."
    )


def read_after_write(view: OnJax) -> str:
    """The error text of a view that is read after its base was written to."""
    return (
        f"a view of shape {tuple(view.shape)} of a masked tensor on {view.device} is read after its base was written "
        "to: jax arrays have no views, and this view is a copy of the old values. Take the view after the write, or "
        "take a copy, view.clone(), before it."
    )


# ------------------------------------------------------------- functions of jax: masked tensors as nodes of its pytrees

# What each factor of an extent knows of each dimension, and whether the mask is the extent; None without one.
Known = tuple[tuple[tuple[Along, ...], ...], bool] | None


@dataclass(frozen=True)
class Carrier:
    """Data, validity and booleans of a masked tensor, as arrays of jax or what stands for them."""

    children: tuple[Any, ...]
    known: Known


def register_with_jax() -> None:
    """Make masked tensors and carriers nodes of jax's pytrees."""
    from jax.tree_util import register_pytree_node

    register_pytree_node(OnJax, taken_apart, assembled)
    register_pytree_node(Carrier, lambda carrier: (carrier.children, carrier.known), assembled)
    for kind in (MaskedTensor, SparseMaskedTensor):
        register_pytree_node(kind, refused, assembled)


def taken_apart(x: OnJax) -> tuple[tuple[Any, ...], Known]:
    """The leaves of a masked tensor, and what is known of its extent without reading one."""
    extent = x._extent
    if extent is None:
        return (x._data, x._validity), None
    theres = (None if factor.said is None else factor.there for factor in extent.factors)
    return (x._data, x._validity, *theres), (extent.known, extent.is_mask)


def assembled(known: Known, children: Sequence[Any]) -> MaskedTensor | Carrier:
    """A masked tensor of torchax tensors, a carrier of anything else."""
    data, validity, *theres = children
    if not isinstance(data, Tensor) or not all(t is None or isinstance(t, Tensor) for t in (validity, *theres)):
        return Carrier(tuple(children), known)
    if known is None:
        return wrap(data, validity)
    along, is_mask = known
    return with_extent(wrap(data, validity), Extent(tuple(map(Factor, along, theres)), is_mask))


def refused(x: MaskedTensor) -> Any:
    """A masked tensor that does not hold torchax tensors."""
    raise MaskedSemanticsError(
        f"a function of jax got a masked tensor of shape {tuple(x.shape)} on {x.device}, stored as "
        f"{x.storage_layout}: it takes densely stored ones, made of torchax tensors. Pass x.to_dense().to('jax')."
    )
