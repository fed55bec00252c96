"""torch.masked's reductions: torch's function, without a mask, on what is valid and let in of each slice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.slots import Call, Slot, all_true, lines, oracle

NAMES = "sum prod mean amax amin logsumexp argmax argmin var std median norm"


@oracle(*(f"torch_masked::{name}" for name in NAMES.split()))
def reduction(c: Call) -> Any:
    """Valid where something is valid and let in, or `mask=` lets nothing in: there, the value of nothing."""
    x, mask = c["input"], c["mask"]
    let_in = all_true(x.data) if mask is None else mask.data.to(torch.bool).expand(x.shape)
    known = all_true(x.data) if mask is None else mask.mask.expand(x.shape)
    plain = c.plainly()
    values, valid = [], []
    flat = x.data.reshape(-1)
    takes, left_out = ((m & known).reshape(-1) for m in (let_in & x.mask, ~let_in))
    for k, at in enumerate(lines(x.shape, c.dims(x.ndim))):
        place = takes[at].nonzero().reshape(-1)
        nothing = bool(left_out[at].all())
        valid.append(bool(len(place)) or nothing)
        if len(place):
            values.append(_of_one(c, flat[at][place], place))
        else:
            values.append(_of_nothing(c, at) if nothing and len(at) else plain.reshape(-1)[k].detach())
    data = torch.stack(values).reshape(plain.shape).to(plain.dtype) if values else plain
    return Slot(data, torch.tensor(valid, dtype=torch.bool).reshape(plain.shape))


def _of_one(c: Call, values: Tensor, place: Tensor) -> Tensor:
    """The function of what is left of a slice; an argmax is a place in the whole slice."""
    result: Tensor = c.run({**c.bound, "input": values, "mask": None, "dim": _first(c), "keepdim": False}, _data)
    result = result.reshape(())
    return place[result.to(torch.int64)].to(result.dtype) if "arg" in c.name else result


def _of_nothing(c: Call, at: Tensor) -> Tensor:
    """The function of a slice that `mask=` shuts out."""
    shut, zeros = torch.zeros(len(at), dtype=torch.bool), torch.zeros(len(at), dtype=c["input"].data.dtype)
    result: Tensor = c.run({**c.bound, "input": zeros, "mask": shut, "dim": _first(c), "keepdim": False}, _data)
    return result.reshape(())


def _first(c: Call) -> Any:
    return 0 if c.name.endswith(("argmax", "argmin", "median")) else [0]


def _data(slot: Slot) -> Tensor:
    return slot.data
