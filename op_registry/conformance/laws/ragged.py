"""A ragged batch made of one call of an operator: the call on samples padded to one size, and on each by itself.

What the rule states of its dimensions says how: one batch label numbers the samples, another label numbers the
positions that are padded. Operands that have both are masked tensors with an extent; one that has the first alone is
cut for each sample, one that has the second alone lies on the batch's grid, and samples share the rest.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.bound import Bound
from op_registry.conformance.compare import difference
from op_registry.conformance.laws.dimensions import calls_of_operators, size_of_call
from op_registry.conformance.masks import refilled
from op_registry.conformance.sample import Operator, Sample, chosen, start_random_numbers, tensors_of
from op_registry.conformance.variations import storable
from op_registry.dimensions.labels import Dimension, Label, Labels, atoms, batch_labels
from op_registry.dimensions.movements import Unknown
from op_registry.laws.categories import COMPOSITE
from op_registry.registry import registry
from op_registry.rule import Rule, packet_name
from op_registry.schema import mutable_forms

# Where the padding of a batch is.
SIDES = ("right", "left", "centre")
# Arguments that list sizes, and which dimensions they are the sizes of: those of the first result, or the last ones
# of the first operand.
_OF_RESULT, _OF_OPERAND = ("size", "shape"), ("normalized_shape",)
# Under a mask: none of these numbers may show.
GARBAGE = ("nan", "inf", "max")


@dataclass(frozen=True)
class Axes:
    """The label that numbers samples, the one that numbers their positions, and what the operator does along it."""

    samples: Label
    positions: Label
    role: str

    def __str__(self) -> str:
        return f"samples along {self.samples!r}, positions along {self.positions!r} ({self.role})"


@dataclass(frozen=True)
class Draw:
    """How a batch is drawn: where its padding is, the shortest length, whether samples miss values."""

    side: str
    least: int
    holes: bool = False

    def __str__(self) -> str:
        return f"{self.side}-padded{', lengths from 0' if not self.least else ''}{', with holes' if self.holes else ''}"


DRAWS = (
    Draw("right", 1),
    Draw("right", 0),
    Draw("right", 1, holes=True),
    Draw("left", 1),
    Draw("centre", 0, holes=True),
)
# For one call of an overload.
FEW_DRAWS = (Draw("right", 0, holes=True), Draw("left", 1))
# For in-place and out= forms.
OF_FORMS = (Draw("right", 0), *FEW_DRAWS)


class NoBatch(Exception):
    """No ragged batch can be made of a call; the message says why."""


def axes_of(call: Bound, labels: Labels) -> list[Axes]:
    """The pairs of labels to pad a call by: one for each role, and each set of operands that have them.

    Raises NoBatch, with the reason, if there is none.
    """
    sizes = _sizes(call, labels)
    named = {name: _atomic(dims) for name, dims in labels.operands.items() if name in call.tensors}
    merged = {a for dims in labels.operands.values() for d in dims if isinstance(d, tuple) for a in d}
    kept = [{a for dim in dims for a in atoms(dim)} for dims in labels.results]
    found: dict[Any, Axes] = {}
    batch = [a for a, s in sizes.items() if a is not None and a not in labels.roles and a not in merged and s > 1]
    batch = [a for a in batch if kept and all(a in result for result in kept)]
    if not batch:
        raise NoBatch("no dimension of more than one index is batch for it")
    for samples in batch:
        for positions, size in sizes.items():
            both = [
                name
                for name, dims in named.items()
                if samples in dims
                and positions in dims
                and _full(call.tensors[name], labels.operands[name], (samples, positions), sizes)
            ]
            if positions in (samples, None) or positions in merged or size < 2 or not both:
                continue
            role = labels.roles.get(positions, "batch")
            having = [tuple(n for n, dims in named.items() if a in dims) for a in (samples, positions)]
            found.setdefault((role, *having), Axes(samples, positions, role))
    if not found:
        raise NoBatch("no operand has another dimension of more than one index beside one that is batch")
    return list(found.values())


def labels_of_formula(call: Bound, seed: int) -> Labels:
    """Labels of a call of which nothing is stated, for `axes_of`: the first dimension of its first tensor is batch.

    Operands broadcast. Raises NoBatch unless samples are independent: each by itself has its part of the results.
    """
    operands = {name: batch_labels(t.ndim) for name, t in call.tensors.items()}
    samples = next(iter(operands.values()), ())[:1]

    def results(n: int | None = None) -> list[Tensor]:
        parts = {
            name: t if n is None or operands[name][:1] != samples else t.narrow(0, n, 1)
            for name, t in call.tensors.items()
        }
        start_random_numbers(seed)
        return tensors_of(call.with_tensors(parts).applied(call.op))

    whole, count = results(), next(iter(call.tensors.values())).shape[0] if samples else 0
    mixed = NoBatch("it mixes what its first dimension numbers, or has no result for each")
    if not count or any(not r.ndim or r.shape[0] != count for r in whole):
        raise mixed
    for n in range(count):
        try:
            alone = results(n)
        except Exception:
            raise mixed from None
        parts = [r.narrow(0, n, 1) for r in whole]
        if any(a.shape != p.shape or difference(a, p) for a, p in zip(alone, parts, strict=True)):
            raise mixed
    dims = tuple((*samples, *(f"{n}.{d}" for d in range(1, r.ndim))) for n, r in enumerate(whole))
    return Labels(operands, dims)


def widened(call: Bound, labels: Labels) -> Bound:
    """The call on several samples, where batch dimensions have one index each: the first of them is repeated."""
    sized = any(name in call.named for name in (*_OF_RESULT, *_OF_OPERAND))
    if sized:
        return call
    if not labels.roles and {a for dims in labels.operands.values() for a in dims} == {-1}:  # elementwise, of one row
        rows = {name: t.repeat(3, 1) for name, t in call.tensors.items() if t.ndim and "[" not in name}
        return call.with_(**rows)
    sizes = _sizes(call, labels)
    merged = {a for dims in labels.operands.values() for d in dims if isinstance(d, tuple) for a in d}
    batch = [a for a in sizes if a is not None and a not in labels.roles and a not in merged]
    if any(sizes[a] > 1 for a in batch) or not batch or any("[" in name for name in call.tensors):
        return call
    changed = {}
    for name, tensor in call.tensors.items():
        times = [3 if a == batch[0] else 1 for a in labels.operands[name]]
        changed[name] = tensor.repeat(times) if 3 in times else tensor
    return call.with_(**changed, **({"N": 3} if "N" in call.named else {}))


def _atomic(dims: Sequence[Dimension]) -> list[Label]:
    return [d for d in dims if not isinstance(d, tuple)]


def _full(tensor: Tensor, dims: Sequence[Dimension], of: Sequence[Label], sizes: Mapping[Label, int]) -> bool:
    return all(tensor.shape[list(dims).index(a)] == sizes[a] for a in of) and len(dims) == tensor.ndim


def _sizes(call: Bound, labels: Labels) -> dict[Label, int]:
    sizes: dict[Label, int] = dict(labels.sizes)
    for name, tensor in call.tensors.items():
        for dim, size in zip(labels.operands.get(name, ()), tensor.shape, strict=False):
            if not isinstance(dim, tuple):
                sizes[dim] = max(size, sizes.get(dim, size))
    return sizes


class Ragged:
    """A padded batch of one call, and its samples.

    lengths  how many positions each sample has
    starts   where they begin in the batch
    there    bool, (samples, positions): which positions of the batch are there
    """

    def __init__(
        self, rule: Rule, op: OpOverload, call: Bound, labels: Labels, axes: Axes, draw: Draw, seed: int
    ) -> None:
        self.op, self.rule, self.call, self.axes, self.draw = op, rule, call, axes, draw
        if op in _OF_SOMETHING and not draw.least:
            raise NoBatch("its kernel takes no sample of length 0")
        self.labels, self.sizes = labels, _sizes(call, labels)
        self.generator = torch.Generator().manual_seed(zlib.crc32(f"{op} {axes} {draw} {seed}".encode()))
        count, size = self.sizes[axes.samples], self.sizes[axes.positions]
        self.lengths = self._lengths(count, size)
        free = [size - length for length in self.lengths]
        self.starts = [{"right": 0, "left": f, "centre": f // 2}[draw.side] for f in free]
        index = torch.arange(size)
        self.there = torch.stack(
            [(index >= s) & (index < s + n) for s, n in zip(self.starts, self.lengths, strict=True)]
        )
        self.given = {name: t.detach() for name, t in call.tensors.items()}
        self._count_within_samples()
        at_the_end = any(not part.kept and part.start < 0 for parts in labels.cuts for part in parts)
        gone = draw.side != "right" and any(axes.positions not in dims for dims in labels.results)
        if axes.role == "selected" and (at_the_end or gone):
            raise NoBatch("an index counts in the batch")
        places = {n: self._place(n) for n in self.given}
        # The dimensions of the operands that have an extent: of samples, and of positions.
        self.ragged = {n: (s, p) for n, (s, p) in places.items() if s is not None and p is not None}
        self.masks = {name: self._mask(name) for name in self.ragged}

    def _lengths(self, count: int, size: int) -> list[int]:
        """Lengths from the least to the whole size, one of each; no batch is without padding."""
        least = self.draw.least
        drawn = torch.randint(least, size + 1, (count,), generator=self.generator).tolist()
        for n, length in enumerate((least, size, 1)[:count]):
            drawn[n] = length
        return [drawn[n] for n in torch.randperm(count, generator=self.generator).tolist()]

    def _count_within_samples(self) -> None:
        """Operands that count positions (indices, classes) count in the batch.

        Only positions are drawn that every sample has, and of batches whose samples begin at 0.
        """
        counting = [name for name in self.given if self._counts(name)]
        if counting and (self.draw.side != "right" or not self.draw.least):
            raise NoBatch(f"{', '.join(counting)} counts in the batch")
        for name in counting:
            self.given[name] = self.given[name].clamp(max=min(self.lengths) - 1)

    def _counts(self, name: str) -> bool:
        """Whether the values of an operand are positions of the padded dimension: it is an index, or a class."""
        is_index = self.given[name].dtype in (torch.int64, torch.int32)
        return is_index and self.axes.positions in self.labels.counts.get(name, ())

    def _place(self, name: str) -> tuple[int | None, int | None]:
        """The dimensions of an operand that number samples and positions."""
        dims, tensor = list(self.labels.operands[name]), self.given[name]
        wanted = (self.axes.samples, self.axes.positions)
        places = [dims.index(a) if a in dims else None for a in wanted]
        samples, positions = [
            None if d is None or tensor.shape[d] != self.sizes[a] else d for d, a in zip(places, wanted, strict=True)
        ]
        return samples, positions

    def where_there(self, ndim: int, samples: int, positions: int) -> Tensor:
        """`there` of a tensor whose dimensions number samples and positions; it broadcasts."""
        shape = [1] * ndim
        shape[samples], shape[positions] = self.there.shape
        return (self.there if samples < positions else self.there.T).reshape(shape)

    def _mask(self, name: str) -> Tensor:
        """What is valid in the batch."""
        given = self.given[name]
        there = self.where_there(given.ndim, *self.ragged[name]).expand(given.shape)
        if not self.draw.holes:
            return there.clone()
        return there & (torch.rand(there.shape, generator=self.generator) < 0.8)

    # ------------------------------------------------------------------------------------------------------ arguments

    def batch(self, garbage: str) -> dict[str, Tensor]:
        """The operands of the call on the batch: samples at their places, garbage elsewhere."""
        found: dict[str, Tensor] = {}
        for name, t in self.given.items():
            found[name] = t.clone()
            if name in self.ragged:
                samples, positions = self.ragged[name]
                for n, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
                    part = found[name].narrow(samples, n, 1)
                    whole = t.narrow(samples, n, 1)
                    part.narrow(positions, start, length).copy_(whole.narrow(positions, 0, length))
                found[name] = refilled(found[name], self.masks[name], garbage)
        return found

    def cut(self, name: str, tensor: Tensor, n: int) -> Tensor:
        """The part of a tensor of an operand's shape in the batch that belongs to sample `n`."""
        samples, positions = self._place(name)
        if samples is not None:
            tensor = tensor.narrow(samples, n, 1)
        if positions is not None:
            tensor = tensor.narrow(positions, self.starts[n], self.lengths[n])
        return tensor

    def named(self, operands: Mapping[str, Any], n: int | None = None) -> Bound:
        """The call on these operands: of the batch, or of sample `n`, whose sizes are its own."""
        return self.call.with_tensors(operands).with_(**({} if n is None else self._sizes_of(n)))

    def _sizes_of(self, n: int) -> dict[str, Any]:
        """Arguments that list sizes, for one sample."""
        found: dict[str, Any] = {}
        for name, value in self.call.named.items():
            if not isinstance(value, (list, tuple)) or not all(type(v) is int for v in value):
                continue
            if name in _OF_RESULT:
                dims: Sequence[Dimension] = self.labels.results[0]
            elif name in _OF_OPERAND:
                dims = self.labels.operands[next(iter(self.labels.operands))][-len(value) :]
            else:
                continue
            if len(dims) == len(value):
                found[name] = [self._size_of(d, v, n) for d, v in zip(dims, value, strict=True)]
        if "HxW" in self.call.named:  # of native_group_norm
            found |= {"N": 1, "HxW": math.prod(self.cut("input", self.given["input"], n).shape[2:])}
        return found

    def _size_of(self, dim: Dimension, given: int, n: int) -> int:
        own = {self.axes.samples: 1, self.axes.positions: self.lengths[n]}
        if not any(a in own for a in atoms(dim)):
            return given
        return math.prod(own.get(a, self.sizes.get(a, 1)) for a in atoms(dim))

    # -------------------------------------------------------------------------------------------------------- results

    def of_sample(self, result: int, tensor: Tensor, n: int) -> Tensor:
        """The part of a result of the batch that is sample `n`'s, in one dimension."""
        dims = self.labels.results[result]
        at = next(d for d, dim in enumerate(dims) if self.axes.samples in atoms(dim))
        parts = atoms(dims[at])
        if len(parts) > 1:
            sizes = [self.sizes[a] for a in parts]
            tensor = tensor.reshape([*tensor.shape[:at], *sizes, *tensor.shape[at + 1 :]])
            at += parts.index(self.axes.samples)
        return tensor.select(at, n).reshape(-1)

    def plainly_there(self, result: int, tensor: Tensor) -> Tensor:
        """Where a plain result of the batch is some sample's: bool of its shape."""
        dims, axes = list(self.labels.results[result]), self.axes
        there = torch.ones(tensor.shape, dtype=torch.bool)
        if axes.samples not in dims or axes.positions not in dims:
            return there
        samples, positions = dims.index(axes.samples), dims.index(axes.positions)
        if tensor.shape[positions] != self.there.shape[1]:
            return there
        return there & self.where_there(tensor.ndim, samples, positions)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.lengths)))

    def __str__(self) -> str:
        return f"{self.axes}, {self.draw}, lengths {self.lengths}"


