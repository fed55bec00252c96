"""Ties: among equal values, torch's unstable sorts and selections may return any index, and so may a subject."""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.conformance.sample import Sample

# For each function: which result is an index, and the position of `dim` among its arguments.
FREE = {"sort": (1, 1), "argsort": (0, 1), "topk": (1, 2), "kthvalue": (1, 2), "mode": (1, 1)}


def equally_right(sample: Sample, result: int, mine: Tensor, theirs: Tensor, mask: Tensor | None = None) -> bool:
    """Whether two results (where `mask`) are indices of equal values, from a function that doesn't specify which."""
    name = getattr(sample.fn, "__name__", "")
    index_result, dim_position = FREE.get(name, (-1, -1))
    if result != index_result or sample.kwargs.get("stable") or mine.shape != theirs.shape:
        return False
    x = sample.args[0]
    dim = sample.kwargs.get("dim", sample.args[dim_position] if len(sample.args) > dim_position else -1)
    if not isinstance(dim, int) or x.ndim == 0:
        return False
    keepdim = mine.ndim == x.ndim
    at_mine, at_theirs = (
        x.gather(dim, (t if keepdim else t.unsqueeze(dim)).clamp(0, x.shape[dim] - 1)) for t in (mine, theirs)
    )
    same = (at_mine == at_theirs) | ((at_mine != at_mine) & (at_theirs != at_theirs))
    if not keepdim:
        same = same.squeeze(dim)
    return bool(torch.all(same if mask is None else same | ~mask))
