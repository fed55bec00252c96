"""Queries about the valid elements: indices, counts, sets, comparisons, lookups in sorted values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import Call, Expected, NoOracle, Refused, all_true, broadcast_valid, oracle
from op_registry.conformance.oracles.engine import Group, groups, reduce_groups


@oracle("nonzero", "argwhere", "nonzero_numpy", "nonzero_static", "count_nonzero")
def nonzero(c: Call) -> Any:
    """The indices or the number of the valid elements other than zero, as plain tensors."""
    x = c["self"]
    return c.plain(self=x.mask & (x.data != 0))


@oracle("unique_consecutive", "unique_dim", "unique_dim_consecutive", "_unique2", "_unique")
def unique(c: Call) -> Any:
    """Plain results over the valid elements; the inverse is masked like the input."""
    x = c["self"]
    if c.get("dim") is not None:
        if not x.all_valid:
            raise Refused("distinct slices that are partly invalid")
        return c.plain()
    values, inverse, counts = c.plain(self=x.data.reshape(-1)[x.mask.reshape(-1)])
    if not c["return_inverse"]:
        return values, inverse, counts
    full = torch.zeros(x.shape, dtype=torch.int64)
    full[x.mask] = inverse.reshape(-1)
    return values, Expected(full, x.mask), counts


@oracle("bincount", "histc", "histogram")
def histogram(c: Call) -> Any:
    """Plain counts of the valid elements, and the bin edges, which by default span the valid elements."""
    bins = c.get("bins")
    if isinstance(bins, Expected) and not bins.all_valid:
        raise Refused("histogram with invalid edges")
    counted = {name: c[name] for name in ("self", "weight", "weights") if isinstance(c.get(name), Expected)}
    mask = broadcast_valid(c["self"].shape, list(counted.values()))
    return c.plain(**{name: operand.data[mask] for name, operand in counted.items()})


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
    return bool(c.plain(self=a.data.expand(shape)[mine], other=b.data.expand(shape)[mine]))


@oracle("isin")
def isin(c: Call) -> Expected:
    """Elementwise in the elements, over the valid test elements."""
    elements, tests = c["elements"], c["test_elements"]
    contained = [torch.isin(e, tests.data[tests.mask]) for e in elements.data.reshape(-1)]
    out = torch.stack(contained).reshape(elements.shape) if contained else c.plain()
    return Expected(out ^ bool(c["invert"]), elements.mask)


@oracle("_local_scalar_dense")
def item(c: Call) -> Any:
    """The value; raises where it is invalid."""
    if not c["self"].all_valid:
        raise Refused("item() of an invalid element")
    return c["self"].data.item()


@oracle("_assert_async", "_assert_tensor_metadata")
def asserted(c: Call) -> None:
    """No result."""


@oracle("searchsorted", "bucketize")
def searchsorted(c: Call) -> Expected:
    """Elementwise in the values, if every boundary is valid."""
    boundaries = c.get("sorted_sequence", c.get("boundaries"))
    values = c["self"]
    sorter = c.get("sorter")
    if not boundaries.all_valid or (sorter is not None and not sorter.all_valid):
        raise Refused("searchsorted with invalid boundaries")
    out = c.plain()
    return Expected(out, values.mask.expand(out.shape) if isinstance(values, Expected) else all_true(out))


@oracle("segment_reduce")
def segment_reduce(c: Call) -> Any:
    """Each segment of rows over its valid elements, column by column; an empty segment has plain torch's own value.

    An initial value is a valid contribution to every segment.
    """
    x, lengths, offsets = c["data"], c["lengths"], c["offsets"]
    if c["indices"] is not None or c["axis"] not in (0, -1) or (c["axis"] == -1 and x.ndim != 1):
        raise NoOracle("segment_reduce along another dimension")
    segments = lengths if lengths is not None else offsets
    if not segments.all_valid or segments.ndim != 1:
        raise NoOracle("segment_reduce of unknown segments")
    ends = lengths.data.cumsum(0).tolist() if lengths is not None else offsets.data[1:].tolist()
    starts = [0, *ends[:-1]] if lengths is not None else offsets.data[:-1].tolist()
    index = torch.arange(x.data.numel()).reshape(len(x.data), -1 if x.data.numel() else 0)
    columns = (index[start:end, n] for start, end in zip(starts, ends, strict=True) for n in range(index.shape[1]))

    def one(group: Group) -> Tensor:
        (values,) = group.values
        return c.plain(data=values, lengths=torch.tensor([len(values)]), offsets=None)

    return reduce_groups(groups([x], columns), one, c.plain().detach(), 1 if c["initial"] is None else 0)
