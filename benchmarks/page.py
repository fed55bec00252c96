"""The performance page: ``python -m benchmarks.page FILE [FILE ...]`` writes docs/performance.md and its plot, and
docs/costs.md, the few figures of it that users ask for (benchmarks/costs_page.py).

A FILE is what ``python -m benchmarks … --json FILE`` has written. Of a benchmark that is in several files, the last one
counts. No figure in the page is written by hand: one that should change is measured again. Why goals are missed, and
what would close them, is written here.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import costs_page
from benchmarks.harness import Goal

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
# What is measured, for each benchmark, in the order of the page.
TITLES = {
    "training": "R14: eager training step and evaluation of stock models",
    "overhead": "R5: one small eager call",
    "eager_reductions": "R3: eager reductions",
    "fill": "Eager fills",
    "chain": "R4: a chain of six elementwise operators",
    "packed": "R10: a transformer block on packed storage",
    "reductions": "R1, R2: compiled reductions",
    "graphs": "R12: graphs and fused kernels",
    "compiled_training": "R15: compiled training step of a stock model",
    "masked_mean": "R9: masked-mean training step",
    "sparse": "R7: work on sparse storage",
    "conversions": "R6: dense to sparse",
    "adagrad": "R8: a step of Adagrad on a sparse gradient",
    "crossovers": "R11: tensors whose every element is valid",
    "memory": "R17: peak memory",
    "untouched": "R13: what plain tensors and the import pay",
    "compile": "Start of a second process",
    "dynamic": "Tracing for any sizes",
    "xla": "The masked mean on XLA",
}

INTRODUCTION = """\
# Performance

This page compares the speed and the memory of this library with the project's goals. [What it costs](costs.md) sums up
the costs for your own code.

A *figure* is a ratio of the times (or memory) of two candidates, such as a masked and a plain training step. (A few
figures are counts or seconds, as their names say.) The candidates take turns in one process, on one thread. They are
timed only if they give the same results. Ratios depend much less on the machine than seconds do. These commands measure
all figures and write this page:

```
python -m benchmarks all --quick --json all.json
python -m benchmarks.page all.json
```

The command at the start of each section measures that section only. Without `--quick`, a command runs more rounds.

{runs}

![Every figure divided by its goal, by benchmark: what is left of the line at 1 reaches its goal.](performance.svg)

In the plot, each dot is one figure divided by its goal. If the goal is a lower bound, the dot is the goal divided by
the figure. A dot left of the line reaches its goal.

