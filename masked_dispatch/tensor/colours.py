"""The colours of a mask: notebooks, pictures and the page of a trace show invalid elements in the same grey.

What is not there, the padding of a batch that knows it, has no colour: text leaves it blank, pictures show the page.
"""

from __future__ import annotations

VALID = "#3b7dd8"
# For a white page; no text on our pages has this grey.
INVALID = "#dfdfdf"
# The same grey for pages that may also be dark: over white it looks like INVALID. And its parts.
INVALID_OVER_ANY_PAGE = "rgba(128,128,128,.25)"
GREY, GREY_OPACITY = 128, 0.25
# The page, where it is white.
NOT_THERE = "#ffffff"


def red_green_blue(colour: str) -> tuple[int, int, int]:
    """The three numbers, 0 to 255, of a colour written as above."""
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue
