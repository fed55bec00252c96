"""The wrapper of sparse storage: values and a pattern in place of data and a validity."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from masked_dispatch.interception import PRE_DISPATCH, make_data_pointer_raise, make_wrapper_subclass, never_compiled
from masked_dispatch.tensor import MaskedTensor
from op_registry import MaskedSemanticsError
from op_registry.patterns import Pattern
from op_registry.records import Dense
from op_registry.sparse import Sparse
from op_registry.turned import Turned


class NotDense(MaskedSemanticsError):
    """Something that works on dense storage met a sparsely stored tensor: the call has to take the other way.

    Where there is no other way, it is the refusal.
    """

    def __init__(self, tensor: SparselyStored) -> None:
        super().__init__(tensor)
        self.tensor = tensor

    def __str__(self) -> str:
        # Said only where nobody takes the other way, which is seldom.
        return (
            f"a masked tensor of shape {tuple(self.tensor.shape)} is stored as {self.tensor.storage_layout}, and only "
            "dense storage is supported here yet: use x.to_dense()"
        )


class SparselyStored(MaskedTensor):
    """A masked tensor of which only some elements are stored; the others are invalid."""

    # The stored values, as the pattern lists them. They never require grad: the wrapper carries autograd.
    _kept_values: Tensor
    # int8, 1 where a stored value is valid; None where all are.
    _kept_validity: Tensor | None
    _pattern: Pattern
    # Where dense dimensions are seen before sparse ones: which dimension of what is stored each is (turned.py).
    _order: tuple[int, ...] | None = None

    @property
    def _data(self) -> Tensor:  # type: ignore[override]
        raise NotDense(self)

    @property  # type: ignore[misc]
    def _validity(self) -> Tensor | None:  # type: ignore[override]
        raise NotDense(self)

    @property
    def nnz(self) -> int:
        """Number of stored elements; of blocks, every element of each."""
        return self._pattern.stored

    @property
    def storage_layout(self) -> torch.layout:
        """How the values are stored, whatever `layout` says."""
        return self._pattern.layout

    @property
    def record(self) -> Sparse | Turned:
        """What is stored, without derivatives."""
        return self.seen(Sparse(Dense(self._kept_values, self._kept_validity), self._pattern))

    def seen(self, base: Sparse) -> Sparse | Turned:
        """Something stored in the order in which it is stored here, in the order in which its dimensions are seen."""
        return base if self._order is None else Turned(base, self._order)

    def keep(self, record: Sparse | Turned) -> None:
        """Store something else of the same shape."""
        self._order = None
        if isinstance(record, Turned):
            self._order, record = record.order, record.base
        self._kept_values = record.values.data
        self._kept_validity = record.values.full_validity
        self._pattern = record.pattern

    def share_memory_(self) -> MaskedTensor:
        """Move all that is stored to shared memory, in place."""
        for piece in (self._kept_values, self._kept_validity, *self._pattern.pieces):
            if piece is not None:
                piece.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the values lie in shared memory."""
        return self._kept_values.is_shared()

    @never_compiled
    def __reduce_ex__(self, protocol: Any) -> Any:
        pattern = self._pattern
        stored = (
            self._kept_values,
            self._kept_validity,
            str(pattern.layout),
            pattern.sizes,
            pattern.pieces,
            pattern.block,
        )
        return rebuild_sparse, (*stored, self.requires_grad, getattr(self, "_is_param", False), self._order)

    @never_compiled
    def __tensor_flatten__(self) -> NoReturn:  # type: ignore[override]
        raise MaskedSemanticsError(
            f"a masked tensor of shape {tuple(self.shape)} that is stored as {self.storage_layout} cannot be compiled "
            "yet. Hand x.to_dense() to the compiled function, or call it outside of torch.compile."
        )

    def _stored_densely(self) -> MaskedTensor:
        return torch.ops.masked_dispatch.to_layout(self, torch.strided, None, None)

    def _copied(self) -> MaskedTensor:
        validity = None if self._kept_validity is None else self._kept_validity.clone()
        pattern = self._pattern
        pieces = tuple(piece.clone() for piece in pattern.pieces)
        record = Sparse(
            Dense(self._kept_values.clone(), validity), Pattern(pattern.layout, pattern.sizes, pieces, pattern.block)
        )
        copied = wrap_sparse(self.seen(record), self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True  # type: ignore[attr-defined]
        return copied


def wrap_sparse(record: Sparse | Turned, requires_grad: bool = False) -> SparselyStored:
    """A masked tensor of a record as it is (nothing is checked, copied or differentiated)."""
    wrapper: SparselyStored = make_wrapper_subclass(
        SparselyStored,
        record.shape,
        dtype=record.dtype,
        device=record.device,
        requires_grad=requires_grad,
        _extra_dispatch_keys=PRE_DISPATCH,
    )
    make_data_pointer_raise(wrapper)
    wrapper.keep(record)
    return wrapper


def rebuild_sparse(
    values: Tensor,
    validity: Tensor | None,
    layout: str,
    sizes: tuple[int, ...],
    pieces: tuple[Tensor, ...],
    block: tuple[int, int] | None,
    requires_grad: bool,
    is_parameter: bool,
    order: tuple[int, ...] | None = None,
) -> SparselyStored:
    """What pickle and torch.load call (format 1)."""
    pattern = Pattern(getattr(torch, layout.removeprefix("torch.")), sizes, pieces, block)
    stored = Sparse(Dense(values, validity), pattern)
    wrapper = wrap_sparse(stored if order is None else Turned(stored, order), requires_grad)
    if is_parameter:
        wrapper._is_param = True  # type: ignore[attr-defined]
    return wrapper


torch.serialization.add_safe_globals([rebuild_sparse])
