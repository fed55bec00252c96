"""Elementwise operators, choices, random numbers and factories: each valid element is plain torch's.

An elementwise result depends only on the operands at its own index. So plain torch computes it from the elements where
all operands are valid. Unlike rules, these oracles fill nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from op_registry.conformance.oracles.call import (
    Call,
    Expected,
    Group,
    Misdeclared,
    NoOracle,
    Refused,
    all_outputs_valid,
    all_true,
    broadcast_valid,
    collect,
    groups,
    invalid,
    map_groups,
    oracle,
    reduce_groups,
    slices,
    valid,
)
from op_registry.conformance.oracles.positions import write
from op_registry.conformance.oracles.windows import in_planes
from op_registry.conformance.sample import tree_leaves, tree_map


def elementwise(c: Call) -> Any:
    """The operator on the valid elements alone, as 1-d tensors, so that invalid ones can have no effect.

    Valid where every tensor operand is valid, after broadcasting. Random numbers would be others for other shapes.
    """
    operands = c.operands()
    plain = c.plain()

    def of_one(out: Tensor, n: int) -> Expected:
        shape = torch.broadcast_shapes(*(operand.shape for operand in operands))
        if out.shape != shape:
            raise Misdeclared(
                f"{c.name} is not elementwise: its result has shape {tuple(out.shape)}, but its operands broadcast to "
                f"{tuple(shape)}"
            )
        mask = broadcast_valid(out.shape, operands)
        if not bool(mask.any()) or bool(mask.all()) or torch.Tag.nondeterministic_seeded in c.op.tags:
            return Expected(out, mask)
        try:
            values = tree_leaves(valid_elements(c, mask))[n]
        except Exception:
            return Expected(out, mask)  # the operator takes no 1-d tensors: its result on the whole operands
        try:
            return Expected(torch.zeros_like(out).masked_scatter(mask, values.to(out.dtype)), mask)
        except NotImplementedError:
            return Expected(out, mask)  # torch scatters no such dtype

    leaves = iter([of_one(out, n) for n, out in enumerate(tree_leaves(plain))])
    return tree_map(lambda _: next(leaves), plain)


def valid_elements(c: Call, mask: Tensor) -> Any:
    """The call on the elements that `mask` selects, as 1-d tensors."""

    def as_vector(operand: Expected) -> Tensor:
        # A 0-d operand remains 0-d: type promotion treats it differently.
        return operand.data.expand(mask.shape)[mask] if operand.ndim else operand.data

    return c.run({}, as_vector)


# Composites and others that torch does not tag as pointwise, and whose rule is of another category.
oracle(
    """bernoulli isclose isreal chalf float_power log_sigmoid selu relu6 square conj_physical positive isfinite to
    type_as contiguous detach lift_fresh alias _conj conj max.other min.other resolve_conj resolve_neg normal
    _autocast_to_reduced_precision _autocast_to_full_precision"""
)(elementwise)


@oracle("masked_fill")
def masked_fill(c: Call) -> Expected:
    """An elementwise op never revives an invalid element; an invalid fill value counts only where it is written."""
    x, chosen, value = c["self"], c["mask"], c["value"]
    out = c.plain()
    mask = broadcast_valid(out.shape, [x, chosen])
    if isinstance(value, Expected):
        mask = mask & (value.mask | ~chosen.data).expand(out.shape)
    return Expected(out, mask)


@oracle("index_fill")
def index_fill(c: Call) -> Expected:
    """Like masked_fill at the slices that valid indices name: an invalid index fills nothing."""
    x, index, value = c["self"], c["index"], c["value"]
    chosen = torch.zeros(x.shape, dtype=torch.bool).index_fill(c["dim"], index.data[index.mask].reshape(-1), True)
    number, known = (value.data, value.mask) if isinstance(value, Expected) else (value, torch.tensor(True))
    return Expected(x.data.masked_fill(chosen, number), x.mask & (known | ~chosen))


@oracle("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(c: Call) -> Expected:
    """The chosen branch, valid where the condition and the chosen branch are."""
    out = c.plain()
    condition = c["condition"]
    chosen = condition.data.expand(out.shape)

    def mask_of(branch: object) -> Tensor:
        return branch.mask.expand(out.shape) if isinstance(branch, Expected) else all_true(out)

    mask = (chosen & mask_of(c["self"])) | (~chosen & mask_of(c["other"]))
    return Expected(out, mask & condition.mask.expand(out.shape))


@oracle("glu")
def glu(c: Call) -> Expected:
    """Elementwise on two halves."""
    first, second = c["self"].mask.chunk(2, c["dim"])
    return Expected(c.plain(), first & second)


@oracle("dropout alpha_dropout feature_dropout feature_alpha_dropout zeros_like ones_like full_like")
def as_torch_under_the_input(c: Call) -> Any:
    """Every element as torch draws or writes it; valid where the input is."""
    first = c.operands()[0]
    result = c.plain()
    if any(isinstance(out, Tensor) and out.shape != first.shape for out in tree_leaves(result)):
        raise NoOracle(str(c.op))
    return tree_map(lambda out: Expected(out, first.mask) if isinstance(out, Tensor) else out, result)


@oracle("rrelu", "rrelu_with_noise")
def rrelu(c: Call) -> Any:
    """Elementwise; torch draws random numbers for negative elements only, so they depend on data under the mask."""
    if c["training"] and not c["self"].all_valid:
        raise NoOracle("rrelu's random numbers, which depend on data under the mask")
    return elementwise(c)


@oracle("linspace", "logspace")
def spaced(c: Call) -> Expected:
    """Every element depends on both ends."""
    out = c.plain()
    return Expected(out, torch.full(out.shape, all(operand.all_valid for operand in c.operands())))


@oracle("multinomial")
def multinomial(c: Call) -> Any:
    """The semantics do not define it."""
    raise NoOracle(str(c.op))


@oracle("empty_like", "new_empty", "new_empty_strided")
def uninitialised(c: Call) -> Expected:
    """Memory to which nothing has been written: nothing is valid."""
    return invalid(c.plain())


@oracle(
    """new_zeros new_ones new_full fill zero fill_ zero_ normal_ uniform_ exponential_ cauchy_ geometric_ log_normal_
    random_"""
)
def generated(c: Call) -> Expected:
    """What torch writes or draws: everything is valid, except where an invalid value is written."""
    out = c.plain()
    value = c.get("value")
    return Expected(out, value.mask.expand(out.shape)) if isinstance(value, Expected) else valid(out)


def opaque(c: Call) -> Any:
    """Every result depends on all elements: plain torch's if all are valid, refused otherwise."""
    if not all(operand.all_valid for operand in c.operands()):
        raise Refused(c.name)
    return all_outputs_valid(c.plain())


