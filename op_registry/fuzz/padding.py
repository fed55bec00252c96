"""P9 for random programs: a padded batch gives what its samples give one by one, in every step, and their gradients.

Where nothing is missing, the batch is run twice: its extent is its mask, and a tensor of its own. Both runs have the
same values, masks and extents; so has the program in a graph. A step that is refused has no value.

A step of which a sample by itself raises has nothing to be compared with, for this sample. Where torch has NaN for what
is made of nothing, the batch's element is there and has no number; nothing is claimed of what is made of it.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.compare import difference
from op_registry.conformance.laws.padding import Shown, elements_difference, made_of_nothing
from op_registry.conformance.plain_torch import one_line
from op_registry.conformance.subject import Subject
from op_registry.errors import MaskedSemanticsError
from op_registry.fuzz.programs import Program, Source, as_function, data_of, execute, results_of

# How often each kind of line was "compared", "refused", or "refused in a graph".
Tally = Counter[tuple[str, str]]
OWN, MASK = "an extent of its own", "the extent is the mask"
IN_A_GRAPH, GRAPH = "in a graph", "aot_eager"

Values = dict[str, Any]


def batch_is_its_samples(
    program: Program, subject: Subject, compiled: bool = False, tally: Tally | None = None
) -> str | None:
    """P9: at the positions that are there, values, masks and gradients are those of the samples by themselves.

    compiled  whether the program is run in a graph, too
    tally     counts what became of each kind of line
    """
    tally = Counter() if tally is None else tally
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = range(next(s for s in program.sources if s.axes).shape[0])
        sources = [
            {s.name: sample_of(s, row, program.seed, subject, s.requires_grad) for s in program.sources} for row in rows
        ]
        samples = [_alone(program, values, subject) for values in sources]
        holes = any(source.mask == "random" for source in program.sources)
        batches: dict[str, Values] = {}
        forms = (OWN,) if holes else (MASK, OWN)
        for form in forms:
            leaves = {s.name: batch_of(s, program.seed, subject, s.requires_grad, form == OWN) for s in program.sources}
            batches[form], complaint = _run(program, leaves, samples, subject, tally)
            if complaint is None and form == forms[program.seed // 2 % len(forms)]:  # samples are differentiated once
                complaint = _gradients_differ(batches[form], samples, leaves, sources, program, subject)
            if complaint is not None:
                return f"{form}: {complaint}"
        if len(batches) == 2:
            complaint = _unlike(batches[OWN], batches[MASK], subject)
            if complaint is not None:
                return f"{OWN}, and {MASK}: {complaint}"
        return _in_a_graph(program, *batches.popitem(), samples, subject, tally) if compiled else None


def _alone(program: Program, values: Values, subject: Subject) -> Values:
    """The values of a sample by itself, without those that torch raises for, or that are made of NaN or infinity."""
    found, numbers = dict(values), set(values)
    for step in program.steps:
        runs = numbers.issuperset(step.operands) and execute(step, found, program.seed) is None
        if runs and _is_finite(found[step.name], subject):
            numbers.add(step.name)
    return found


def _is_finite(value: Any, subject: Subject) -> bool:
    shown = Shown.of(subject, value)
    return bool(shown.data[shown.valid].isfinite().all())


def _run(
    program: Program, leaves: Values, samples: Sequence[Values], subject: Subject, tally: Tally
) -> tuple[Values, str | None]:
    """The values of a batch, until one of them isn't that of a sample; and in what."""
    batch = dict(leaves)
    for step in program.steps:
        if not all(name in batch for name in step.operands) or not any(step.name in one for one in samples):
            continue
        error = execute(step, batch, program.seed)
        tally[step.kind, "refused" if isinstance(error, MaskedSemanticsError) else "compared"] += 1
        if isinstance(error, MaskedSemanticsError):
            continue
        if error is not None and all(step.name in one for one in samples):
            return batch, f"{step.name} raises {one_line(error)}, and each sample by itself gives a result"
        if error is not None:  # as a sample by itself does
            continue
        for row, one in enumerate(samples):
            wrong = _difference(batch[step.name], one[step.name], row, subject) if step.name in one else None
            if wrong is not None:
                return batch, f"{step.name} of sample {row}: {wrong}"
    return batch, None


