"""`masked_dispatch.trace` records every call on masked tensors in a block, and shows where elements became invalid."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from masked_dispatch.seeing import page, text
from masked_dispatch.seeing.calls import Call, Operand, innermost
from masked_dispatch.seeing.recorder import Recorder
from masked_dispatch.seeing.watching import recording_calls

UNCOMPILED = "functions compiled by torch.compile ran uncompiled, so that their calls are seen"


@dataclass(frozen=True)
class Path:
    """The calls that computed a tensor, in the order in which they ran.

    calls    from the sources to the tensor; empty if the tensor is older than the trace
    sources  masked operands of these calls that no call of the trace has made
    """

    calls: tuple[Call, ...]
    sources: tuple[Operand, ...]

    def __str__(self) -> str:
        return text.path(self.calls, self.sources)

    __repr__ = __str__


class Trace:
    """The recorded calls; prints as a table, with one line for each call, indented by module.

    A trace holds numbers, names and weak references to tensors, so it keeps no tensor alive.
    """

    def __init__(self) -> None:
        self._recorder = Recorder()

    @property
    def _notes(self) -> tuple[str, ...]:
        return (UNCOMPILED,) if self._recorder.under_compile else ()

    @property
    def calls(self) -> tuple[Call, ...]:
        """Return every call of an operator or module with masked tensors, in order."""
        calls = self._recorder.calls
        kept: set[int] = set()
        for call in reversed(calls):
            if call.kind != "module" or call.number in kept or call.masked_operands or call.results:
                kept.add(call.number)
                if call.parent is not None:
                    kept.add(call.parent)
        return tuple(call for call in calls if call.number in kept)

    def lost(self) -> tuple[Call, ...]:
        """Return the operator calls that lost validity.

        A call loses validity if an element of an operand became invalid, in an operator whose result has its operands'
        positions, or if a smaller share of the result is valid than of any operand. For a composite operator, the
        list has its inner calls.
        """
        return innermost(call for call in self.calls if call.change.lost)

    def grown(self) -> tuple[Call, ...]:
        """Return the operator calls that made invalid elements valid, or a larger share valid than of any operand."""
        return innermost(call for call in self.calls if call.change.grown)

    def densified(self) -> tuple[Call, ...]:
        """Return the calls that densified a tensor."""
        return tuple(call for call in self.calls if call.densified)

    def of(self, tensor: Tensor) -> Path:
        """Return the calls that computed `tensor`, back to its sources, through views and writes to them.

        Raises ValueError if no call of the trace made or took the tensor, and TypeError for anything but a tensor.
        """
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"t.of() takes a tensor, and this is a {type(tensor).__name__}: pass one of its tensors, such as "
                "output.last_hidden_state of a model of transformers"
            )
        calls = {call.number: call for call in self._recorder.calls}
        known = self._recorder.has_seen(tensor)
        wanted, found = list(self._recorder.source_of(tensor)), set()
        if not wanted and not known:
            raise ValueError(
                f"no call of this trace has made or taken this tensor of shape {tuple(tensor.shape)}: pass the "
                "object itself that was computed inside the block"
            )
        while wanted:
            number = wanted.pop()
            if number not in found:
                found.add(number)
                wanted += [source for operand in calls[number].operands for source in operand.source]
        path = tuple(calls[number] for number in sorted(found))
        return Path(path, tuple(o for call in path for o in call.masked_operands if not o.source))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as a self-contained HTML page."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(page.page(self.calls, self._notes))

    def to_text(self, *, times: bool = True, depth: int | None = None) -> str:
        """Return the printed form of the trace; without `times`, it is the same in every run.

        depth  the number of levels of modules and calls to show, 1 for only the outermost; None for all
        """
        if depth is not None and depth < 1:
            raise ValueError(f"depth={depth} shows nothing: pass at least 1, or None for every level")
        return text.table(self.calls, self._notes, times, depth)

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def __len__(self) -> int:
        return len(self.calls)


@contextlib.contextmanager
def trace() -> Iterator[Trace]:
    """Record every call on masked tensors inside the block::

        with masked_dispatch.trace() as t:
            loss = model(x)
            loss.backward()
        # each module and operator: valid before, valid after, rule, storage, time
        print(t)
        t.lost(), t.grown()  # where elements became invalid, or valid
        t.of(loss)  # the calls that computed a tensor
        t.to_html("trace.html")

    The trace covers the calls of this thread or task and the backward that it starts, even if the autograd engine runs
    it in another thread. Functions of torch.compile run uncompiled inside the block. Counting reads masks, which waits
    for a device. The library registers its kernels again when the first trace of the process opens and when the last
    one ends, so no other thread should compute with masked tensors at these two moments.

    Raises RuntimeError inside a function that torch.compile compiles.
    """
    found = Trace()
    with recording_calls(found._recorder):
        yield found
