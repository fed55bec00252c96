"""Makes a program that breaks a law smaller: fewer steps and tensors, plainer masks and storages, smaller shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from op_registry.fuzz.programs import Program, Source, Step

# The most programs that are tried, and seconds that they may take; each costs a few runs.
MOST_TRIALS = 400
MOST_SECONDS = 60.0
SMALLEST = 2  # the size that dimensions are shrunk to
# Kinds of masks in the order in which they are tried in place of another one.
PLAINER_MASKS = ("plain", "unstored", "random")

StillBroken = Callable[[Program], bool]


def shrunk(program: Program, still_broken: StillBroken) -> Program:
    """The smallest program found for which `still_broken` holds, one change after another."""
    trials, deadline = 0, time.monotonic() + MOST_SECONDS
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(program):
            trials += 1
            if still_broken(smaller):
                program, progress = smaller, True
                break
            if trials >= MOST_TRIALS or time.monotonic() > deadline:
                return program
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one simplification each, the largest change first."""
    yield from _halves(program)
    yield from _without_a_step(program)
    yield from _with_a_step_bypassed(program)
    yield from _without_unused_sources(program)
    for source in program.sources:
        for plainer in _plainer(source):
            yield _with_source(program, plainer)
    yield from _with_smaller_shapes(program)


def _halves(program: Program) -> Iterator[Program]:
    for stop in (len(program.steps) // 2, len(program.steps) * 3 // 4):
        if 0 < stop < len(program.steps):
            yield replace(program, steps=program.steps[:stop])


def _without_a_step(program: Program) -> Iterator[Program]:
    """The program without one step, and without the steps that need its value."""
    for number in reversed(range(len(program.steps))):
        kept: list[Step] = []
        missing: set[str] = set()
        for position, step in enumerate(program.steps):
            if position == number or missing & set(step.operands):
                missing.add(step.name)
            else:
                kept.append(step)
        if kept:
            yield replace(program, steps=tuple(kept))


def _with_a_step_bypassed(program: Program) -> Iterator[Program]:
    """The program without one step, with the step's first operand in place of its value."""
    for number, step in enumerate(program.steps):
        if step.writes or len(program.steps) == 1:
            continue
        later = [
            replace(s, operands=tuple(step.operands[0] if name == step.name else name for name in s.operands))
            for s in program.steps[number + 1 :]
        ]
        yield replace(program, steps=(*program.steps[:number], *later))


def _without_unused_sources(program: Program) -> Iterator[Program]:
    used = {name for step in program.steps for name in step.operands}
    for source in program.sources:
        if source.name not in used and len(program.sources) > 1:
            # A source that shares the removed source's mask gets its own mask of the same kind.
            kept = [
                replace(s, under=None, mask=source.mask) if s.under == source.name else s
                for s in program.sources
                if s is not source
            ]
            yield replace(program, sources=tuple(kept))


def _plainer(source: Source) -> Iterator[Source]:
    if source.requires_grad:
        yield replace(source, requires_grad=False)
    if source.storage != "dense":
        yield replace(source, storage="dense")
    if source.under is not None:
        yield replace(source, under=None)
    else:
        ranks = (*PLAINER_MASKS, source.mask)
        for mask in ranks[: ranks.index(source.mask)]:
            yield replace(source, mask=mask, storage="dense" if mask == "plain" else source.storage)
    if source.dtype in ("float64", "float16"):
        yield replace(source, dtype="float32")


def _with_smaller_shapes(program: Program) -> Iterator[Program]:
    """The program with one size replaced by a smaller one, wherever it occurs."""
    sizes = {size for source in program.sources for size in source.shape if size > SMALLEST}
    for size in sorted(sizes, reverse=True):
        for smaller in dict.fromkeys((SMALLEST, size // 2)):
            sources = (replace(s, shape=tuple(smaller if n == size else n for n in s.shape)) for s in program.sources)
            yield replace(program, sources=tuple(sources))


def _with_source(program: Program, source: Source) -> Program:
    return replace(program, sources=tuple(source if s.name == source.name else s for s in program.sources))
