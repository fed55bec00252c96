"""`masked_dispatch.trace` records every call on masked tensors in a block, and shows where elements became invalid."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from torch import Tensor

from masked_dispatch.seeing.calls import Call, Operand, duration, innermost, summary, text_of_path, text_of_trace
from masked_dispatch.seeing.recorder import Recorder
from masked_dispatch.seeing.watching import recording_calls
from masked_dispatch.tensor.printing import INVALID_OVER_ANY_PAGE, VALID

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
        return text_of_path(self.calls, self.sources)

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
        wanted, numbers = list(self._recorder.source_of(tensor)), set()
        if not wanted and not known:
            raise ValueError(
                f"no call of this trace has made or taken this tensor of shape {tuple(tensor.shape)}: pass the "
                "object itself that was computed inside the block"
            )
        while wanted:
            number = wanted.pop()
            if number not in numbers:
                numbers.add(number)
                wanted += [source for operand in calls[number].operands for source in operand.source]
        path = tuple(calls[number] for number in sorted(numbers))
        return Path(path, tuple(o for call in path for o in call.masked_operands if not o.source))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as a self-contained HTML page."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(page(self.calls, self._notes))

    def to_text(self, *, times: bool = True, depth: int | None = None) -> str:
        """Return the printed form of the trace; without `times`, it is the same in every run.

        depth  the number of levels of modules and calls to show, 1 for only the outermost; None for all
        """
        if depth is not None and depth < 1:
            raise ValueError(f"depth={depth} shows nothing: pass at least 1, or None for every level")
        return text_of_trace(self.calls, self._notes, times, depth)

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
    opened = Trace()
    with recording_calls(opened._recorder):
        yield opened


# --------------------------------------- as a page of HTML: a tree of calls, with bars for the shares of valid elements

COLOURS = f":root {{ --valid: {VALID}; --invalid: {INVALID_OVER_ANY_PAGE}; }}"
STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1d2129; --quiet: #5b6472; --line: #dfe3e8;
  --hover: #f3f5f8; --lost: #b3261e; --lost-back: #fdecea; --grown: #1d6b34;
  --grown-back: #e8f5ec; --dense: #7a4d00; --dense-back: #fff3dc; }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --text: #e4e7ec; --quiet: #9aa4b2; --line: #2c323b;
  --hover: #1d222a; --lost: #ff9d94; --lost-back: #43201d; --grown: #86d79d;
  --grown-back: #1b3524; --dense: #f2c46d; --dense-back: #3d2f12; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 3rem; max-width: 76rem; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { margin: 0 0 .25rem; font-size: 1.35rem; }
p { margin: .25rem 0 .75rem; color: var(--quiet); }
fieldset { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 0 0 1rem; padding: 0; border: 0; }
.tree { border-top: 1px solid var(--line); }
details > div.inner { margin-left: .55rem; padding-left: .7rem; border-left: 1px solid var(--line); }
summary { cursor: pointer; }
summary:focus-visible { outline: 2px solid var(--valid); outline-offset: -2px; }
.call { display: grid; grid-template-columns: minmax(12rem, 1fr) 19rem 13.5rem 5rem; gap: .1rem .9rem;
  align-items: center; padding: .3rem .4rem; border-bottom: 1px solid var(--line); }
.call:hover { background: var(--hover); }
.lost > .call, .call.lost { background: var(--lost-back); }
.grown > .call, .call.grown { background: var(--grown-back); }
.name { overflow-wrap: anywhere; font-family: ui-monospace, monospace; font-size: .87rem; }
details > summary .name::before { content: "\\25B8  "; color: var(--quiet); }
details[open] > summary .name::before { content: "\\25BE  "; }
.module .name { font-weight: 600; }
.shares { display: grid; grid-template-columns: 1fr 1.2rem 1fr; align-items: center; }
.arrow { color: var(--quiet); text-align: center; }
.share { display: block; margin: .1rem 0; font-size: .8rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bar { display: block; height: .4rem; border-radius: .2rem; background: var(--invalid); overflow: hidden; }
.bar i { display: block; height: 100%; background: var(--valid); }
.rule { font-size: .82rem; color: var(--quiet); }
.time { text-align: right; font-size: .82rem; color: var(--quiet); font-variant-numeric: tabular-nums; }
.mark { display: inline-block; margin: .1rem .3rem .1rem 0; padding: 0 .45rem; border: 1px solid; border-radius: .6rem;
  font: .76rem/1.5 system-ui, sans-serif; white-space: nowrap; color: var(--quiet); }
.mark.lost, .mark.raised { color: var(--lost); } .mark.grown { color: var(--grown); }
.mark.stored { color: var(--dense); }
.why { grid-column: 1 / -1; margin: .15rem 0 0; padding: .2rem .5rem; border-radius: .25rem; font-size: .82rem;
  overflow-wrap: anywhere; color: var(--dense); background: var(--dense-back); }
body:has(#only:checked) .tree .call.quiet:not(.module) { display: none; }
body:has(#backward:checked) .tree .backward { display: none; }
.headings { position: sticky; top: 0; z-index: 1; background: var(--page); color: var(--quiet); font-size: .78rem; }
.headings:hover { background: var(--page); }
@media (max-width: 50rem) { .headings { display: none; }
  body { padding: 1rem .75rem 2rem; }
  .call { grid-template-columns: 1fr auto; } .name { grid-column: 1; } .time { grid-column: 2; grid-row: 1; }
  .shares, .rule { grid-column: 1 / -1; }
  details > div.inner { margin-left: .2rem; padding-left: .4rem; } }
@media (max-width: 30rem) { .name { grid-column: 1 / -1; font-size: .8rem; } .rule { grid-column: 1; }
  .time { grid-row: auto; }
  details > div.inner { margin-left: 0; padding-left: .25rem; } }
"""

