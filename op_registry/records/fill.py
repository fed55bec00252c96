"""Filling invalid elements: every rule does this before it combines data with other data."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from op_registry.records.arguments import Number, choose
from op_registry.records.tracing import being_traced, is_older_batch, may_be_read, recording, under_transform
from op_registry.records.validity import as_bool, dims_in_memory, in_order, kept_with, may_be_refused


class OwnFunction(torch.autograd.Function):
    """An autograd function that handles masks itself, so that torch's own `apply` calls it.

    masked_dispatch wraps `apply` of all other functions, to convert the gradients of masked tensors. This class takes
    torch's own `apply` before that.
    """

    apply = torch.autograd.Function.__dict__["apply"]


aten = torch.ops.aten

# For each dtype that the eager fill may treat as bits, the integer dtype of the same width.
_BITS = {
    torch.float64: torch.int64,
    torch.int64: torch.int64,
    torch.complex64: torch.int64,
    torch.float32: torch.int32,
    torch.int32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.int16: torch.int16,
    torch.int8: torch.int8,
    torch.uint8: torch.int8,
}
# We cache wide masks up to this many elements on the mask, and recompute larger ones each time, which costs little.
_KEPT_UP_TO = 1 << 16
# Elements of a slice per thread: the widened mask of a slice stays in the CPU cache.
SLICE = 1 << 17
# Below this many elements torch.where is faster, for values other than 0 and under autograd.
_WORTH_IT = 1 << 14
# We do not zero rows shorter than this one by one.
_LONG_ROW = 16


@contextlib.contextmanager
def small_as_large() -> Iterator[None]:
    """Inside, fills treat small tensors as large ones: for tests, whose tensors are small."""
    global _WORTH_IT, _LONG_ROW
    before = _WORTH_IT, _LONG_ROW
    _WORTH_IT = _LONG_ROW = 1
    try:
        yield
    finally:
        _WORTH_IT, _LONG_ROW = before


def fill_where_invalid(data: Tensor, validity: Tensor | None, value: Number | Tensor) -> Tensor:
    """`data` with `value` wherever `validity` says invalid; differentiable, and independent of the hidden values."""
    if validity is None:
        return data
    if data.dtype is torch.bool and not isinstance(value, Tensor):
        value = bool(value)  # torch.where(m, bools, 1) would give int64
    if not isinstance(value, Tensor) and _fills_bits(data, validity, value):
        zero_by = zero_selector(data, validity, value)
        if zero_by is not None:
            return aten.threshold_backward.default(data, zero_by, 0)
        if not (data.requires_grad and torch.is_grad_enabled()):
            return fill_bits(data, validity, value)
        if data.numel() >= _WORTH_IT:
            return Fill.apply(data, validity, value)
    valid = as_bool(validity)
    if valid.ndim == data.ndim and not isinstance(value, Tensor) and may_be_refused(data):
        dims = dims_in_memory(data)
        if dims is not None and dims != sorted(dims):  # (in the data's own order, torch asks nothing)
            filled = torch.where(in_order(valid.permute(dims)), data.permute(dims), value)
            return filled.permute([dims.index(d) for d in range(data.ndim)])
    if under_transform() and valid.ndim == data.ndim and valid.stride() != data.stride():
        # (torch.where's result has the strides of its first operand; a view may need the data's)
        order = sorted(range(data.ndim), key=data.stride().__getitem__, reverse=True)
        valid = valid.permute(order).contiguous().permute([order.index(d) for d in range(data.ndim)])
    return choose(valid, data, value)


def fill_in_place(data: Tensor, validity: Tensor | None, value: Number) -> Tensor:
    """The same for data computed for this call alone; without autograd, the result reuses the memory of `data`.

    The caller must not read `data` afterwards.
    """
    derived = data.requires_grad and torch.is_grad_enabled()
    if validity is None or derived or not _fills_bits(data, validity, value):
        return fill_where_invalid(data, validity, value)
    return fill_bits(data, validity, value, in_place=True)


def _fills_bits(data: Tensor, validity: Tensor, value: Number) -> bool:
    return (
        type(data) is Tensor
        and validity.dtype is torch.int8
        and data.is_cpu
        and can_fill_bits(data, value)
        and not under_transform()
        and not is_older_batch(data)
    )


def zero_where_invalid(grad: Tensor, validity: Tensor | None) -> Tensor:
    """A gradient with zeros wherever `validity` says invalid; the gradient itself if we know that it has them."""
    if validity is None:
        return grad
    if is_older_batch(grad):
        return fill_where_invalid(grad, validity, 0)
    if known_zero(grad, validity):
        return grad
    filled = fill_where_invalid(grad, validity, 0)
    remember_zero(filled, validity)
    return filled


def zeroed(fresh: Tensor, validity: Tensor | None) -> Tensor:
    """Zero the invalid rows of a result in place, if it has whole rows, so that operators that read it need no fill and
    no memory for one. Nothing else may hold the result, and autograd must not have saved it.
    """
    if (
        validity is None
        or type(fresh) is not Tensor
        or not may_be_read(fresh, validity)
        or fresh.numel() < _WORTH_IT
        or not fresh.is_contiguous()
        or fresh.is_inference()
        or validity.is_inference()
        or under_transform()
    ):
        return fresh
    rows = fresh.numel() // max(validity.numel(), 1)
    if rows < _LONG_ROW or not _one_for_each_row(validity, fresh):
        return fresh
    with torch.no_grad():
        fresh.detach().view(-1, rows).index_fill_(0, invalid_rows(validity), 0)
    remember_zero(fresh, validity)
    return fresh


def _one_for_each_row(validity: Tensor, data: Tensor) -> bool:
    """Whether a mask has the data's first dimensions and size 1 in the others."""
    sizes = tuple(validity.shape)
    while sizes and sizes[-1] == 1:
        sizes = sizes[:-1]
    return validity.ndim == data.ndim and sizes == tuple(data.shape[: len(sizes)])


def invalid_rows(validity: Tensor) -> Tensor:
    """The indices of the zeros of a flattened mask; cached with the mask."""
    kept = kept_with(validity)
    rows: Tensor | None = kept.get("invalid rows")
    if rows is None:
        rows = kept["invalid rows"] = (validity.reshape(-1) == 0).nonzero().squeeze(1)
    return rows


class Fill(OwnFunction):
    """fill_bits; its backward fills the gradient with zeros in the same way."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, validity: Tensor, value: complex) -> Tensor:
        ctx.save_for_backward(validity)
        ctx.set_materialize_grads(False)
        return fill_bits(data, validity, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        return (None if grad is None else zero_where_invalid(grad, ctx.saved_tensors[0])), None, None


def can_fill_bits(data: Tensor, value: complex) -> bool:
    """Whether bit operations give the result of torch.where faster; `value` must not change the dtype."""
    dtype = data.dtype
    if dtype not in _BITS or (value != 0 and data.numel() < _WORTH_IT):
        return False
    if data.is_conj() or data.is_neg():
        return False  # the bits in memory have the other sign
    if isinstance(value, complex):
        return dtype.is_complex
    return isinstance(value, int) or dtype.is_floating_point or dtype.is_complex


def zero_selector(data: Tensor, validity: Tensor, value: complex) -> Tensor | None:
    """The mask in the data's dtype, 1 where valid, if `threshold_backward` with it does the fill; else None.

    This serves small fills with +0, of real dtypes.
    """
    dtype = data.dtype
    small = data.numel() < _WORTH_IT and validity.numel() <= _KEPT_UP_TO
    plus_zero = value == 0 and dtype in _BITS and not dtype.is_complex and pattern(value, dtype) == 0
    if not (small and plus_zero and data.is_cpu):
        return None
    if validity.is_inference() or torch.is_inference_mode_enabled():
        return validity.to(dtype)
    kept = kept_with(validity)
    found: Tensor | None = kept.get(("selector", dtype))
    if found is None:
        found = kept["selector", dtype] = validity.to(dtype)
    return found


def pattern(value: complex, dtype: torch.dtype) -> int:
    """The bits of `value` as an integer."""
    # 0.0 and -0.0 are equal, but their bits differ: the cache must not return one for the other.
    return _pattern(value, "" if type(value) is int else repr(value), dtype)


@functools.lru_cache(maxsize=256)
def _pattern(value: complex, written: str, dtype: torch.dtype) -> int:
    return int(torch.tensor(value, dtype=dtype).view(_BITS[dtype]).item())


def wide_mask(validity: Tensor, bits: torch.dtype) -> Tensor:
    """All ones where valid, all zeros elsewhere; cached with the mask if it is small."""
    if validity.numel() > _KEPT_UP_TO or validity.is_inference():
        return _widen(validity, bits)
    kept = kept_with(validity)
    wide: Tensor | None = kept.get(("wide", bits))
    if wide is None:
        wide = kept["wide", bits] = _widen(validity, bits)
    return wide


def widened(validity: Tensor, dtype: torch.dtype) -> Tensor:
    """All ones where int8 `validity` is 1, in integers as wide as `dtype`: for callers that cache the result.

    For dtypes of one byte, this returns the int8 validity itself.
    """
    bits = _BITS[dtype]
    return validity if bits is torch.int8 else _widen(validity, bits)


def _widen(validity: Tensor, bits: torch.dtype) -> Tensor:
    ones = torch.neg(validity)
    return ones if bits is torch.int8 else ones.to(bits)


def fill_bits(data: Tensor, validity: Tensor, value: complex, *, in_place: bool = False) -> Tensor:
    """`data` with `value` where invalid, by bit operations; for CPU tensors, int8 validity and no derivatives.

    The validity may be `widened` to the data's width already. `in_place` writes to the data, which the caller owns.
    """
    bits, fill = _BITS[data.dtype], pattern(value, data.dtype)
    if in_slices(data, validity):
        filled = data if in_place else torch.empty_like(data)
        step = SLICE * torch.get_num_threads()
        flat = [t.view(-1).view(bits).split(step) for t in (data, filled)]
        for source, out, valid in zip(*flat, validity.view(-1).split(step), strict=True):
            if in_place or fill:
                _fill(source, _widen(valid, bits), fill, out)
            else:
                out.copy_(torch.neg(valid)).bitwise_and_(source)  # widens the mask in the result's memory
        return filled
    wide = wide_mask(validity, bits) if validity.dtype is torch.int8 else validity
    source = data.view(bits)
    return _fill(source, wide, fill, source if in_place else None).view(data.dtype)


def in_slices(data: Tensor, validity: Tensor) -> bool:
    """Whether to fill slice by slice, without a widened mask of the data's size: data and mask have the same order."""
    return (
        data.numel() > SLICE
        and validity.dtype is torch.int8
        and validity.shape == data.shape
        and validity.is_contiguous()
        and data.is_contiguous()
    )


def _fill(source: Tensor, wide: Tensor, fill: int, out: Tensor | None) -> Tensor:
    if fill == 0:
        return torch.bitwise_and(source, wide, out=out)
    if wide.shape != source.shape:  # a mask may be larger than the data
        source = source.expand(torch.broadcast_shapes(source.shape, wide.shape))
    # x ^ f, zeroed where invalid, ^ f: x where valid, f elsewhere.
    return torch.bitwise_xor(source, fill, out=out).bitwise_and_(wide).bitwise_xor_(fill)


# --------------------------------------------------------- which tensors are known to be zero where a mask says invalid


class _Fact:
    """A tensor was zero where a mask says invalid, at these versions of both, while nothing else held its memory."""

    __slots__ = ("exposures", "tensor", "validity", "validity_version", "version")

    def __init__(self, tensor: weakref.ref[Tensor], version: int, validity: Tensor) -> None:
        self.tensor, self.version, self.exposures = tensor, version, _exposures
        self.validity, self.validity_version = validity, validity._version


# Facts by the tensor's id; callers can look here whether a tensor has any.
known_tensors: dict[int, _Fact] = {}
_exposures = 0
_verified = False


@contextlib.contextmanager
def zeros_verified() -> Iterator[None]:
    """Inside, using a false fact raises AssertionError: for tests, because the check reads the data."""
    global _verified
    before, _verified = _verified, True
    try:
        yield
    finally:
        _verified = before


def remember_zero(data: Tensor, validity: Tensor) -> None:
    """Record that `data` is zero where `validity` says invalid."""
    if being_traced(data) or being_traced(validity) or data.is_inference() or validity.is_inference():
        return
    key = id(data)
    known_tensors[key] = _Fact(weakref.ref(data, lambda _: known_tensors.pop(key, None)), data._version, validity)


def hand_on(source: Tensor, target: Tensor, validity: Tensor | None, of_source: Tensor | None = None) -> None:
    """Record the same fact for `target`, which is zero wherever `source` is.

    validity   the validity of `target`
    of_source  the validity of `source` if it differs: `validity` is a view of it, as `target` is of `source`
    """
    if validity is not None and known_zero(source, validity if of_source is None else of_source):
        remember_zero(target, validity)


def memory_exposed() -> None:
    """Forget every fact: other code (NumPy, processes) now holds data, and may write to it without torch's knowledge.

    Later facts concern other memory, because they begin with a fill or derive from a fact that holds.
    """
    global _exposures
    _exposures += 1


def known_zero(data: Tensor, validity: Tensor | None) -> bool:
    """Whether we know that `data` is zero where `validity` says invalid; True if all are valid."""
    if validity is None or being_traced(data):
        return validity is None
    fact = known_tensors.get(id(data))
    if (
        fact is None
        or fact.validity is not validity
        or fact.tensor() is not data
        or fact.version != data._version
        or fact.exposures != _exposures
        or fact.validity_version != validity._version
        or recording()
    ):
        return False
    if _verified and not data.is_meta:  # meta tensors have no values
        assert not bool(torch.where(as_bool(validity), 0, data).any()), "not zero where it is invalid"
    return True
