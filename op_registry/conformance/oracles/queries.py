"""Questions about the valid elements: positions, counts, sets, comparisons, look-ups in sorted values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.slots import Call, NoOracle, Refused, Slot, all_true, oracle


@oracle("nonzero", "argwhere")
def nonzero(c: Call) -> Tensor:
    """Plain positions of the valid elements that are not zero."""
    x = c["self"]
    return torch.nonzero(x.mask & (x.data != 0))


@oracle("nonzero_numpy")
def nonzero_numpy(c: Call) -> list[Tensor]:
    """As nonzero, one tensor a dimension."""
    x = c["self"]
    return list(torch.nonzero(x.mask & (x.data != 0), as_tuple=True))


@oracle("nonzero_static")
def nonzero_static(c: Call) -> Tensor:
    """As nonzero, padded."""
    x = c["self"]
    return torch.nonzero_static(x.mask & (x.data != 0), size=c["size"], fill_value=c["fill_value"])


@oracle("unique_consecutive", "unique_dim", "unique_dim_consecutive", "_unique2", "_unique")
def unique(c: Call) -> Any:
    """Plain answers about the valid elements; the inverse is masked like the input."""
    x = c["self"]
    if c.get("dim") is not None:
        if not x.all_valid:
            raise Refused("distinct slices of which parts are invalid")
        return c.plainly()
    changed = {"self": x.data.reshape(-1)[x.mask.reshape(-1)]}
    values, inverse, counts = c.run({**c.bound, **changed}, lambda slot: slot.data)
    if not c["return_inverse"]:
        return values, inverse, counts
    full = torch.zeros(x.shape, dtype=torch.int64)
    full[x.mask] = inverse.reshape(-1)
    return values, Slot(full, x.mask), counts


@oracle("bincount", "histc")
def histogram(c: Call) -> Tensor:
    """Plain counts of the valid elements."""
    x = c["self"]
    weights = c.get("weights")
    keep = x.mask if weights is None else x.mask & weights.mask
    changed: dict[str, Any] = {"self": x.data[keep]}
    if weights is not None:
        changed["weights"] = weights.data[keep]
    out: Tensor = c.run({**c.bound, **changed}, lambda slot: slot.data)
    return out


@oracle("equal")
def equal(c: Call) -> bool:
    """The same mask, and the same values where valid."""
    a, b = c["self"], c["other"]
    return a.shape == b.shape and torch.equal(a.mask, b.mask) and torch.equal(a.data[a.mask], b.data[b.mask])


@oracle("allclose")
def allclose(c: Call) -> bool:
    """The same mask, and close values where valid."""
    a, b = c["self"], c["other"]
    shape = torch.broadcast_shapes(a.shape, b.shape)
    mine, theirs = a.mask.expand(shape), b.mask.expand(shape)
    if not torch.equal(mine, theirs):
        return False
    return bool(
        c.run(
            {**c.bound, "self": a.data.expand(shape)[mine], "other": b.data.expand(shape)[mine]}, lambda slot: slot.data
        )
    )


@oracle("isin")
def isin(c: Call) -> Slot:
    """Elementwise in the elements, among the valid test elements."""
    elements, tests = c["elements"], c["test_elements"]
    found = [torch.isin(e, tests.data[tests.mask]) for e in elements.data.reshape(-1)]
    out = torch.stack(found).reshape(elements.shape) if found else c.plainly()
    return Slot(out ^ bool(c["invert"]), elements.mask)


@oracle("_local_scalar_dense")
def item(c: Call) -> Any:
    """The value; raises where it is invalid."""
    if not c["self"].all_valid:
        raise Refused("item() of something invalid")
    return c["self"].data.item()


@oracle("_assert_async", "_assert_tensor_metadata")
def asserted(c: Call) -> None:
    """Nothing comes back."""


@oracle("searchsorted", "bucketize")
def searchsorted(c: Call) -> Slot:
    """Elementwise on the values where the boundaries are all valid."""
    boundaries = c.get("sorted_sequence", c.get("boundaries"))
    values = c["self"]
    sorter = c.get("sorter")
    if not boundaries.all_valid or (sorter is not None and not sorter.all_valid):
        raise Refused("searchsorted with invalid boundaries")
    out = c.plainly()
    return Slot(out, values.mask.expand(out.shape) if isinstance(values, Slot) else all_true(out))


@oracle("histogram")
def histogram_with_edges(c: Call) -> Any:
    """Plain counts of the valid elements, and the edges, which are the valid elements' where none are given."""
    x, weight, bins = c["self"], c["weight"], c["bins"]
    if isinstance(bins, Slot) and not bins.all_valid:
        raise Refused("histogram with invalid edges")
    keep = x.mask if weight is None else x.mask & weight.mask
    changed = {"self": x.data[keep], "weight": None if weight is None else weight.data[keep]}
    return c.plainly(changed)


@oracle("segment_reduce")
def segment_reduce(c: Call) -> Slot:
    """Each run of rows over its valid elements, column by column; a run of none is torch's own value.

    An initial value is a contribution that nothing masks.
    """
    x, lengths, offsets = c["data"], c["lengths"], c["offsets"]
    if c["indices"] is not None or c["axis"] not in (0, -1) or (c["axis"] == -1 and x.ndim != 1):
        raise NoOracle("segment_reduce along another dimension")
    runs = lengths if lengths is not None else offsets
    if not runs.all_valid or runs.ndim != 1:
        raise NoOracle("segment_reduce of unknown runs")
    ends = lengths.data.cumsum(0).tolist() if lengths is not None else offsets.data[1:].tolist()
    starts = [0, *ends[:-1]] if lengths is not None else offsets.data[:-1].tolist()
    out = c.plainly()
    columns = x.data.reshape(len(x.data), -1) if x.data.numel() else x.data.reshape(len(x.data), 0)
    masks = x.mask.reshape(columns.shape)
    values, known = [], []
    for start, end in zip(starts, ends, strict=True):
        for column in range(columns.shape[1]):
            kept = columns[start:end, column][masks[start:end, column]]
            known.append(bool(len(kept)) or start == end or c["initial"] is not None)
            run = {"data": kept, "lengths": torch.tensor([len(kept)]), "offsets": None}
            values.append(c.plainly(run)[0] if known[-1] else torch.zeros((), dtype=out.dtype))
    if not values:
        return Slot(out, all_true(out))
    return Slot(torch.stack(values).reshape(out.shape), torch.tensor(known).reshape(out.shape))
