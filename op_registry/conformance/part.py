"""Select a part of a list by ``K/N`` on a command line, so that each of N runs takes a different part."""

from __future__ import annotations

import argparse


def part(text: str) -> slice:
    """Every N-th, beginning with the K-th, K from 0 to N - 1."""
    first, _, of = text.partition("/")
    if not (first.isdigit() and of.isdigit() and int(first) < int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 0 to N - 1")
    return slice(int(first), None, int(of))
