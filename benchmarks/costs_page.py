"""The page *What it costs*: the few figures of docs/performance.md that a user asks for, beside what he does today.

``python -m benchmarks.page`` writes it together with that page; ``python -m benchmarks.costs_page``, again from the
figures in docs/performance.md. Every figure is a ratio of times, or of memory: 1 is what the reader has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "costs.md"
FIGURES = PAGE.with_name("performance.md")

SECTION = re.compile(r"^`python -m benchmarks (\w+)`$", re.MULTILINE)
ROW = re.compile(r"^\| (.+) \| [≤≥] \S+ \| (-?[\d.]+) \|", re.MULTILINE)


@dataclass(frozen=True)
class Cost:
    """One line: what is run, what it is compared with, and which figures say how long it takes.

    benchmark, promises  the benchmark, and a pattern of the whole text of the goals whose figures count
    inverted             the figures say how many times faster it is
    """

    run: str
    beside: str
    benchmark: str
    promises: str
    inverted: bool = False


TABLES = {
    "Padded batches, 66 % of tokens valid": (
        Cost(
            "a training step of a stock Transformer or BERT",
            "the same model with its padding mask",
            "training",
            r".*large, training step, masked, × plain",
        ),
        Cost("… packed", "the same", "training", r".*large, training step, masked, packed, × plain"),
        Cost("… compiled", "the same, compiled", "compiled_training", r".*, masked, × plain: training step"),
        Cost("… packed and compiled", "the same, compiled", "compiled_training", r".*packed, × plain: training step"),
        Cost("… of a model of toy size, eager", "the same", "training", r".*small, training step, masked, × plain"),
        Cost("the peak of its memory", "the same", "training", r".*large, training step, masked, peak × plain's"),
        Cost("… packed", "the same", "training", r".*large, training step, masked, packed, peak × plain's"),
    ),
    "Missing values": (
        Cost(
            "a reduction of 2048² elements with holes",
            "`torch.where`, and a division by the count",
            "eager_reductions",
            r"\w+, forward, 2048², random mask, fresh: × by hand",
        ),
        Cost(
            "… with its backward",
            "the same",
            "eager_reductions",
            r"\w+, forward and backward, 2048², random mask, fresh: × by hand",
        ),
        Cost("… compiled", "the same, compiled", "reductions", r".*: times faster than by hand", inverted=True),
        Cost("six elementwise operators on 2048² elements", "no mask", "chain", r"chain, 2048.*, eager: × plain"),
        Cost("… compiled", "no mask, compiled", "chain", r"chain, 2048.*, compiled: × plain compiled"),
        Cost("one eager call on 64 × 64 elements", "no mask", "overhead", r".*, no grad"),
    ),
    "Sparse storage": (
        Cost("a CSR matrix times a dense one", "torch's CSR", "sparse", r"x @ dense.*× torch's CSR"),
        Cost("a step of Adagrad on looked-up rows", "torch's", "adagrad", r".*: times torch's"),
    ),
    "The rest of the process": (
        Cost("plain tensors", "without this library", "untouched", r"plain .*: with ÷ without"),
    ),
}

PAGE_TEXT = """\
# What it costs

Each figure is a ratio: the time (or memory) of the masked call, divided by that of the code in the second column, which
you would write without this library. Below 1, the masked call takes less. Two figures are the least and the most of
several models or operators.

{tables}

## When it does not pay

- **Small tensors in an eager loop.** A call on 64 × 64 elements takes {small} times as long as a plain one, because it
  is a Python function and a new tensor subclass. `torch.compile` reduces this cost but does not remove it: a compiled
  chain of six operators takes {chain_small} times as long as the plain chain compiled.
- **Compiled code that does little but read memory.** The mask is read too, one byte for each element, and on AVX2
  torch's compiler reads it slowly ([why](performance.md)).
- **Packed batches under `torch.compile(fullgraph=True)`**: a packed step of the stock encoder breaks its graph
  {breaks} times.
- **One masked mean**, if you need nothing else: two lines of torch compute it.

{measured}

Seconds depend on the machine, ratios much less; `python -m benchmarks NAME` measures them on yours.
[Performance](performance.md) has every figure beside its goal, and says why some goals are missed.
"""


def figures_in(text: str) -> dict[str, dict[str, float]]:
    """What the page of all figures says: of each benchmark, the figure of each of its goals."""
    _, *parts = SECTION.split(text)
    return {
        name: {promise: float(figure) for promise, figure in ROW.findall(body)}
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def between(values: list[float]) -> str:
    """The least and the most of some figures, or the one that they are, with two digits."""
    ends = [f"{value:.0f}" if value >= 10 else f"{value:.2f}" if value < 2 else f"{value:.1f}" for value in values]
    least, most = ends[values.index(min(values))], ends[values.index(max(values))]
    return least if least == most else f"{least}–{most}"


def figure(cost: Cost, figures: dict[str, dict[str, float]]) -> str:
    """What one line says; raises ValueError where no goal has its figure."""
    found = [
        1 / value if cost.inverted else value
        for promise, value in figures.get(cost.benchmark, {}).items()
        if re.fullmatch(cost.promises, promise)
    ]
    if not found:
        raise ValueError(f"no figure of the benchmark {cost.benchmark} says how long {cost.run!r} takes")
    return between(found)


def page(text: str) -> str:
    """The page as Markdown, made of the text of docs/performance.md."""
    figures = figures_in(text)
    lines = ["| you run | beside | × |", "| --- | --- | ---: |"]
    for title, costs in TABLES.items():
        for cost in costs:
            heading = f"**{title}**: " if cost is costs[0] else ""
            lines.append(f"| {heading}{cost.run} | {cost.beside} | {figure(cost, figures)} |")

    def of(benchmark: str, promises: str) -> str:
        return figure(Cost(promises, "", benchmark, promises), figures)

    measured = re.findall(r"^(Measured on .*?): `", text, re.MULTILINE)
    return PAGE_TEXT.format(
        tables="\n".join(lines),
        small=of("overhead", r".*, no grad"),
        chain_small=of("chain", r"chain, 64.*, compiled: × plain compiled"),
        breaks=f"{figures['compiled_training']['nn.TransformerEncoder compiled, masked, packed: graph breaks']:g}",
        measured="; ".join(measured) + ".",
    )


def main() -> None:
    PAGE.write_text(page(FIGURES.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