# -------------------------------------------------------------------- the batches of the calls that samples make

# How many calls of one overload are asked at most, and among how many samples they are looked for: for each call, and
# for one of an overload of which there is none yet.
MOST_CALLS, MOST_SAMPLES, MORE_SAMPLES = 3, 5, 40
# The most elements in the tensors of a call.
MOST_ELEMENTS = 1 << 12
_OF_MEMORY = ("empty_like", "new_empty", "new_empty_strided")
# Torch's kernel divides by the number of positions, and 0 ends the process.
_OF_SOMETHING = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,)


@dataclass(frozen=True)
class PaddedTrial:
    """One ragged batch of a call of `op`; or why there is none.

    number  that of the sample that makes the call
    form    the in-place or out= form that is called in place of `op`
    """

    op: OpOverload
    number: int
    dtype: torch.dtype
    ragged: Ragged | None
    garbage: str = ""
    why: str = ""
    form: OpOverload | None = None

    @property
    def asked(self) -> OpOverload:
        """The overload that is called."""
        return self.form or self.op

    def __str__(self) -> str:
        what = "" if self.ragged is None else f" {self.ragged.draw}, {self.ragged.axes}"
        return f"{str(self.dtype).removeprefix('torch.')} sample {self.number} padded {self.asked}{what}"


