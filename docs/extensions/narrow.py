"""Prepares pages for narrow screens: long names get break points, and code in columns is marked. In wide tables, each
cell gets the name of its column, so that stylesheets/pages.css can show each row as a list."""

from __future__ import annotations

import re
from html import unescape
from itertools import zip_longest
from typing import Any

TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
CELL = re.compile(r"<(t[dh])([^>]*)>(.*?)</\1>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
PREFORMATTED = re.compile(r"<pre\b.*?</pre>|<code>[^<]*</code>", re.DOTALL)
PROMPT = re.compile(r">>>|\.\.\. ")
COLUMNS = re.compile(r" *(?!masked_tensor)\w.*? {3,}\S")
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*|--")
LONG_NAME = re.compile(r"[^\s<>]{25,}")
# Break after a dot, slash, comma, opening bracket or "=" inside a name. If a piece is still long, break before "_".
BREAK = re.compile(r"(?<=\w)([./,=(\[])(?!(?:py|md|cpp|expect)\b)(?=\w)")
LONG_PIECE = re.compile(r"[^\s<>]{31,}")
UNDERSCORE = re.compile(r"(?<=[a-zA-Z0-9])(?=_[a-zA-Z])")
QUANTITY = re.compile(r"(?<=[≤≥]) (?=\d)|(?<=\d) (?=%)")

# In pixels, as in the stylesheet: the column on a phone (420) and on the site (1280); then its characters and padding.
PHONE, SITE = 388, 688
CHARACTER, PADDING, SITE_CHARACTER, SITE_PADDING = 6.6, 18, 6.9, 24


def on_page_content(html: str, **_: Any) -> str:
    """mkdocs calls this function with each page."""
    return TABLE.sub(_labelled, PREFORMATTED.sub(_breakable, html))


def _breakable(block: re.Match[str]) -> str:
    if block[0].startswith("<pre"):
        lines = [line for line in unescape(TAG.sub("", block[0])).splitlines() if not PROMPT.match(line)]
        drawn = sum(bool(COLUMNS.match(line)) for line in lines) > max(len(lines) / 2, 3)
        return block[0].replace("<pre", "<pre data-drawn", 1) if drawn else block[0]
    return OPTION.sub(r'<span class="option">\g<0></span>', with_breaks(block[0]))


def with_breaks(text: str) -> str:
    """The text, with break points in its long names."""
    text = LONG_NAME.sub(lambda name: BREAK.sub(r"\1<wbr>", name[0]), text)
    return LONG_PIECE.sub(lambda piece: UNDERSCORE.sub("<wbr>", piece[0]), text)


def _labelled(table: re.Match[str]) -> str:
    text = QUANTITY.sub("&nbsp;", table[0])
    rows = rows_of(text)
    if "text-align" in text or least_width(rows) <= PHONE:  # figures are compared by column: such a table scrolls
        return text
    names = [TAG.sub("", name) for name in rows[0]]

    def with_names(row: re.Match[str]) -> str:
        column = iter(names)
        return CELL.sub(lambda cell: f'<{cell[1]}{cell[2]} data-column="{next(column)}">{cell[3]}</{cell[1]}>', row[0])

    return ROW.sub(with_names, text).replace("<table>", "<table data-rows>", 1)


def rows_of(table: str) -> list[list[str]]:
    """The cells' content, row by row; the first row has the names of the columns."""
    return [[cell[3] for cell in CELL.finditer(row)] for row in ROW.findall(table)]


def least_width(
    rows: list[list[str]], character: float = CHARACTER, padding: float = PADDING, prose: int = 18
) -> float:
    """Below this width in pixels, a table scrolls, or a line of prose has less than `prose` characters."""
    columns = zip_longest(*rows, fillvalue="")
    return sum(max(_least(cell, prose) for cell in column) * character + padding for column in columns)


def _least(cell: str, prose: int) -> int:
    words = unescape(TAG.sub("", cell.replace("<wbr>", " "))).split()
    return max(min(len(" ".join(words)), prose), *map(len, words), 0)
