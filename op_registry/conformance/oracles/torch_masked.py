"""torch.masked's reductions: torch's function without `mask=`, on the valid elements that the mask selects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import Call, Expected, all_true, oracle
from op_registry.conformance.oracles.engine import Group, collect, groups, slices

NAMES = "sum prod mean amax amin logsumexp argmax argmin var std median norm"


@oracle(*(f"torch_masked::{name}" for name in NAMES.split()))
def reduction(c: Call) -> Any:
    """Valid where a selected element is valid, or where `mask=` selects nothing: there, an empty slice's value."""
    x, mask = c["input"], c["mask"]
    selected = all_true(x.data) if mask is None else mask.data.to(torch.bool).expand(x.shape)
    known = all_true(x.data) if mask is None else mask.mask.expand(x.shape)
    left_out = (~selected & known).reshape(-1)

    def results() -> Any:
        over = c.dims(x.ndim)
        each = groups([Expected(x.data, x.mask & selected & known)], slices(x.shape, over))
        for group, indices in zip(each, slices(x.shape, over), strict=True):
            nothing_selected = bool(left_out[indices].all())
            if len(group.kept):
                yield True, _of_slice(c, group)
            else:
                yield nothing_selected, _of_nothing(c, group.size) if nothing_selected and group.size else None

    return collect(results(), c.plain().detach())


def _of_slice(c: Call, group: Group) -> Tensor:
    """The function of a slice's selected elements; an argmax is an index into the whole slice."""
    result: Tensor = c.plain(input=group.values[0], mask=None, dim=_first(c), keepdim=False).reshape(())
    return group.kept[result.to(torch.int64)].to(result.dtype) if "arg" in c.name else result


def _of_nothing(c: Call, size: int) -> Tensor:
    """The function of a slice in which `mask=` selects nothing."""
    zeros, nothing = torch.zeros(size, dtype=c["input"].data.dtype), torch.zeros(size, dtype=torch.bool)
    return c.plain(input=zeros, mask=nothing, dim=_first(c), keepdim=False)


def _first(c: Call) -> int | list[int]:
    """Dimension 0, in the type of the function's `dim` argument."""
    return 0 if c.name.endswith(("argmax", "argmin", "median")) else [0]
