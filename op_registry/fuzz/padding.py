"""P9 for random programs: a padded batch gives what its samples give one by one, in every step, and their gradients.

Where nothing is missing, the batch is run twice: its extent is its mask, and a tensor of its own. Both runs have the
same values, masks and extents; so has the program in a graph. A step that is refused has no value.

A step of which a sample by itself raises has nothing to be compared with, for this sample. Where torch has NaN for what
is made of nothing, the batch's element is there and has no number; nothing is claimed of what is made of it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.compare import difference, mask_difference
from op_registry.conformance.plain_torch import one_line
from op_registry.conformance.subject import Subject
from op_registry.errors import MaskedSemanticsError
from op_registry.fuzz import ragged
from op_registry.fuzz.programs import Program, Source
from op_registry.fuzz.running import as_function, execute, results_of
from op_registry.fuzz.sources import data_of

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
            {s.name: ragged.sample(s, row, program.seed, subject, s.requires_grad) for s in program.sources}
            for row in rows
        ]
        samples = [_alone(program, values, subject) for values in sources]
        holes = any(source.mask == "random" for source in program.sources)
        batches: dict[str, Values] = {}
        forms = (OWN,) if holes else (MASK, OWN)
        for form in forms:
            leaves = {
                s.name: ragged.batch(s, program.seed, subject, s.requires_grad, form == OWN) for s in program.sources
            }
            batches[form], complaint = _run(program, leaves, samples, subject, tally)
            if complaint is None and form == forms[program.seed // 2 % len(forms)]:  # samples are differentiated once
                complaint = _gradients_differ(batches[form], samples, leaves, sources, program, subject)
            if complaint is not None:
                return f"{form}: {complaint}"
        if len(batches) == 2:
            complaint = _unlike(batches[OWN], batches[MASK], subject)
            if complaint is not None:
                return f"{OWN}, and {MASK}: {complaint}"
        return _in_a_graph(program, *batches.popitem(), subject, tally) if compiled else None


def _alone(program: Program, values: Values, subject: Subject) -> Values:
    """The values of a sample by itself, without those that torch raises for, or that are made of NaN or infinity."""
    found, numbers = dict(values), set(values)
    for step in program.steps:
        runs = numbers.issuperset(step.operands) and execute(step, found, program.seed) is None
        if runs and _is_finite(found[step.name], subject):
            numbers.add(step.name)
    return found


def _is_finite(value: Any, subject: Subject) -> bool:
    data, valid = _elements(value, subject)
    return bool(data[valid].isfinite().all())


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
    data, valid, _ = _observed(value, subject)
    return data.flatten(), valid.flatten()


def _of_sample(value: Any, row: int, sample: Any, subject: Subject) -> tuple[Tensor, Tensor]:
    """The elements of a sample in a batch that are there, in the order of the sample by itself; and which are valid."""
    data, valid, there = (t[row] for t in _observed(value, subject))
    shape = sample.shape[1:]
    for dim, (size, own) in enumerate(zip(there.shape, shape, strict=False)):
        if size != own and there.ndim == len(shape):  # (of samples that were joined, each has its own places)
            order = there.logical_not().to(torch.uint8).argsort(dim=dim, stable=True)
            data, valid, there = (t.gather(dim, order) for t in (data, valid, there))
    return data[there], valid[there]


def _observed(value: Any, subject: Subject) -> tuple[Tensor, Tensor, Tensor]:
    """The data of a value; bool of its shape: which elements are valid, and which are there."""
    masked = subject.is_value(value)
    data, mask = subject.observe(value) if masked else (value, None)
    there = subject.extent(value) if masked else None
    everywhere = torch.ones(data.shape, dtype=torch.bool)
    return (
        data,
        everywhere if mask is None else mask.expand(data.shape),
        everywhere if there is None else there.expand(data.shape),
    )


def _difference(value: Any, sample: Any, row: int, subject: Subject) -> str | None:
    got, valid = _of_sample(value, row, sample, subject)
    want, wanted = _elements(sample, subject)
    if got.shape != want.shape:
        return f"{got.numel()} elements are there instead of {want.numel()}"
    nothing = wanted & want.isnan()
    if bool((nothing & valid & ~got.isnan()).any()):
        return "there is a number of nothing"
    valid, wanted = valid & ~nothing, wanted & ~nothing
    if not torch.equal(valid, wanted):
        return f"{int(valid.sum())} elements are valid instead of {int(wanted.sum())}"
    return difference(got.detach(), want.detach(), wanted)


def _unlike(got: Values, want: Values, subject: Subject) -> str | None:
    """The first value in which two runs of a batch differ."""
    for name in [*want, *(name for name in got if name not in want)]:
        if name not in got or name not in want:
            return f"{name} is refused in one of both"
        data, valid, there = _observed(got[name], subject)
        other, wanted, existing = _observed(want[name], subject)
        wrong = (
            f"the shape {tuple(data.shape)} instead of {tuple(other.shape)}"
            if data.shape != other.shape
            else f"{int((there != existing).sum())} positions are there in one of both"
            if not torch.equal(there, existing)
            else mask_difference(valid, wanted) or difference(data.detach(), other.detach(), wanted)
        )
        if wrong is not None:
            return f"{name}: {wrong}"
    return None


def _in_a_graph(program: Program, form: str, eager: Values, subject: Subject, tally: Tally) -> str | None:
    """The steps that have a value, in a graph; unless they cannot be compiled without extents."""
    mode = subject.modes().get(GRAPH)
    kept = replace(program, steps=tuple(step for step in program.steps if step.name in eager))
    if mode is None or not kept.steps:
        return None
    function = as_function(kept)
    sources = [ragged.batch(source, program.seed, subject, own=form == OWN) for source in program.sources]
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
    def plain(gradient: Any, shape: Any) -> Tensor:
        if gradient is None:
            return torch.zeros(shape, dtype=getattr(torch, source.dtype))
        data, mask = subject.observe(gradient) if subject.is_value(gradient) else (gradient, None)
        return data if mask is None else torch.where(mask, data, 0)

    whole = plain(got, source.shape)
    if not source.axes:
        shared = sum((plain(w, source.shape) for w in want.values()), plain(None, source.shape))
        return difference(whole, shared, None) if bool(shared.isfinite().all()) else None
    there = ragged.there(source, seed)
    if bool((whole[~there] != 0).any()):
        return "it is not zero in the padding"
    for row, gradient in want.items():
        sizes = [p.stop - p.start for p in ragged.places(source, seed)[row]]
        wanted = plain(gradient, (1, *sizes)).flatten()
        wrong = difference(whole[row][there[row]], wanted, wanted.isfinite())
        if wrong is not None:
            return f"of sample {row}: {wrong}"
    return None
