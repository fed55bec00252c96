"""Docstrings as the site shows them: a paragraph of arguments, ``name  what it is``, becomes a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"^(\w+(?:, \w+)*) {2,}(\S.*)$")
ROLE = re.compile(r":\w+:`([^`]*)`")


def as_markdown(text: str) -> str:
    """A docstring in Markdown."""
    return "\n\n".join(_paragraph(part) for part in ROLE.sub(r"`\1`", text).split("\n\n"))


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
