"""Tensors that have more positions than the samples alone would have, because a size that a caller used counts padding.

Which sizes the samples alone would have, torch says itself: the call is made for each sample with its own numbers, on
the meta device. A tensor that has more keeps a note of it, and each call that takes such a tensor is made again with
what a sample alone would not have left out. Where that changes a value of what is left, the sizes have reached a
result, and the line that has used them is reported. So is a line that fills padding, by `to_tensor`, and reduces it.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from masked_dispatch.autograd.dense import wrap_record
from masked_dispatch.seeing.counting import EXPORTS
from masked_dispatch.seeing.event import Line, Notes, can_be_read, record_of, there_of, valid_of
from masked_dispatch.seeing.placed import PLACED, placed_by
from masked_dispatch.seeing.recorder import leaves
from masked_dispatch.seeing.sizes import Alone, Followed, Size, at, numbers_in, sizes_alone, with_each
from masked_dispatch.seeing.watching import unrecorded
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.extents.factors import conjunction, factors_of, first_known, index_along
from op_registry.records.dense import Dense
from op_registry.records.extent import PREFIX, SAMPLES, Extent, Factor, numbers_positions
from op_registry.records.validity import as_int8, intersect

CUT, LESS, SHAPED = "cut at size", "cut short at size", "shaped by size"


@dataclass
class Origin:
    """A line that has used a size, CUT or SHAPED by it, and how many elements no sample alone would have."""

    kind: str
    line: Line
    count: int
    is_reported: bool = False


class Note(NamedTuple):
    """What the samples alone would have of a tensor, by dimension, where that is less; and the lines that say more."""

    sizes: Mapping[int, Alone]
    origins: tuple[Origin, ...]


class Call(NamedTuple):
    """A call of a function: what it takes, which lines have made that too large, and where random generators are."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: list[Tensor]
    origins: tuple[Origin, ...]
    random: list[tuple[torch.device, Tensor]]

    def with_each(self, change: Callable[[Any], Any]) -> Any:
        """The results of the call with `change` of each argument."""
        return self.function(*with_each(self.args, change), **with_each(self.kwargs, change))

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", "")).partition(".")[0]

    @property
    def writes(self) -> bool:
        name = self.name
        in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__", "backward")
        return in_place or self.kwargs.get("out") is not None

    @property
    def makes_new(self) -> bool:
        """Whether its results are as large as it is told, and no parts or views of what it takes."""
        return not self.tensors or self.name.startswith("new_")


class SamplesAlone:
    """Calls of functions that were given sizes, and what becomes of their results."""

    def __init__(self) -> None:
        self._notes = Notes()

    def before(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """A call that is about to be made."""
        tensors = list(leaves([args, kwargs]))
        noted = [note for t in tensors if (note := self._notes.get(t)) is not None]
        origins = {id(o): o for note in noted for o in note.origins if not o.is_reported}
        states = _random_states(tensors) if origins else []
        return Call(function, args, kwargs, tensors, tuple(origins.values()), states)

    def after(self, call: Call, result: Any, line: Line | None) -> Iterator[Origin]:
        """The lines to be reported, because what they have of padding reaches the result of this call."""
        if not all(map(can_be_read, (*call.tensors, *leaves(result)))):
            return
        if call.name in EXPORTS:
            self._note_export(call, result, line)
        elif any(True for _ in numbers_in([call.args, call.kwargs])):
            sizes = {id(t): self._sizes(t) for t in call.tensors}
            count = None if call.writes and result is not None else placed_by(*call[:3], result, sizes)
            if count is not None and line is not None:
                yield Origin(PLACED, line, count)
            else:
                yield from self._note_sizes(call, result, line)
        elif call.origins and not call.writes:
            yield from self._again(call, result, line)

    def _note_export(self, call: Call, result: Any, line: Line | None) -> None:
        """Note that a plain tensor has numbers where the masked one that it comes from is padded behind."""
        x = call.tensors[0] if call.tensors else None
        sizes = sizes_alone(x) if isinstance(x, MaskedTensor) and isinstance(result, Tensor) else {}
        if x is None or not sizes or line is None or result.shape != x.shape or isinstance(result, MaskedTensor):
            return
        padding = ~there_of(x)
        if bool(padding.any()) and torch.equal(there_of(_left_out(result, sizes)[0]), ~padding):
            self._notes.set(result, Note(sizes, (Origin("valid padding", line, int(padding.sum())),)))

    # ---------------------------------------------------------------------------------------------------- with sizes

    def _note_sizes(self, call: Call, result: Any, line: Line | None) -> Iterator[Origin]:
        """Note which results have more than those of the same call for each sample alone; report those with less."""
        results = list(leaves(result))
        alone = {id(t): self._sizes(t) for t in call.tensors}
        known = [n.alone for n in numbers_in([call.args, call.kwargs])]
        known += [each for sizes in alone.values() for each in sizes.values()]
        kinds = {len(each) for each in known if len(each) > 1}
        samples = next(iter(kinds)) if len(kinds) == 1 else 1
        shapes = [_shapes_alone(call, alone, index, samples) for index in range(samples)] if results else []
        if any(len(each) != len(results) for each in shapes):
            return
        for number, tensor in enumerate(results):
            if any(tensor is t for t in call.tensors) or any(len(each[number]) != tensor.ndim for each in shapes):
                continue
            own = sizes_alone(tensor)
            makes = call.makes_new or call.origins or tensor.numel() > max(t.numel() for t in call.tensors)
            sizes = dict[int, Alone]()
            for d in range(tensor.ndim):
                wanted = tuple(each[number][d] for each in shapes)
                has = own.get(d, (tensor.shape[d],) * samples if makes else wanted)
                if _is_less(has, wanted) and d in own and line is not None and len(results) == 1:
                    less = sum(int(w - h) for w, h in zip(wanted, has, strict=False) if h < w)
                    yield Origin(LESS, line, less * (tensor.numel() // max(1, tensor.shape[d] * len(has))))
                if _is_less(wanted, has):
                    sizes[d] = tuple(map(min, wanted, has)) if len(wanted) == len(has) else (min(wanted),)
            if sizes:
                self._note(tensor, sizes, call.origins, line, by_size=True)

    def _note(
        self, tensor: Tensor, sizes: Mapping[int, Alone], origins: tuple[Origin, ...], line: Line | None, by_size: bool
    ) -> None:
        """Note that the samples alone have these sizes. by_size: a size at this line says otherwise."""
        cuts = any(d in sizes_alone(tensor) for d in sizes) and not any(o.kind == CUT for o in origins)
        if line is not None and (by_size or cuts):
            more = there_of(tensor) & ~there_of(_left_out(tensor, sizes)[0])
            origin = Origin(CUT if cuts else SHAPED, line, int(more.sum()))
            origins = (origin,) if cuts else (*origins, origin)
        if origins:
            self._notes.set(tensor, Note(sizes, origins))

    def _sizes(self, tensor: Tensor) -> dict[int, Alone]:
        note: Note | None = self._notes.get(tensor)
        return {**sizes_alone(tensor), **(note.sizes if note else {})}

    # -------------------------------------------------------------------------------------------------------- again

    def _again(self, call: Call, result: Any, line: Line | None) -> Iterator[Origin]:
        """Make the call again without what no sample alone would have, and note results that have more than these."""
        by_sample, shortest = True, dict[float, Alone]()

        def put_in(value: Any) -> Any:
            nonlocal by_sample
            note: Note | None = self._notes.get(value) if isinstance(value, Tensor) else None
            if note is None:  # (what has no gradient may be written to, as running statistics are)
                return value.clone() if _is_buffer(value) else value
            tensor, knows_samples = _left_out(value, note.sizes)
            by_sample &= knows_samples
            shortest.update({min(alone): alone for alone in note.sizes.values()})
            return tensor

        try:
            with unrecorded(), _drawing_again(call.random), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = call.with_each(put_in)
        except Exception:  # indices, say, that differ from sample to sample
            yield from self._note_sizes(call, result, line)
            return
        # (beside tensors that know where their samples end, a table that ends with the shortest would cut the others)
        compares = by_sample or not any(sizes_alone(t) and self._notes.get(t) is None for t in call.tensors)
        for tensor, other in zip(leaves(result), leaves(made), strict=False):
            if tensor.shape != other.shape or any(tensor is t for t in call.tensors):
                continue
            if compares and _differ(tensor, other):
                for origin in call.origins:
                    origin.is_reported = True
                yield from call.origins
                return
            own, sizes = sizes_alone(tensor), dict[int, Alone]()
            for d, alone in sizes_alone(other).items():
                alone = shortest.get(min(alone), alone) if min(alone) == max(alone) else alone
                if _is_less(alone, own.get(d, (tensor.shape[d],))):
                    sizes[d] = alone
            if sizes:
                self._note(tensor, sizes, call.origins, line, by_size=False)


def _is_less(alone: Alone, has: Alone) -> bool:
    """Whether a sample has less than another tensor has there."""
    if len(alone) != len(has):
        return min(alone) < min(has)
    return any(a < h for a, h in zip(alone, has, strict=True))


def _is_buffer(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, MaskedTensor) and not value.requires_grad


def _shapes_alone(call: Call, sizes: Mapping[int, Mapping[int, Alone]], index: int, samples: int) -> list[torch.Size]:
    """The shapes of the call's results for one sample; none where they depend on values, or the call fails."""

    def alone(value: Any) -> Any:
        if isinstance(value, Followed):
            number = at(value.alone, index, samples)
            return int(number) if isinstance(value, Size) else number
        if isinstance(value, Tensor):
            own = sizes.get(id(value), {})
            shape = [int(at(own[d], index, samples)) if d in own else s for d, s in enumerate(value.shape)]
            return torch.empty(shape, dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    try:
        with torch.device("meta"):
            return [t.shape for t in leaves(call.with_each(alone))]
    except Exception:
        return []


def _left_out(tensor: Tensor, sizes: Mapping[int, Alone]) -> tuple[MaskedTensor, bool]:
    """The tensor without what no sample alone would have; and whether that is known for each of its samples."""
    record = record_of(tensor) if isinstance(tensor, MaskedTensor) else Dense(tensor.detach(), None)
    before, ndim = factors_of(record), tensor.ndim
    factors, by_sample = [f for f in before if all(f.along[d] is None for d in sizes)], True
    for d, alone in sizes.items():
        samples = _samples_of(tensor, first_known(before), sizes, len(alone)) if len(alone) > 1 else ()
        if samples is None:
            by_sample, samples, alone = False, (), (min(alone),)
        shape = [tensor.shape[i] if i in samples else 1 for i in range(ndim)]
        own = torch.tensor(alone, device=tensor.device).reshape(shape)
        known = tuple(PREFIX if i == d else SAMPLES if i in samples else None for i in range(ndim))
        factors.append(Factor(known, as_int8(index_along(d, tensor.shape[d], ndim, tensor.device) < own)))
    validity = intersect(record.validity, conjunction([*before, *factors]))
    return wrap_record(Dense(record.data, validity, Extent(tuple(factors), is_mask=False))), by_sample


def _samples_of(
    tensor: Tensor, known: Sequence[Any], sizes: Mapping[int, Alone], samples: int
) -> tuple[int, ...] | None:
    """The dimensions that number these samples: those of which it is known, or the first that is as large."""
    own = tuple(d for d, along in enumerate(known) if along is not None and not numbers_positions(along))
    if own and math.prod(tensor.shape[d] for d in own) == samples:
        return own
    return next(((d,) for d, size in enumerate(tensor.shape) if size == samples and d not in sizes), None)


def _random_states(tensors: Sequence[Tensor]) -> list[tuple[torch.device, Tensor]]:
    """The states of torch's generators that a call with these tensors may draw from."""
    devices = {t.device for t in tensors if t.device.type == "cuda"}
    return [(torch.device("cpu"), torch.get_rng_state()), *((d, torch.cuda.get_rng_state(d)) for d in devices)]


@contextlib.contextmanager
def _drawing_again(states: Sequence[tuple[torch.device, Tensor]]) -> Iterator[None]:
    """The block draws from these states on, and leaves the generators as it finds them."""
    with torch.random.fork_rng(devices=[device for device, _ in states if device.type == "cuda"]):
        for device, state in states:
            torch.set_rng_state(state) if device.type == "cpu" else torch.cuda.set_rng_state(state, device)
        yield


def _differ(tensor: Tensor, other: Tensor) -> bool:
    """Whether a value that both have is another, by more than rounding."""
    valid = valid_of(tensor) & valid_of(other) & there_of(other)
    wide = torch.complex128 if other.is_complex() else torch.float64
    a, b = ((t._data if isinstance(t, MaskedTensor) else t)[valid].to(wide) for t in (tensor, other))
    scale = b[b.isfinite()].abs().amax().item() if bool(b.isfinite().any()) else 0
    return not torch.allclose(a, b, rtol=1e-3, atol=1e-6 * scale, equal_nan=True)
