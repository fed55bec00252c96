"""`masked_dispatch.audit` reports what code around operators does to padding and missing values, line by line."""

from __future__ import annotations

import contextlib
import linecache
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from masked_dispatch.callers import is_torchs_own
from masked_dispatch.dispatch.run_rule import has_masked
from masked_dispatch.engine_internals import frames_to_caller
from masked_dispatch.seeing.calls import counted
from masked_dispatch.seeing.checks import (
    Check,
    Count,
    DividedSums,
    Factors,
    Line,
    NumbersOfNothing,
    RowsLeftOut,
    ValidPadding,
    batch_ends,
    lost_matrices,
    own_transposes,
    tables_on_the_grid,
    windows_too_long,
)
from masked_dispatch.seeing.event import Event, can_be_read, valid_of
from masked_dispatch.seeing.lost import LostStates, PrunedOutputs, one_for_many
from masked_dispatch.seeing.recorder import Recorder
from masked_dispatch.seeing.sizes import Followed, SamplesAlone, numbers_in, plain_number, size_read, with_each
from masked_dispatch.seeing.watching import recording_calls
from masked_dispatch.tensor.masked_tensor import MaskedTensor


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
        "a size that counts padding spaces coordinates, is interpolated to, pads in front or is an index: shorter "
        "samples alone would have another number",
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
        self._counts: dict[tuple[str, Line, str], tuple[int | None, int]] = {}
        self._calls = 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings, in the order in which they were first seen; one for each kind and line."""
        return tuple(
            _finding(kind, *line, text, count, calls) for (kind, line, text), (count, calls) in self._counts.items()
        )

    def __str__(self) -> str:
        findings = self.findings
        if not findings:
            return f"audit: nothing found in {counted(self._calls, 'call')}"
        lines = [f"audit: {counted(len(findings), 'finding')}"]
        for finding in findings:
            lines.append(f"{os.path.basename(finding.file)}:{finding.line}: {finding.code}")
            lines += [f"    {finding.what}: {finding.how_many}", f"    -> {finding.todo}"]
        return "\n".join(lines)

    __repr__ = __str__

    def __len__(self) -> int:
        return len(self._counts)


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
    report = Audit()
    auditor = Auditor(report._counts)
    try:
        with recording_calls(auditor), Functions(auditor):
            yield report
    finally:
        auditor.finish()
        report._calls = len(auditor.calls)


# ----------------------------------------------------- the calls of a block, each of which is checked when it has ended


class Auditor(Recorder):
    """Checks the calls that it records, but for those of backward, and those that torch or this library makes.

    counts  where it puts what it finds: for each kind, line and text, how many elements in how many calls
    """

    def __init__(self, counts: dict[tuple[str, Line, str], tuple[int | None, int]]) -> None:
        super().__init__()
        self.counts = counts
        self._states, self._factors, self._sums = LostStates(self.calls), Factors(), DividedSums()
        self._alone, self._nothing, self._pruned = SamplesAlone(), NumbersOfNothing(), PrunedOutputs()
        self._checks: tuple[Check, ...] = (
            one_for_many, windows_too_long, ValidPadding(), batch_ends, tables_on_the_grid, RowsLeftOut(),
            lost_matrices, own_transposes, self._factors, self._sums,
        )  # fmt: skip

    def begin(self, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Event | None:
        event = super().begin(op, args, kwargs)
        if event is not None and event.writes:
            with self._counting():
                for argument in event.operands if self._is_checked(event) else ():
                    _ = argument.in_extent  # before it is written
        return event

    def end(self, event: Event, result: object) -> None:
        super().end(event, result)
        if not self._is_checked(event) or not all(map(can_be_read, event.results)):
            return
        with self._counting():
            line = caller_line(_through(event))
            self._states.note(event, line)
            counted = list(self._nothing(event))
            if pruned := list(self._pruned(event)):
                self._add(pruned, caller_line(_LAYERS))
            if line is not None:
                self._add(counted, line)
                for check in self._checks:
                    self._add(check(event, line), line, event.batch_end)

    def _is_checked(self, event: Event) -> bool:
        """Whether it is a call of the block's own, not one of backward or of a composite operator."""
        if event.call.backward or any(opened.module == 0 for opened in self._stack.open if opened is not event):
            return False
        return all(can_be_read(argument.tensor) for argument in event.operands)

    def finish(self) -> None:
        """Add what is known at the end of the block."""
        for kind, line, rows, calls in self._states.at_end():
            self._add([(kind, rows)], line, calls=calls)

    def mask_dropped(self, invalid: int | None) -> None:
        line = caller_line()
        if line is not None:
            self._add([("mask dropped", invalid)], line)

    def batch_end(self, text: str) -> None:
        event = self._stack.open[-1] if self._stack.open and not self._stack.counting else None
        if isinstance(event, Event):
            event.batch_end = text

    def called(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch as code in the block does; the result, whose sizes are followed."""
        has_numbers = any(True for _ in numbers_in([args, kwargs]))
        plain = (with_each(args, plain_number), with_each(kwargs, plain_number)) if has_numbers else (args, kwargs)
        before = dict(self.counts) if has_numbers else self.counts
        if self._stack.counting:
            return function(*plain[0], **plain[1])
        call = self._alone.before(function, args, kwargs)
        result = function(*plain[0], **plain[1])
        name, line = call.name.rstrip("_"), caller_line()
        with self._counting():
            if line is not None:
                if name in _SIZES or getattr(getattr(function, "__self__", None), "__name__", "") == "shape":
                    return self._size(name, args, kwargs, result) if _reads_itself() else result
                operands = [t for t in args if isinstance(t, Tensor)]
                if operands and not has_masked(args) and not isinstance(result, MaskedTensor):
                    self._plain(name, operands, args, result, line)
                if has_numbers and has_masked(args):
                    key = ("divided by size", line, "")
                    if self.counts.get(key) == before.get(key):
                        self._add([("divided by size", _padding_divided_by(name, args, kwargs, result))], line)
            for origin in self._alone.after(call, result, caller_line(_FUNCTIONS)):
                self._add([(origin.kind, origin.count)], origin.line)
        return result

    @staticmethod
    def _size(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        x = args[0]
        if not isinstance(x, MaskedTensor) or x._extent is None or not can_be_read(x):
            return result
        return size_read(name, x, args[1] if len(args) > 1 else kwargs.get("dim"), result)

    def _plain(
        self, function: str, operands: Sequence[Tensor], args: Sequence[object], result: object, line: Line
    ) -> None:
        """A function of torch has been called, without masked tensors."""
        for product, count in self._factors.computed(function, operands, result):
            self._add([("plain factor", count)], product)
        if function in _DIVISIONS and isinstance(args[0], Tensor):
            self._add([("divided by size", self._sums.divided(args[0], plain_number(args[1])))], line)

    def _add(self, counts: Iterable[Count], line: Line | None, text: str = "", calls: int = 1) -> None:
        for kind, count in counts:
            if count == 0 or line is None:
                continue
            key = (kind, line, text if kind == "batch end" else "")
            before, earlier = self.counts.get(key, (0, 0))
            self.counts[key] = (None if before is None or count is None else before + count, earlier + calls)


class Functions(TorchFunctionMode):
    """Shows an auditor the functions of torch that code in the block calls, with the numbers that it passes.

    Kernels of masked tensors see neither calls without masked tensors nor where numbers come from.
    """

    def __init__(self, auditor: Auditor) -> None:
        super().__init__()
        self._auditor = auditor

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._auditor.called(func, args, kwargs or {})


# Modules of torch in which a layer of the caller's computes.
_LAYERS = ("torch.nn.", "torch.functional", "torch._jit_internal")
# Modules of torch with functions in Python, which show themselves to a mode when they are called.
_FUNCTIONS = ("torch.nn.functional", "torch.functional", "torch._jit_internal")
_SIZES = {"size", "numel", "nelement"}
_DIVISIONS = {"div", "divide", "true_divide"}
_PRODUCTS = {"mul", "multiply"}


def _padding_divided_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> int:
    """How much padding a number counts by which a masked tensor is divided."""
    if name in _DIVISIONS:
        by = [n for n in (*args[1:2], kwargs.get("other")) if isinstance(n, Followed) and n.counts_padding]
    else:
        factors = args if name in _PRODUCTS else ()
        by = [n for n in (*factors, *kwargs.values()) if isinstance(n, Followed) and n.divides_by_padding]
    if not by or not isinstance(result, MaskedTensor) or not can_be_read(result):
        return 0
    return max(n.padding for n in by) if bool(((result._data != 0) & valid_of(result)).any()) else 0


# ------------------------------------------------------------------------------------------------------- caller's lines


def caller_line(through: Sequence[str] = ()) -> Line | None:
    """The line of a caller's that makes the call which is running; None if torch or this library makes it.

    through  further modules that callers call to make the call
    """
    *between, (_, frame) = frames_to_caller()
    modules = [name for name, _ in between]
    between.clear()  # this frame is one of them: in a cycle, every tensor of the calls would live on
    if frame is None or any(_calls_for_itself(module, through) for module in modules):
        return None
    return Line(frame.f_code.co_filename, frame.f_lineno)


def _reads_itself() -> bool:
    """Whether the caller's line asks for a size, and no function of this library that it calls."""
    *between, _ = frames_to_caller()
    modules = [name for name, _ in between if name.startswith("masked_dispatch.")]
    between.clear()
    return all(name.startswith(("masked_dispatch.seeing.", "masked_dispatch.engine_internals")) for name in modules)


# Parts of this library between a caller's line and an operator, whose functions make the call that the line asks for.
_SERVING = (
    "autograd", "compiler_internals", "dispatch", "engine_internals", "replacements", "scopes", "seeing", "tensor",
    "torch_internals", "policies", "api.padding", "api.reductions",
)  # fmt: skip
_PARTS_SERVING = tuple(f"masked_dispatch.{part}" for part in _SERVING)


def _through(event: Event) -> tuple[str, ...]:
    """Modules of torch whose Python functions make the call that a line asks for, and do nothing else of their own."""
    if event.name == "einsum":
        return ("torch.functional",)
    if "reduction" in event.named:
        return ("torch.nn.functional", "torch.nn.modules.loss", "torch.nn.modules.module")
    windows = event.labels is not None and "window" in event.labels.roles.values()
    return ("torch.nn.functional", "torch.nn.modules.", "torch._jit_internal") if windows else ()


def _calls_for_itself(module: str, through: Sequence[str]) -> bool:
    if module.startswith("masked_dispatch."):
        return not module.startswith(_PARTS_SERVING)
    return is_torchs_own(module) and not module.startswith(tuple(through))