@oracle("resize_ resize_as_")
def resize(c: Call) -> Expected:
    """A no-op if the size is the same already; uninitialised if there was nothing; else elements would be undefined."""
    x: Expected = c["self"]
    size = c["the_template"].shape if "the_template" in c else c["size"]
    if tuple(size) == tuple(x.shape):
        return x
    if x.data.numel():
        raise Refused(c.name)
    return invalid(c.plain())


def refused(c: Call) -> Any:
    """Refused for every mask."""
    raise Refused(c.name)


# ----------------------- queries about the valid elements: indices, counts, sets, comparisons, lookups in sorted values


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


# ----------------------------------------------------------------------------------------------------------------------
# torch.masked's reductions: torch's function without `mask=`, on the valid elements that the mask selects.

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


# -------------------------------------------------------------- backward operators that torch's operator database calls


@oracle("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(c: Call) -> Expected:
    """The formula on each slice without its invalid elements; an invalid gradient counts as zero."""
    grad, output = c["grad_output"], c["output"]
    is_log = c.name.startswith("_log")
    incoming = grad.filled(0).reshape(-1)

    def one(group: Group) -> Tensor:
        (y,), g = group.values, incoming[group.flat]
        return g - y.exp() * g.sum() if is_log else y * (g - (y * g).sum())

    each = groups([output], slices(output.shape, c.dims(output.ndim)))
    result: Expected = map_groups(each, one, output.data, output.mask)
    return Expected(result.data.to(c["input_dtype"]), output.mask)


@oracle("max_pool2d_with_indices_backward")
def max_pool_backward(c: Call) -> Expected:
    """Every gradient is added to the element of its plane that was the maximum."""
    grad, x, indices = c["grad_output"], c["self"], c["indices"]
    known = grad.mask & indices.mask
    targets = in_planes(indices, 2, x.shape[-1] * x.shape[-2])
    zeros = valid(torch.zeros(x.shape, dtype=grad.data.dtype))
    return Expected(write(zeros, targets[known], grad.map(lambda t: t[known]), "sum").data, x.mask)


# --------------------- versions for masks of torch's Python functions that divide by a size, or that test every element

# `expected` runs these in place of torch's; the oracles compute their operators.


def multilabel_soft_margin_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The mean over valid classes."""
    loss = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    loss = loss if weight is None else loss * weight
    return _reduced(loss.mean(-1), reduction)


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """'batchmean' divides by the rows that have a valid element."""
    if reduction != "batchmean":
        return F.kl_div(input, target, size_average, reduce, reduction, log_target)
    elements = F.kl_div(input, target, reduction="none", log_target=log_target)
    if elements.ndim == 0:
        return elements
    rows = torch.ones_like(elements).flatten(1).amax(1) if elements.ndim > 1 else torch.ones_like(elements)
    return elements.sum() / rows.sum()


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Only a valid variance may be refused as negative; without a valid one, none is negative."""
    if isinstance(var, float):
        var = var * torch.ones_like(input)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return _reduced(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss.clone()
    return loss.mean() if reduction == "mean" else loss.sum()


PYTHON_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multilabel_soft_margin_loss: multilabel_soft_margin_loss,
    F.kl_div: kl_div,
    F.gaussian_nll_loss: gaussian_nll_loss,
}


def as_oracles_run(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function to call in place of `function`; the oracles compute its operators."""
    return PYTHON_FUNCTIONS.get(function, function)
