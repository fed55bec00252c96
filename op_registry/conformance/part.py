"""Arguments of command lines: a part of a list as ``K/N``, so that each of N runs takes a different part; a number."""

from __future__ import annotations

import argparse


def part(text: str) -> slice:
    """Every N-th, beginning with the K-th, K from 0 to N - 1."""
    first, _, of = text.partition("/")
    if not (first.isdigit() and of.isdigit() and int(first) < int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 0 to N - 1")
    return slice(int(first), None, int(of))


def at_least_one(text: str) -> int:
    """A number of things to check: a check of nothing would succeed."""
    if not (text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)