The goals of compiled code (R1, R2, R4, R9) were set on a processor with AVX-512. On a processor with AVX2, most of
these goals are missed, because the code that torch's compiler generates loads masks slowly. To load eight bytes of a
mask, this code copies the bytes into a buffer on the stack and loads them from the buffer
(`Vectorized<int8_t>::loadu(pointer, 8)` in torch's `vec256_int.h`). The processor cannot forward the bytes from the
copy to the load, so the load has to wait. A masked sum over 2048² elements took 4.2 times as long with this code as
with one load of eight bytes (`_mm_loadl_epi64`). Code written by hand uses a bool mask, which loads even more slowly.
"""

# Why a benchmark's goals are missed, where they are, and what would close them.
MISSED = {
    "training": (
        "Most goals for evaluation are missed because of Python code. A layer of BERT runs about fifty operators, "
        "and this library runs Python code for each of them (R5 has the time of one call). At the small size, this"
        " Python code takes most of the time. Either of two changes would remove it: attention as one operator, as"
        " in `nn.MultiheadAttention`, or dispatch in C++. `nn.TransformerEncoder` runs only one operator for each "
        "layer, on the valid tokens only. In packed evaluation of the large encoder, plain torch also computes "
        "only the valid tokens, because its fast path packs the batch with NestedTensor."
    ),
    "overhead": (
        "Without gradients, a call runs one Python function and makes one instance of the tensor subclass. Each of "
        "these two steps takes longer than a small kernel of torch. To reach the goals, both steps would have to move "
        "to C++."
    ),
    "eager_reductions": (
        "If a mask is *remembered* (it was used before, so the numbers of its valid elements are known), a "
        "reduction takes the time of a fill and of torch's own kernel. For softmax and logsumexp, torch's kernel "
        "alone takes about a third of the time of the code by hand. The kernels of var and std read the data "
        "twice. If whole rows are invalid, the code by hand is fast, because its `where` takes almost no time. One"
        " C++ kernel that reads data and mask once would reach the goals."
    ),
    "chain": (
        "In eager mode, the chain pays the cost of a call (R5) six times. In compiled code, loading the masks is slow "
        "with AVX2 (see the start of this page)."
    ),
    "packed": (
        "All the blocks spend most of their time in matrix products, whose time depends on the number of valid "
        "tokens alone. With AVX2, matrix products take a larger share of the time than with AVX-512."
    ),
    "reductions": (
        "With AVX2, the code that torch's compiler generates loads the masks slowly (see the start of this page). The "
        "one-pass kernel is a C++ loop that reads data and mask once; the C++ compiler vectorises it without this slow "
        "load."
    ),
    "masked_mean": (
        "In compiled code, loading the masks is slow with AVX2 (see the start of this page). In compiled code, the"
        " peak of memory is above its goal too, because backward needs the mask. The mask has one byte for each "
        "element, and the gradient has four."
    ),
    "sparse": (
        "The *limit* is the time of one pass over the stored values. Sums and maxima of rows use torch's kernels "
        "(`embedding_bag`, `segment_reduce`), and each of these kernels reads the values again. A C++ kernel would"
        " reach the goals. In a very sparse matrix, a call from Python takes longer than the work on the few "
        "elements."
    ),
    "conversions": (
        "CSC needs the mask in another order. Transposing the mask, tile by tile, takes longer than all other steps "
        "together."
    ),
}


@dataclass(frozen=True)
class Measured:
    """The goals of one benchmark, from one run."""

    name: str
    goals: tuple[Goal, ...]

    @property
    def reached(self) -> int:
        return sum(goal.reached for goal in self.goals)

    @property
    def farthest(self) -> Goal | None:
        """The goal that is missed by the largest factor, if one is missed."""
        missed = [goal for goal in self.goals if not goal.reached]
        return max(missed, key=share_of_goal, default=None)


def share_of_goal(goal: Goal) -> float:
    """The figure divided by the goal, or the other way round: up to 1 it is reached. inf if that says nothing."""
    over, under = (goal.bound, goal.measured) if goal.at_least else (goal.measured, goal.bound)
    if math.isnan(goal.measured):
        return math.inf
    return over / under if under else (0.0 if goal.reached else math.inf)


def measured_in(runs: Iterable[dict[str, Any]]) -> list[Measured]:
    """Each benchmark's goals from the last run that has it, in the order of the page."""
    found: dict[str, Measured] = {}
    for run in runs:
        for name in run["benchmarks"]:
            goals = [goal for goal in run["goals"] if goal["benchmark"] == name]
            found[name] = Measured(
                name, tuple(Goal(g["promise"], g["measured"], g["bound"], g["at_least"]) for g in goals)
            )
    return [found[name] for name in TITLES if name in found]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[int] = (0,)) -> str:
    """A table in Markdown; `texts` are the columns of text, the others have figures."""
    alignment = ["---" if number in texts else "---:" for number in range(len(columns))]
    lines = [columns, alignment, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def bound_of(goal: Goal) -> str:
    return f"{'≥' if goal.at_least else '≤'} {goal.bound:g}"


def figure_of(goal: Goal) -> str:
    return "not measured" if math.isnan(goal.measured) else f"{goal.measured:.2f}"


def circumstances(run: dict[str, Any]) -> str:
    """When, with what and on what machine a run was made."""
    machine = run["machine"]
    about = f"{machine['architecture']}, {machine['capability']}, {machine['cores']} cores"
    return (
        f"{run['date'][:10]} with torch {run['torch']} and Python {run['python']} on {machine['processor']} ({about})"
    )


def run_lines(runs: Iterable[dict[str, Any]]) -> str:
    """The circumstances of the runs that count, each with its benchmarks."""
    last = {name: circumstances(run) for run in runs for name in run["benchmarks"]}
    measured: dict[str, list[str]] = {}
    for name, about in last.items():
        measured.setdefault(about, []).append(f"`{name}`")
    return "\n\n".join(f"Measured on {about}: {', '.join(names)}." for about, names in measured.items())


def summary(measured: Sequence[Measured]) -> str:
    """One line for each benchmark: how many goals are reached, and the one that is missed by most."""
    rows = []
    for one in measured:
        far = one.farthest
        worst = "–" if far is None else f"{far.promise}: {figure_of(far)} ({bound_of(far)})"
        rows.append((TITLES[one.name], f"{one.reached} of {len(one.goals)}", worst))
    return table(("benchmark", "goals reached", "missed by most"), rows, texts=(0, 2))


def section(one: Measured) -> str:
    """One benchmark: the command, each goal with its figure, and why some are missed."""
    rows = [(g.promise, bound_of(g), figure_of(g), "yes" if g.reached else "**no**") for g in one.goals]
    why = "" if one.farthest is None else MISSED.get(one.name, "")
    return "\n\n".join(
        (
            f"## {TITLES[one.name]}",
            f"`python -m benchmarks {one.name}`",
            table(("", "goal", "figure", "reached"), rows),
            *([f"*Missed because:* {why}"] if why else []),
        )
    )


def page(runs: Sequence[dict[str, Any]]) -> str:
    """The page as Markdown."""
    measured = measured_in(runs)
    introduction = INTRODUCTION.format(runs=run_lines(runs))
    return "\n\n".join((introduction.rstrip(), summary(measured), *map(section, measured))) + "\n"


def plot(measured: Sequence[Measured], file: Path) -> None:
    """A dot for each goal, by benchmark; the file's kind is that of its name."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    # The same figures give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "performance", "svg.fonttype": "none", "font.size": 9})
    # Its text keeps its size on a phone: no wider than the column there, with each title above its dots.
    figure, axes = pyplot.subplots(figsize=(4.2, 0.4 * len(measured) + 0.8), layout="constrained")
    for row, one in enumerate(measured):
        shares = [(min(max(share, 0.05), 20), goal.reached) for goal in one.goals if (share := share_of_goal(goal))]
        for reached, colour in ((True, "#00897b"), (False, "#e65100")):
            at = [share for share, is_reached in shares if is_reached is reached]
            axes.plot(at, [row] * len(at), "o", color=colour, alpha=0.5, markersize=5, markeredgewidth=0)
        axes.text(0.01, row - 0.25, TITLES[one.name], transform=axes.get_yaxis_transform())
    rows = range(len(measured))
    axes.vlines(
        [1] * len(rows), [row - 0.2 for row in rows], [row + 0.4 for row in rows], color="#777", linewidth=1
    )  # not on titles
    axes.set_xscale("log")
    axes.set_xticks([0.1, 0.25, 0.5, 1, 2, 4, 10], ["0.1", "0.25", "0.5", "1", "2", "4", "10"])
    axes.minorticks_off()
    axes.set_yticks([])
    axes.set_ylim(len(measured) - 0.6, -0.8)
    axes.set_xlabel("figure ÷ goal")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="what python -m benchmarks --json has written"
    )
    parser.add_argument("--output", type=Path, default=PAGE, help="the page; the plot is written beside it")
    arguments = parser.parse_args()
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in arguments.files]
    text = page(runs)
    arguments.output.write_text(text, encoding="utf-8")
    plot(measured_in(runs), arguments.output.with_suffix(".svg"))
    costs = arguments.output.with_name(costs_page.PAGE.name)
    try:
        costs.write_text(costs_page.page(text), encoding="utf-8")
    except ValueError as missing:
        print(f"{costs} is left as it is: {missing}", file=sys.stderr)


if __name__ == "__main__":
    main()
