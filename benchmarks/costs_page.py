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


_PLAIN = "the plain model with its padding mask"
_COMPILED = "the plain model with its padding mask, compiled"

TABLES = {
    "Padded batches, 66 % of tokens valid": (
        Cost(
            "a training step of a stock Transformer or BERT",
            _PLAIN,
            "training",
            r".*large, training step, masked, × plain",
        ),
        Cost("a training step, packed", _PLAIN, "training", r".*large, training step, masked, packed, × plain"),
        Cost("a training step, compiled", _COMPILED, "compiled_training", r".*, masked, × plain: training step"),
        Cost(
            "a training step, packed and compiled",
            _COMPILED,
            "compiled_training",
            r".*packed, × plain: training step",
        ),
        Cost("a training step of a toy model", _PLAIN, "training", r".*small, training step, masked, × plain"),
        Cost(
            "the peak memory of a training step",
            _PLAIN,
            "training",
            r".*large, training step, masked, peak × plain's",
        ),
        Cost(
            "the peak memory of a training step, packed",
            _PLAIN,
            "training",
            r".*large, training step, masked, packed, peak × plain's",
        ),
    ),
    "Missing values": (
        Cost(
            "a reduction of 2048² elements with holes",
            "`torch.where`, and a division by the count",
            "eager_reductions",
            r"\w+, forward, 2048², random mask, fresh: × by hand",
        ),
        Cost(
            "the reduction and its backward",
            "`torch.where`, a division, and their backward",
            "eager_reductions",
            r"\w+, forward and backward, 2048², random mask, fresh: × by hand",
        ),
        Cost(
            "the reduction, compiled",
            "`torch.where` and a division, compiled",
            "reductions",
            r".*: times faster than by hand",
            inverted=True,
        ),
        Cost(
            "six elementwise operators on 2048² elements",
            "the operators without a mask",
            "chain",
            r"chain, 2048.*, eager: × plain",
        ),
        Cost(
            "six elementwise operators, compiled",
            "the operators without a mask, compiled",
            "chain",
            r"chain, 2048.*, compiled: × plain compiled",
        ),
        Cost("one eager call on 64 × 64 elements", "the call without a mask", "overhead", r".*, no grad"),
    ),
    "Sparse storage": (
        Cost(
            "the product of a CSR matrix and a dense matrix",
            "the product with torch's CSR matrix",
            "sparse",
            r"x @ dense.*× torch's CSR",
        ),
        Cost(
            "a step of Adagrad on looked-up rows", "the step of `torch.optim.Adagrad`", "adagrad", r".*: times torch's"
        ),
    ),
    "The rest of the process": (
        Cost("code on plain tensors", "without this library", "untouched", r"plain .*: with ÷ without"),
    ),
}

PAGE_TEXT = """\
# What it costs

Each figure in the table is a ratio: the time or memory of code with this library, divided by the time or memory of code
without it. A ratio below 1 means that the code with this library takes less. A cell with two figures covers several
models or operators, and gives their least and their greatest ratio. *Packed* means that the batch is [stored without
its padding](packed-models.md).

{tables}

## When it does not pay

- **Small tensors in an eager loop.** A masked call on 64 × 64 elements takes {small} times as long as a plain call,
  because each masked call runs a Python function and makes a tensor subclass. `torch.compile` reduces this cost, but
  does not remove it: a compiled chain of six masked operators takes {chain_small} times as long as the compiled chain
  without masks.
- **Compiled code that mostly reads memory.** Masked code reads the mask, one byte for each element, in addition to the
  data. With AVX2, torch's compiler reads the mask slowly ([why](performance.md)).
- **Packed batches under `torch.compile(fullgraph=True)`.** A packed training step of `nn.TransformerEncoder` has
  {breaks} graph breaks, so it does not compile into one graph.
- **One masked mean**, if you need nothing else. Two lines of torch compute it.

{measured}

These ratios depend much less on the machine than seconds do. `python -m benchmarks NAME` measures the ratios of one
benchmark on your machine. [Performance](performance.md) compares every figure with its goal, and says why some goals
are missed.
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
    lines = ["| code with this library | compared with | ratio |", "| --- | --- | ---: |"]
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