def padded_trials(
    operator: Operator, seed: int, most: int | None, sample: int | None, left_out: Callable[[OpOverload], bool]
) -> Iterator[PaddedTrial]:
    """Ragged batches of the calls that an operator's samples make.

    most      how many calls of an overload are asked (MOST_CALLS at most); None: of all samples
    sample    the number of the only sample that is taken
    left_out  whether an overload is asked elsewhere
    """
    if not operator.dtypes or not operator.leading:
        return
    dtype = operator.gradient_dtype or operator.preferred_dtype
    calls: Counter[OpOverload] = Counter()
    forms: set[OpOverload] = set()
    enough = MOST_CALLS if most is None else min(most, MOST_CALLS)
    samples, more = _samples(operator, dtype, most, sample)
    for n, made in enumerate([*samples, *more]):
        if n >= len(samples) and all(calls.values()):
            return
        for op, args, kwargs in calls_of_operators(made):
            rule = registry.get(op)
            if rule is None or op._schema.is_mutable or left_out(op) or calls[op] >= enough:
                continue
            draws = FEW_DRAWS if enough == 1 else DRAWS
            found = list(_of_call(rule, op, args, kwargs, made, dtype, seed, draws))
            calls[op] += any(trial.ragged is not None for trial in found)
            yield from found
            for form in mutable_forms(op):
                of_form = [replace(t, form=form) for t in found if t.ragged is not None and t.ragged.draw in OF_FORMS]
                if form not in forms and of_form:
                    forms.add(form)
                    yield from of_form