def _elements(value: Any, subject: Subject) -> tuple[Tensor, Tensor]:
    """The elements of a value, and which of them are valid."""
    shown = Shown.of(subject, value)
    return shown.data.flatten(), shown.valid.flatten()


def _of_sample(value: Any, row: int, sample: Any, subject: Subject) -> tuple[Tensor, Tensor]:
    """The elements of a sample in a batch that are there, in the order of the sample by itself; and which are valid."""
    shown = Shown.of(subject, value)
    data, valid, there = shown.data[row], shown.valid[row], shown.there[row]
    shape = sample.shape[1:]
    for dim, (size, own) in enumerate(zip(there.shape, shape, strict=False)):
        if size != own and there.ndim == len(shape):  # (of samples that were joined, each has its own places)
            order = there.logical_not().to(torch.uint8).argsort(dim=dim, stable=True)
            data, valid, there = (t.gather(dim, order) for t in (data, valid, there))
    return data[there], valid[there]


def _difference(value: Any, sample: Any, row: int, subject: Subject) -> str | None:
    got, valid = _of_sample(value, row, sample, subject)
    want, wanted = _elements(sample, subject)
    same_size = got.shape == want.shape
    nothing = made_of_nothing(got, valid, want, wanted) if same_size else torch.zeros_like(wanted)
    return elements_difference(got, valid, want, wanted, nothing)


def _unlike(got: Values, want: Values, subject: Subject) -> str | None:
    """The first value in which two runs of a batch differ."""
    for name in [*want, *(name for name in got if name not in want)]:
        if name not in got or name not in want:
            return f"{name} is refused in one of both"
        wrong = Shown.of(subject, got[name]).difference(Shown.of(subject, want[name]))
        if wrong is not None:
            return f"{name}: {wrong}"
    return None


def _in_a_graph(
    program: Program, form: str, eager: Values, samples: Sequence[Values], subject: Subject, tally: Tally
) -> str | None:
    """The steps that have a value, for each sample too, in a graph; unless they cannot be compiled without extents."""
    mode = subject.modes().get(GRAPH)
    known = [step for step in program.steps if all(step.name in values for values in (eager, *samples))]
    kept = replace(program, steps=tuple(known))
    if mode is None or not kept.steps:
        return None
    function = as_function(kept)
    sources = [batch_of(source, program.seed, subject, own=form == OWN) for source in program.sources]
    try:
        results = mode.call(function, *sources)
    except Exception as error:
        if MaskedSemanticsError.__name__ in f"{type(error).__name__} {error}":
            tally[kept.steps[-1].kind, f"refused {IN_A_GRAPH}"] += 1
            return None
        return None if _raises_without_extents(kept, mode) else f"{form}, {IN_A_GRAPH}: it raises {one_line(error)}"
    complaint = _unlike(
        dict(zip(results_of(kept), results, strict=True)), {name: eager[name] for name in results_of(kept)}, subject
    )
    return None if complaint is None else f"{form}, {IN_A_GRAPH}: {complaint}"


def _raises_without_extents(program: Program, mode: Subject) -> bool:
    """Whether masked tensors of these sizes cannot be compiled either: boolean indices, say."""
    sources = [_whole(source, mode) for source in program.sources]
    try:
        mode.call(as_function(program), *sources)
    except Exception:
        return True
    return False


def _whole(source: Source, mode: Subject) -> Any:
    data = data_of(source)
    return mode.wrap(data, torch.ones(data.shape, dtype=torch.bool)) if source.axes else data


# ------------------------------------------------------------------------------------------------------------ gradients


def _scalar(elements: tuple[Tensor, Tensor]) -> Tensor:
    """A number in which each valid element of a sample has its own weight."""
    data, valid = elements
    weights = torch.linspace(0.5, 1.5, data.numel(), dtype=data.dtype)
    return torch.where(valid, data, 0).tanh().mul(weights).sum()


def _gradients_differ(
    batch: Values,
    samples: Sequence[Values],
    leaves: Values,
    alone: Sequence[Values],
    program: Program,
    subject: Subject,
) -> str | None:
    """How the gradients of the last value differ from those of the samples that have numbers for it."""
    last = next((step.name for step in reversed(program.steps) if step.name in batch), None)
    if last is None:
        return None
    rows = [
        row
        for row, sample in enumerate(samples)
        if last in sample and bool(torch.isfinite(_scalar(_elements(sample[last], subject))))
    ]
    own = [_of_sample(batch[last], row, samples[row][last], subject) for row in rows]
    total = sum(map(_scalar, own), torch.zeros((), dtype=torch.float64))
    if not total.requires_grad or not bool(torch.isfinite(total)):
        return None
    names = [name for name, value in leaves.items() if subject.requires_grad(value)]
    want: dict[int, Values] = {}
    for row in rows:
        single = _scalar(_elements(samples[row][last], subject))
        inputs = [alone[row][name] for name in names]
        try:
            found = subject.gradients(single, inputs) if single.requires_grad else [None] * len(names)
        except RuntimeError:
            return None  # a write in place has overwritten what the derivative reads
        want[row] = dict(zip(names, found, strict=True))
    try:
        got = dict(zip(names, subject.gradients(total, [leaves[name] for name in names]), strict=True))
    except MaskedSemanticsError:
        return None
    except Exception as error:
        return f"the gradient of {last} raises {one_line(error)}"
    for source in program.sources:
        if got.get(source.name) is not None and (len(rows) == len(samples) or _is_finite(got[source.name], subject)):
            # (Of a sample left out, torch may multiply 0 by an infinite derivative.)
            wrong = _gradient_differs(
                source, got[source.name], {row: w[source.name] for row, w in want.items()}, program.seed, subject
            )
            if wrong is not None:
                return f"gradient of {last} with respect to {source.name}: {wrong}"
    return None


def _gradient_differs(source: Source, got: Any, want: Mapping[int, Any], seed: int, subject: Subject) -> str | None:
    """How a gradient differs from those of the samples: the sum of these, for a source that they share."""
    expected = torch.zeros(source.shape, dtype=getattr(torch, source.dtype))
    for row, gradient in want.items():
        if gradient is not None:
            place = (slice(row, row + 1), *places_of(source, seed)[row]) if source.axes else ...
            expected[place] += _filled(gradient, subject)
    whole = _filled(got, subject)
    if not source.axes:
        return difference(whole, expected) if bool(expected.isfinite().all()) else None
    there = positions_there(source, seed)
    if bool((whole[~there] != 0).any()):
        return "it is not zero in the padding"
    there[[row for row in range(len(there)) if row not in want]] = False
    return difference(whole, expected, there & expected.isfinite())


def _filled(gradient: Any, subject: Subject) -> Tensor:
    shown = Shown.of(subject, gradient)
    return torch.where(shown.valid, shown.data, 0)


# ------------------------------------------------------------- samples of different sizes, and the padded batch of them

# A source has `axes`: "B" for the samples, a letter for a dimension in which samples differ, a number for features.
# Sources with one letter have one length in each sample. All that is random follows from the program's seed.

SIDES = ("right", "right", "left", "centre")
AROUND = (float("nan"), float("inf"), 1e38)


def side_of(source: Source, seed: int) -> str:
    """Where the padding of a batch lies: in half of the programs, all batches have one side."""
    rng = random.Random(f"side {seed}")
    side, own = rng.choice(SIDES), rng.random() < 0.5
    return random.Random(f"side {seed} {source.seed}").choice(SIDES) if own else side


def lengths_of(source: Source, seed: int) -> list[tuple[int, ...]]:
    """The sizes of each sample; in half of the programs, some have length 0.

    (Of a sample without positions along one of two dimensions, no boolean tells how many it has along the other: none.)
    """
    columns = []
    for axis, most in zip(source.axes[1:], source.shape[1:], strict=True):
        rng = random.Random(f"{axis} {seed}")
        counts = isinstance(axis, str)
        columns.append([rng.randint(seed % 2, most) if counts else most for _ in range(source.shape[0])])
    found = zip(*columns, strict=True) if columns else [()] * source.shape[0]
    letters = [isinstance(axis, str) for axis in source.axes[1:]]
    return [
        tuple(0 if letter and 0 in sizes else size for letter, size in zip(letters, sizes, strict=True))
        for sizes in found
    ]


Place = tuple[slice, ...]


def places_of(source: Source, seed: int) -> list[Place]:
    """Where each sample lies in the batch."""
    side = side_of(source, seed)
    found = []
    for sizes in lengths_of(source, seed):
        place = []
        for length, size in zip(sizes, source.shape[1:], strict=True):
            start = {"right": 0, "left": size - length, "centre": (size - length) // 2}[side]
            place.append(slice(start, start + length))
        found.append(tuple(place))
    return found


def samples_of(source: Source, seed: int) -> list[tuple[Tensor, Tensor | None]]:
    """Each sample (1, …) by itself, and its mask; None if nothing is missing."""
    data = data_of(source)
    mask = None
    if source.mask == "random":
        generator = torch.Generator().manual_seed(source.seed + 1)
        mask = torch.rand(source.shape, generator=generator) < 0.8
        if source.shape[-1] > 1:  # whole positions, too
            mask &= torch.rand((*source.shape[:-1], 1), generator=generator) < 0.9
    return [
        (data[(slice(row, row + 1), *place)].clone(), None if mask is None else mask[(slice(row, row + 1), *place)])
        for row, place in enumerate(places_of(source, seed))
    ]


def sample_of(source: Source, row: int, seed: int, subject: Subject, requires_grad: bool = False) -> object:
    """A sample of a source by itself: plain, or masked where it misses values; a source without samples as it is."""
    if not source.axes:
        return data_of(source).requires_grad_(requires_grad)
    data, mask = samples_of(source, seed)[row]
    return data.requires_grad_(requires_grad) if mask is None else subject.wrap(data, mask, requires_grad=requires_grad)


def positions_there(source: Source, seed: int) -> Tensor:
    """bool of the batch's shape: which positions are there."""
    found = torch.zeros(source.shape, dtype=torch.bool)
    for row, place in enumerate(places_of(source, seed)):
        found[row][place] = True
    return found


def batch_of(source: Source, seed: int, subject: Subject, requires_grad: bool = False, own: bool = False) -> object:
    """The samples of a source as a padded batch, with garbage around them; a source without samples as it is.

    own  whether the extent is a tensor of its own also where nothing is missing; else it is the mask there
    """
    if not source.axes:
        return data_of(source).requires_grad_(requires_grad)
    exists = positions_there(source, seed)
    data = torch.where(exists, data_of(source), AROUND[source.seed % len(AROUND)])
    mask = None
    if source.mask == "random":
        mask = torch.zeros(source.shape, dtype=torch.bool)
        for (_, missing), row, place in zip(
            samples_of(source, seed), range(source.shape[0]), places_of(source, seed), strict=True
        ):
            assert missing is not None
            mask[row][place] = missing[0]
    positions = [d for d, axis in enumerate(source.axes) if d and isinstance(axis, str)]
    if not positions:
        return subject.wrap(data, mask, requires_grad=requires_grad)
    if own and mask is None:
        mask = exists.clone()
    return subject.padded(data, mask, exists, 0, positions, requires_grad)
