"""Prepares docstrings for the site: a paragraph of arguments, ``name  what it is``, becomes a list, and a name that has
an entry in the reference becomes a link."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

ARGUMENT = re.compile(r"^(\w+(?:, \w+)*) {2,}(\S.*)$")
REFERENCE = Path(__file__).parents[1] / "reference.md"
ENTRIES = frozenset(
    re.findall(r"^::: masked_dispatch\.(\w+)\n(?! )", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE)
)
LITERAL = re.compile(r"::$", re.MULTILINE)
NAME = re.compile(r"(?::\w+:)?`(?:masked_dispatch\.|md\.)?([^`]*)`")


def as_markdown(text: str) -> str:
    """A docstring in Markdown."""
    return "\n\n".join(_paragraph(part) for part in LITERAL.sub(":", NAME.sub(_linked, text)).split("\n\n"))


def _linked(name: re.Match[str]) -> str:
    """A name in Markdown: a link if the reference has an entry for the name."""
    shown = re.sub(r"^:\w+:", "", name[0])
    return f"[{shown}][masked_dispatch.{name[1]}]" if name[1] in ENTRIES else shown


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    if not ARGUMENT.match(lines[0]):
        return text
    items: list[str] = []
    for line in lines:
        if argument := ARGUMENT.match(line):
            names = ", ".join(f"`{name}`" for name in argument[1].split(", "))
            items.append(f"- {names}: {argument[2]}")
        else:
            items[-1] += f" {line.strip()}"
    return "\n".join(items)


class Docstrings(griffe.Extension):
    """Rewrites every docstring when it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
