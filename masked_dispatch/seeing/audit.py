"""`masked_dispatch.audit` reports what code around operators does to padding and missing values, line by line."""

from __future__ import annotations

import contextlib
import linecache
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from masked_dispatch.seeing.auditor import Auditor, Functions
from masked_dispatch.seeing.event import Line
from masked_dispatch.seeing.text import counted
from masked_dispatch.seeing.watching import recording_calls


class Kind(NamedTuple):
    """What has happened, which things are counted, and what to write instead."""

    what: str
    counts: str
    todo: str


KINDS = {
    "lost rows": Kind(
        "rows became wholly invalid, though something in them was valid",
        "row",
        "carry the old state where a step is invalid: torch.where(step.get_mask(), new, old); or give what is invalid "
        "a value, to_tensor(fill)",
    ),
    "lost matrix": Kind(
        "a matrix with holes has no result: an invalid element makes all of it invalid",
        "row",
        "take the rows without holes, x[x.get_mask().all(1)]; or centre the columns and fill them, "
        "(x - x.mean(0)).to_tensor(0)",
    ),
    "own transpose": Kind(
        "a tensor with holes was multiplied by its own transpose: its sums leave out different rows, and do not fit "
        "one another",
        "element",
        "centre first, x - x.mean(0); or take the rows without holes, x[x.get_mask().all(1)]; or torch.cov(x.T)",
    ),
    "stacked state": Kind(
        "a state was stacked with steps that are not there, and goes on past the end of its sample",
        "row",
        "carry the old state where a step is invalid: torch.where(step.get_mask(), new, old)",
    ),
    "window too long": Kind(
        "a window is longer than samples, and leaves them no position",
        "row",
        "pad the samples to the window, F.pad(x, (0, k)); or pool over all of a sample, x.amax(dim)",
    ),
    "pruned output": Kind(
        "all weights of an output are invalid, so that its bias is lost and it is invalid in every sample",
        "output",
        "if pruned weights are zeros, write them, weight.to_tensor(0.); or give the outputs a value, y.to_tensor(0.)",
    ),
    "valid padding": Kind(
        "padding became valid",
        "element",
        "keep the extent: leave out without_extent(), or say it again, masked_dispatch.padded(x, extent); reduce "
        "before to_tensor(fill); add to a masked buffer, x.new_zeros(shape)",
    ),
    "mask dropped": Kind(
        "an assignment to a plain tensor skipped what is invalid",
        "element",
        "assign to a masked buffer, x.new_empty(shape), or fill first, x.to_tensor(fill)",
    ),
    "batch end": Kind("", "element", ""),  # (the view says it)
    "table on the grid": Kind(
        "a plain operand has one value for an index of the batch, and samples begin at other indices",
        "element",
        "look it up at masked_dispatch.positions(x, dim), which counts in each sample; or move the samples to the "
        "front first, masked_dispatch.align(x, dim)",
    ),
    "rows left out": Kind(
        "a mean left out rows that are there, and wholly invalid",
        "row",
        "right if they are missing in what was measured; else, masked_dispatch.trace() shows where they became invalid",
    ),
    "sums of nothing": Kind(
        "a mean left out rows whose sum had nothing valid to add",
        "row",
        "if they count as 0, masked_dispatch.sum(x, dim, min_count=0), or count what is valid, x.count(dim)",
    ),
    "numbers of nothing": Kind(
        "a mean counts numbers that come from no position of their sample",
        "element",
        "leave them out: masked_dispatch.sum(part, dim, min_count=1) is invalid where a sample has nothing",
    ),
    "factors differ": Kind(
        "only one of two factors is valid",
        "element",
        "a statistic of each has other elements than the product: p.mask_like(t) and t.mask_like(p) before all of them",
    ),
    "plain factor": Kind(
        "a plain factor is reduced by itself, with what the product leaves out",
        "element",
        "masked_dispatch.mask_like(t, p) before both, for a plain t and a masked p",
    ),
    "divided by size": Kind(
        "a sum was divided by the size of its dimension, and has left something out",
        "element",
        "use mean, or divide by x.count(dim)",
    ),
    "cut at size": Kind(
        "cut at a size that counts padding: positions stay that shorter samples alone would not have, and reach a "
        "result",
        "element",
        "leave out the last k of each sample, x[..., :-k]; or x.mask_like(y)",
    ),
    "cut short at size": Kind(
        "a size that counts padding leaves shorter samples fewer positions than they would have alone",
        "element",
        "cut and pad by numbers that are the same for each sample, x[..., k:] and F.pad(x, (0, k))",
    ),
    "placed by size": Kind(
        "a size that counts padding spaces coordinates, pads in front or is an index: shorter samples alone would have "
        "another number",
        "element",
        "count positions within each sample, masked_dispatch.positions(x, dim), and pad by numbers that are the same "
        "for each",
    ),
    "shaped by size": Kind(
        "a tensor of a size that counts padding is reduced, with elements that shorter samples alone would not have",
        "element",
        "count what is there, x.count(dim); or masked_dispatch.mask_like(t, x), for a tensor t of this size",
    ),
}


