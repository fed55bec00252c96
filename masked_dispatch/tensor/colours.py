"""The colours of a mask: notebooks, pictures and the page of a trace show what is invalid in the same grey."""

from __future__ import annotations

VALID = "#3b7dd8"
# On a white page; a grey in which no text of a page is written.
INVALID = "#dfdfdf"
# The same grey where the page may be dark too: over white it is INVALID.
INVALID_OVER_ANY_PAGE = "rgba(128,128,128,.25)"


def red_green_blue(colour: str) -> tuple[int, int, int]:
    """The three numbers, 0 to 255, of a colour written as above."""
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue
