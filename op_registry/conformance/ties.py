"""Indices of equal values: torch's unstable sorts and selections return any of them, and so may a subject."""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.conformance.sample import Sample

# Of each function: which result is positions, and where `dim` stands among its arguments.
FREE = {"sort": (1, 1), "argsort": (0, 1), "topk": (1, 2), "kthvalue": (1, 2), "mode": (1, 1)}


def equally_right(sample: Sample, result: int, mine: Tensor, theirs: Tensor, mask: Tensor | None = None) -> bool:
    """Whether two answers (where `mask`) point at the same values, in a function that promises no more."""
    name = getattr(sample.fn, "__name__", "")
    positions, place = FREE.get(name, (-1, -1))
    if result != positions or sample.kwargs.get("stable") or mine.shape != theirs.shape:
        return False
    x = sample.args[0]
    dim = sample.kwargs.get("dim", sample.args[place] if len(sample.args) > place else -1)
    if not isinstance(dim, int) or x.ndim == 0:
        return False
    kept = mine.ndim == x.ndim
    at_mine, at_theirs = (
        x.gather(dim, (t if kept else t.unsqueeze(dim)).clamp(0, x.shape[dim] - 1)) for t in (mine, theirs)
    )
    same = (at_mine == at_theirs) | ((at_mine != at_mine) & (at_theirs != at_theirs))
    if not kept:
        same = same.squeeze(dim)
    return bool(torch.all(same if mask is None else same | ~mask))