@dataclass(frozen=True)
class Finding:
    """What an audit has found at a line.

    kind   one of the kinds that :func:`masked_dispatch.audit` lists
    file, line, code  the caller's line, and its text ("" if the source is not there)
    what, todo        what has happened, and what to write instead
    count  how many elements or rows, in all calls of the line; None if counting would have waited for a device
    calls  how many calls of the line
    """

    kind: str
    file: str
    line: int
    code: str
    what: str
    todo: str
    count: int | None
    calls: int

    @property
    def how_many(self) -> str:
        """The count in words."""
        thing = KINDS[self.kind].counts
        number = f"{thing}s not counted" if self.count is None else counted(self.count, thing)
        return number if self.calls == 1 else f"{number} in {self.calls} calls"

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}: {self.what} ({self.how_many}): {self.todo}"


class Audit:
    """What :func:`masked_dispatch.audit` has found. `print(report)` prints it; it is false if it has found nothing."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, Line, str], tuple[int | None, int]] = {}
        self._calls = 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings, in the order in which they were first seen; one for each kind and line."""
        return tuple(
            _finding(kind, *line, text, count, calls) for (kind, line, text), (count, calls) in self._found.items()
        )

    def __str__(self) -> str:
        findings = self.findings
        if not findings:
            return f"audit: nothing found in {counted(self._calls, 'call')}"
        lines = [f"audit: {counted(len(findings), 'finding')}"]
        for found in findings:
            lines.append(f"{os.path.basename(found.file)}:{found.line}: {found.code}")
            lines += [f"    {found.what}: {found.how_many}", f"    -> {found.todo}"]
        return "\n".join(lines)

    __repr__ = __str__

    def __len__(self) -> int:
        return len(self._found)


def _finding(kind: str, file: str, number: int, text: str, count: int | None, calls: int) -> Finding:
    what, _, todo = KINDS[kind]
    if text:
        what, _, todo = text.partition(". ")
    return Finding(kind, file, number, linecache.getline(file, number).strip(), what, todo, count, calls)


@contextlib.contextmanager
def audit() -> Iterator[Audit]:
    """Report, line by line, what code does around operators that no meaning of theirs can mend::

        with masked_dispatch.audit() as report:
            loss = model(batch)
            loss.backward()
        print(report)  # line, what, how many, what to write instead
        report.findings  # the same for programs

    Kinds of findings, for the caller's line and with the number of elements, or of rows (of the first dimension):

    "lost rows"        rows became wholly invalid, though something in them was there and valid: a state that is carried
                       from step to step, ``last = r[:, t] + last``, and that nothing holds where a step isn't there; or
                       an invalid value broadcast over a row
    "lost matrix"      a factorization or a solution of a matrix with holes: ``torch.linalg.lstsq(A, t)``
    "own transpose"    a product of a tensor with holes, not centred, and its own transpose: ``A.mT @ A``
    "window too long"  a window that is longer than a sample leaves it no position: ``F.max_pool1d(x, x.shape[-1])``
    "stacked state"    a carried state was stacked with a step past the end: ``h = torch.stack([x[:, t], h]).sum(0)``
    "pruned output"    all weights of an output are invalid, and so is the output: ``linear(x)`` without its bias
    "valid padding"    padding became valid: after `without_extent`, in a plain buffer, or after `to_tensor` and reduced
    "mask dropped"     an assignment to a plain tensor skipped what is invalid, and :func:`updates` doesn't allow it
    "batch end"        an end of the batch, ``x[:, -1]``, taken where shorter samples have padding
    "rows left out"    a mean, or a loss, of rows that are there and wholly invalid in part; no loss whose targets are
    "sums of nothing"  the same of sums of rows without a valid element: ``(hit.sum(1) / n).mean()``
    "numbers of nothing"  a mean of results over parts of a batch, which shorter samples don't reach
    "factors differ"   a product of two masked tensors that are there in the same elements, and valid in others
    "plain factor"     a product with a plain tensor of the same shape, that is reduced by itself: Dice, weighted means
    "divided by size"  what left something out, divided by the size: ``x.sum(1) / x.shape[1]``, ones counted
    "cut at size"      positions that a shorter sample alone would not have: ``conv(x, padding=2)[..., :x.shape[-1]]``
    "cut short at size"  the same, of positions that it lacks: ``x[:, x.shape[1] // 2 :]``
    "placed by size"   coordinates, padding in front, and indices: ``torch.linspace(-1, 1, x.shape[1])``
    "shaped by size"   a tensor made as large as the batch, and reduced: ``torch.ones(x.shape).sum(1)``
    "table on the grid"  a plain operand with one value for an index, where samples don't begin at 0: ``x + table``

    Numbers taken from sizes of a padded batch, ``x.shape``, ``x.size(1)``, ``x.numel()``, are followed through
    arithmetic: they are what the batch has, and know what each sample alone would have.

    Lines of torch and of this library aren't reported, nor is what happens in backward; calls are looked at where all
    masked tensors are stored densely. Functions of torch.compile run uncompiled. As :func:`trace` does, an audit covers
    the calls of this thread or task, waits for a device, and costs nothing outside of a block; a function that
    torch.compile compiles cannot open one.
    """
    found = Audit()
    auditor = Auditor(found._found)
    try:
        with recording_calls(auditor), Functions(auditor):
            yield found
    finally:
        auditor.finish()
        found._calls = len(auditor.calls)
