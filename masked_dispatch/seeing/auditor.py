"""The calls of a block, each of which is checked when it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from masked_dispatch.caller_warnings import is_torchs_own
from masked_dispatch.dispatch.run_rule import has_masked
from masked_dispatch.engine_internals import frames_to_caller
from masked_dispatch.seeing.checks import (
    DividedSums,
    Factors,
    NumbersOfNothing,
    RowsLeftOut,
    ValidPadding,
    batch_ends,
    lost_matrices,
    own_transposes,
    tables_on_the_grid,
    windows_too_long,
)
from masked_dispatch.seeing.event import Check, Event, Found, Line, Taken, can_be_read, valid_of
from masked_dispatch.seeing.lost_rows import LostStates, one_for_many
from masked_dispatch.seeing.pruned import PrunedOutputs
from masked_dispatch.seeing.recorder import Open, Recorder, leaves, tensors_of
from masked_dispatch.seeing.samples_alone import SamplesAlone
from masked_dispatch.seeing.sizes import Followed, numbers_in, plain_number, size_read, with_each
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.torch_internals import schema_of
from op_registry.bound import bind_by_name


class Auditor(Recorder):
    """Checks the calls that it records, but for those of backward, and those that torch or this library makes.

    found  where it puts what it finds: for each kind, line and text, how many elements in how many calls
    """

    def __init__(self, found: dict[tuple[str, Line, str], tuple[int | None, int]]) -> None:
        super().__init__()
        self.found = found
        self._states, self._factors, self._sums = LostStates(self.calls), Factors(), DividedSums()
        self._alone, self._nothing, self._pruned = SamplesAlone(), NumbersOfNothing(), PrunedOutputs()
        self._checks: tuple[Check, ...] = (
            one_for_many, windows_too_long, ValidPadding(), batch_ends, tables_on_the_grid, RowsLeftOut(),
            lost_matrices, own_transposes, self._factors, self._sums,
        )  # fmt: skip

    def begin(self, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Open | None:
        opened = super().begin(op, args, kwargs)
        if opened is None or opened.call.backward or self._is_inside_an_operator():
            return opened
        with self._counting():
            opened.event = _event_of(opened, op, args, kwargs)
        return opened

    def end(self, opened: Open, op: OpOverload, result: object) -> None:
        super().end(opened, op, result)
        event = opened.event
        if event is None:
            return
        event.results = list(leaves(result))
        if not all(map(can_be_read, event.results)):
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

    def finish(self) -> None:
        """Add what is known at the end of the block."""
        for kind, line, rows, calls in self._states.found():
            self._add([Found(kind, rows)], line, calls=calls)

    def mask_dropped(self, invalid: int | None) -> None:
        line = caller_line()
        if line is not None:
            self._add([Found("mask dropped", invalid)], line)

    def batch_end(self, text: str) -> None:
        event = self._stack.open[-1].event if self._stack.open and not self._stack.counting else None
        if event is not None:
            event.batch_end = text

    def called(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch as code in the block does; the result, whose sizes are followed."""
        has_numbers = any(True for _ in numbers_in([args, kwargs]))
        given = (with_each(args, plain_number), with_each(kwargs, plain_number)) if has_numbers else (args, kwargs)
        before = dict(self.found) if has_numbers else self.found
        if self._stack.counting:
            return function(*given[0], **given[1])
        call = self._alone.before(function, args, kwargs)
        result = function(*given[0], **given[1])
        name, line = call.name.rstrip("_"), caller_line()
        with self._counting():
            if line is not None:
                if name in _SIZES or getattr(getattr(function, "__self__", None), "__name__", "") == "shape":
                    return self._size(name, args, kwargs, result) if _reads_itself() else result
                operands = [t for t in args if isinstance(t, Tensor)]
                if operands and not has_masked(args) and not isinstance(result, MaskedTensor):
                    self._plain(name, operands, args, result, line)
                if has_numbers and has_masked(args):
                    found = Found("divided by size", _padding_divided_by(name, args, kwargs, result))
                    if self.found.get((found.kind, line, "")) == before.get((found.kind, line, "")):
                        self._add([found], line)
            for origin in self._alone.after(call, result, caller_line(_FUNCTIONS)):
                self._add([Found(origin.kind, origin.count)], origin.line)
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
            self._add([Found("plain factor", count)], product)
        if function in _DIVISIONS and isinstance(args[0], Tensor):
            self._add([Found("divided by size", self._sums.divided(args[0], plain_number(args[1])))], line)

    def _add(self, found: Iterable[Found], line: Line | None, text: str = "", calls: int = 1) -> None:
        for one in found:
            kind, count = one.kind, one.count
            if count == 0 or line is None:
                continue
            key = (kind, line, text if kind == "batch end" else "")
            before, earlier = self.found.get(key, (0, 0))
            self.found[key] = (None if before is None or count is None else before + count, earlier + calls)

    def _is_inside_an_operator(self) -> bool:
        return any(opened.call.kind == "operator" for opened in self._stack.open[:-1])


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


def _event_of(opened: Open, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Event | None:
    named = list(tensors_of(op, args, kwargs))
    if not all(can_be_read(t) for _, t in named):
        return None
    before = iter(opened.before)
    operands = [Taken(name, t, next(before).validity if isinstance(t, MaskedTensor) else None) for name, t in named]
    schema = schema_of(op)
    event = Event(
        op,
        schema.name.rpartition("::")[2].rstrip("_"),
        opened.category,
        opened.call,
        bind_by_name(op, args, kwargs),
        operands,
        schema.is_mutable,
    )
    for taken in operands if event.writes else ():
        _ = taken.there  # before it is written
    return event


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
    "torch_internals", "update_policy", "api.methods", "api.padding", "api.reductions", "api.skipna",
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