CONTROLS = """<fieldset>
<label><input type="checkbox" id="only"> only calls that change validity or storage</label>
<label><input type="checkbox" id="backward"> hide backward</label>
</fieldset>"""


HEADINGS = (
    '<div class="call headings" aria-hidden="true"><span>call</span>'
    '<span class="shares"><span>valid in</span><span></span><span>valid out</span></span>'
    '<span>rule, storage</span><span class="time">time</span></div>'
)


NOTHING = "<p>Nothing was called with a masked tensor.</p>"


def page(calls: Sequence[Call], notes: Iterable[str]) -> str:
    """Return the whole page."""
    inside: dict[int | None, list[Call]] = {}
    for call in calls:
        inside.setdefault(call.parent, []).append(call)
    tree = "\n".join(_branch(call, inside) for call in inside.get(None, []))
    remarks = "".join(f"<p>{escape(note)}</p>\n" for note in notes)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Where validity went</title>\n<style>{COLOURS}{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>Where validity went</h1>\n<p>{escape(summary(calls))}</p>\n{remarks}{CONTROLS}\n"
        f'<main class="tree">\n{HEADINGS}\n{tree or NOTHING}\n</main>\n</body>\n</html>\n'
    )


def _branch(call: Call, inside: dict[int | None, list[Call]]) -> str:
    """Format a call, with the calls that it made nested inside."""
    classes = " ".join(_classes(call))
    made = inside.get(call.number, [])
    if not made:
        return f'<div class="{classes}">{_row(call)}</div>'
    branches = "\n".join(_branch(child, inside) for child in made)
    attributes = (" open" if call.kind == "module" else "") + (' class="backward"' if call.backward else "")
    return (
        f'<details{attributes}><summary class="{classes}">{_row(call)}</summary>\n'
        f'<div class="inner">\n{branches}\n</div></details>'
    )


def _classes(call: Call) -> list[str]:
    noticed = [
        *(["lost"] if call.change.lost else []),
        *(["grown"] if call.change.grown and not call.change.lost else []),
        *(["dense"] if call.densified else []),
        *(["raised"] if call.error else []),
        *(["compiled"] if call.kind == "compiled region" else []),
    ]
    kind = "module" if call.kind == "module" else "operator"
    return ["call", kind, *(noticed or ["quiet"]), *(["backward"] if call.backward else [])]


def _row(call: Call) -> str:
    marks = "".join(f'<span class="mark {mark.partition(" ")[0]}">{escape(mark)}</span>' for mark in call.marks)
    rule = ", ".join(text for text in (call.rule, call.storage) if text)
    why = "".join(f'<span class="why">{escape(str(densification))}</span>' for densification in call.densified)
    error = f'<span class="why">{escape(call.error)}</span>' if call.error else ""
    return (
        f'<span class="name" title="call {call.number}">{escape(call.name)}</span>'
        f'<span class="shares"><span>{_shares(call.masked_operands)}</span><span class="arrow">→</span>'
        f"<span>{_shares(call.results)}</span></span>"
        f'<span class="rule">{escape(rule)} {marks}</span><span class="time">{duration(call.seconds)}</span>'
        f"{why}{error}"
    )


def _shares(operands: Sequence[Operand]) -> str:
    return "".join(_share(operand) for operand in operands) or '<span class="share">plain</span>'


def _share(operand: Operand) -> str:
    shape = " × ".join(map(str, operand.shape)) or "one number"
    title = escape(f"{operand.name}: {shape}, {operand.dtype}, {operand.storage}")
    bar = ""
    if operand.masked and operand.share is not None:
        bar = f'<span class="bar"><i style="width:{100 * operand.share:.1f}%"></i></span>'
    return f'<span class="share" title="{title}">{escape(str(operand))}{bar}</span>'
