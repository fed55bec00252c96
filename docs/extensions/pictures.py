"""Draws the pictures of the pages: ``python docs/extensions/pictures.py`` writes docs/pictures/*.svg.

Each picture has a light background of its own, so that you can read it on a dark page too. It is 440 units wide, so
that its text keeps its size on a phone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from masked_dispatch.tensor.printing import INVALID

FOLDER = Path(__file__).parents[1] / "pictures"
WIDTH = 440
INK, SOFT, PAPER = "#1f2933", "#52606d", "#fbfbf9"
VALID, OTHER, PLAIN, RULE = "#b2dfdb", "#f4f6f7", "#fff3c4", "#d9e2f7"
CELL = 26

Row = Sequence[object]


class Picture:
    """A drawing that grows from top to bottom; the next part begins at `y`."""

    def __init__(self, title: str) -> None:
        self.title, self.parts, self.y = title, list[str](), 14

    def text(self, x: float, y: float, words: str, *, size: int = 13, color: str = INK, anchor: str = "start") -> None:
        code = ' font-family="ui-monospace, Menlo, Consolas, monospace"' if words.startswith("`") else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{code}>'
            f"{escape(words.strip('`'))}</text>"
        )

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{SOFT}"/>'
        )

    def arrow(self, x: float, start: float, end: float, color: str = INK) -> None:
        """A vertical arrow."""
        tip = 6 if end > start else -6
        self.parts.append(f'<path d="M{x:g} {start:g}V{end:g}" stroke="{color}" stroke-width="1.5" fill="none"/>')
        self.parts.append(f'<path d="M{x - 4:g} {end - tip:g}L{x:g} {end:g}L{x + 4:g} {end - tip:g}Z" fill="{color}"/>')

    def box(self, lines: Sequence[str], fill: str, x: float = 12, width: float = WIDTH - 24) -> None:
        """A box with one line in ink and softer lines below it; then `y` is below the box."""
        height = 12 + 18 * len(lines)
        self.rectangle(x, self.y, width, height, fill)
        for number, line in enumerate(lines):
            self.text(x + 10, self.y + 20 + 18 * number, line, color=SOFT if number else INK)
        self.y += height

    def cells(self, x: float, y: float, rows: Sequence[Row], *, size: int = CELL) -> None:
        """A matrix; None stands for an invalid element, and so do "F" and "0" of a mask; "" is padding, left blank."""
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                if value == "":
                    continue
                invalid = value in (None, "F", "0")
                left, top = x + j * size, y + i * size
                self.rectangle(left, top, size, size, INVALID if invalid else VALID)
                shown = "–" if value is None else str(value)
                self.text(left + size / 2, top + size / 2 + 5, shown, color=SOFT if invalid else INK, anchor="middle")

    def svg(self) -> str:
        height = self.y + 14
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
            f'height="{height:g}" role="img" font-family="system-ui, sans-serif">\n'
            f"<title>{escape(self.title)}</title>\n"
            f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="{PAPER}"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def packages() -> Picture:
    """Which package imports which."""
    picture = Picture("Two packages; imports run downwards")
    picture.box(["tests, benchmarks, examples"], OTHER)
    for name, lines, fill in (
        (
            "masked_dispatch: how a call gets there",
            [
                "api, functional, optim, missing, seeing: what users import",
                "dispatch: kernels, the ladder, views, writes",
                "autograd: from tensors to records and back",
                "tensor: the subclasses, who owns a mask",
            ],
            VALID,
        ),
        (
            "op_registry: what an operator means",
            [
                "conformance, testing: the laws P1–P9",
                "ops: the rule book, a family of operators a folder",
                "authoring: the words that rules are written in",
                "records, sparse: Dense and Sparse, plain torch",
            ],
            RULE,
        ),
        ("torch", ["operators, autograd and compiler on plain tensors"], PLAIN),
    ):
        picture.arrow(WIDTH / 2, picture.y, picture.y + 20)
        picture.y += 20
        picture.box([name, *lines], fill)
    return picture


def one_call() -> Picture:
    """A masked call, forward and backward."""
    picture = Picture("One call, forward on the left and backward on the right")
    steps = (
        (VALID, ["`F.linear(x, w)`", "x is masked, w a plain parameter"], "", ""),
        (
            OTHER,
            ["kernel at PreDispatch", "above functorch, autocast and autograd"],
            "x and w",
            "x.grad masked, w.grad plain",
        ),
        (
            RULE,
            ["Unwrap: x becomes Dense(data, validity)", "backward: puts the mask of x on the gradient"],
            "x",
            "masked",
        ),
        (
            RULE,
            ["the rule, in plain torch", "fills x with 0, calls F.linear once,", "says where the result is valid"],
            "record",
            "plain",
        ),
        (
            RULE,
            ["Wrap: the record becomes a masked tensor", "backward: zero where the result is invalid"],
            "record",
            "plain, 0 if invalid",
        ),
        (VALID, ["`y`", "masked"], "y", "gradient of y"),
    )
    for number, (fill, lines, down, up) in enumerate(steps):
        if number:
            picture.arrow(90, picture.y, picture.y + 30)
            picture.text(100, picture.y + 19, down, size=12, color=SOFT)
            picture.arrow(225, picture.y + 30, picture.y, SOFT)
            picture.text(235, picture.y + 19, up, size=12, color=SOFT)
            picture.y += 30
        picture.box(lines, fill)
    return picture


def masks() -> Picture:
    """Data, a mask, holes and padding."""
    picture = Picture("A hole, padding, and one validity for each row")
    parts: tuple[tuple[str, str, Sequence[Row]], ...] = (
        ("a hole", "among valid elements", [[3, 1, 4], [1, None, 9], [2, 6, 5]]),
        ("padding", "fills up to one length", [[3, 1, 4], [1, 5, ""], [9, "", ""]]),
    )
    for number, (name, meaning, rows) in enumerate(parts):
        left = 30 + 215 * number
        picture.text(left, picture.y + 14, name, size=14)
        picture.text(left, picture.y + 32, meaning, color=SOFT)
        picture.cells(left, picture.y + 42, rows)
    picture.y += 42 + 3 * CELL + 26
    picture.text(30, picture.y + 8, "the mask that a caller sees", size=14)
    picture.text(245, picture.y + 8, "its validity, as stored", size=14)
    picture.cells(30, picture.y + 18, [["T"] * 4, ["F"] * 4, ["T"] * 4])
    picture.cells(245, picture.y + 18, [[1], ["0"], [1]])
    picture.text(282, picture.y + 48, "one number a row,", color=SOFT)
    picture.text(282, picture.y + 66, "which broadcasts", color=SOFT)
    picture.y += 18 + 3 * CELL
    return picture


def storages() -> Picture:
    """One masked matrix in each storage."""
    picture = Picture("One masked matrix in several storages")

    def heading(x: float, name: str, meaning: str) -> None:
        picture.text(x, picture.y + 14, name, size=14)
        picture.text(x, picture.y + 32, meaning, color=SOFT)

    def indices(x: float, y: float, name: str, numbers: Sequence[int]) -> None:
        picture.text(x, y, name, color=SOFT)
        for number, index in enumerate(numbers):
            picture.text(x + 60 + 17 * number, y, str(index), color=SOFT, anchor="middle")

    stored, offsets, columns = [7, 0, 2, 5, 1, 8, 4], [0, 3, 4, 6, 7], [0, 1, 2, 0, 0, 1, 0]
    left, right = 20, 240
    heading(left, "dense", "data, and validity where needed")
    heading(right, "packed", "rows without their padding")
    picture.cells(left, picture.y + 42, [[7, 0, 2, ""], [5, "", "", ""], [1, 8, "", ""], [4, "", "", ""]])
    picture.cells(right, picture.y + 42, [stored])
    indices(right, picture.y + 42 + CELL + 20, "offsets", offsets)
    picture.text(right, picture.y + 42 + CELL + 60, "The 0 is valid:", color=SOFT)
    picture.text(right, picture.y + 42 + CELL + 78, "every storage keeps it.", color=SOFT)
    picture.y += 42 + 4 * CELL + 24

    heading(left, "COO", "coordinates of each element")
    heading(right, "CSR", "the row as offsets")
    below = picture.y + 42 + CELL + 20
    for x, name, numbers in ((left, "row", [0, 0, 0, 1, 2, 2, 3]), (right, "offsets", offsets)):
        picture.cells(x, picture.y + 42, [stored])
        indices(x, below, name, numbers)
        indices(x, below + 20, "column", columns)
    picture.y = below + 44

    heading(left, "BSR", "whole blocks, with a validity for the holes inside of them")
    for number, block in enumerate(([[7, 0], [5, None]], [[2, None], [None, None]], [[1, 8], [4, None]])):
        picture.cells(left + number * (2 * CELL + 16), picture.y + 42, block)
    picture.y += 42 + 2 * CELL
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "packages": packages,
    "one_call": one_call,
    "masks": masks,
    "storages": storages,
}


def main() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
