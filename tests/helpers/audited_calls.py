"""A padded batch, and what an audit finds in a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import masked_dispatch as md

LENGTHS = torch.tensor([4, 2, 3])
IN_EXTENT = torch.arange(5) < LENGTHS[:, None]
LABELS = torch.tensor([0, 1, 1])


def batch(*features: int) -> md.MaskedTensor:
    """A batch (3, 5, *features) of samples of 4, 2 and 3 positions."""
    data = torch.randn(3, 5, *features, generator=torch.Generator().manual_seed(0))
    return md.from_lengths(data, LENGTHS)


def findings_in(f: Callable[[], Any]) -> list[tuple[str, int | None]]:
    """The kinds and counts of what an audit finds in a call."""
    return [(finding.kind, finding.count) for finding in report_of(f).findings]


def report_of(f: Callable[[], Any]) -> md.Audit:
    with md.audit() as report:
        f()
    return report


def advice_of(f: Callable[[], Any]) -> list[str]:
    """The lines that print the only finding in a call, below the line of code."""
    return str(report_of(f)).split("\n")[2:]