def _samples(
    operator: Operator, dtype: torch.dtype, most: int | None, number: int | None
) -> tuple[list[Sample], list[Sample]]:
    """The samples whose calls are asked, and more, for overloads of which these make no call on a batch."""
    samples = [s for s in operator.samples(dtype) if s.tensors]
    if number is not None:
        return [s for s in [*samples, *storable(samples)] if s.number == number][:1], []
    samples = [s for s in samples if all(t.numel() for t in s.tensors)] or samples
    if most is None:
        return samples, storable(samples)
    first = chosen(samples, MOST_SAMPLES * min(most, MOST_CALLS))
    # (Samples of unary operators have one dimension; folded, they have two.)
    return first, [s for s in [*storable(samples), *samples] if s not in first][:MORE_SAMPLES]


def _of_call(
    rule: Rule,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: Sample,
    dtype: torch.dtype,
    seed: int,
    draws: Sequence[Draw],
) -> Iterator[PaddedTrial]:
    call = Bound.of(rule, op, args, kwargs)
    if size_of_call(args, kwargs) > MOST_ELEMENTS or any(not _is_strided(t) for t in call.tensors.values()):
        return
    why, formula = _nothing_stated(rule, call), rule.category is COMPOSITE and not rule.is_built_in
    if why is None or formula:
        try:
            labels = labels_of_formula(call, seed) if formula else call.labels
            assert labels is not None
            if not formula:
                call, labels = _of_several_samples(call, labels)
            for axes in axes_of(call, labels):
                for n, draw in enumerate(draws):
                    try:
                        ragged = Ragged(rule, op, call, labels, axes, draw, seed)
                    except NoBatch:
                        continue
                    yield PaddedTrial(op, made.number, dtype, ragged, GARBAGE[n % len(GARBAGE)])
            return
        except NoBatch as reason:
            why = str(reason)
    yield PaddedTrial(op, made.number, dtype, None, why=why)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _nothing_stated(rule: Rule, call: Bound) -> str | None:
    """Why nothing is known of a call's dimensions; None if something is."""
    if rule.category is COMPOSITE:
        return "it is written in operators that have rules"
    if rule.dims is None:
        return "its rule does not state its dimensions"
    if isinstance(rule.dims, Unknown):
        return str(rule.dims)
    if packet_name(call.op) in _OF_MEMORY:
        return "it reads uninitialised memory"
    if call.named.get("num_classes") == -1:
        return "data decide the result's sizes"
    return None if call.labels is not None else "the statement of its dimensions does not fit the call"


def _of_several_samples(call: Bound, labels: Labels) -> tuple[Bound, Labels]:
    """The call with more than one sample, where its other arguments allow one more dimension; else the call itself."""
    wider = widened(call, labels)
    try:
        found = wider.labels
    except RuntimeError:  # a permutation, say, that lists the dimensions of the sample
        found = None
    return (call, labels) if found is None else (wider, found)
