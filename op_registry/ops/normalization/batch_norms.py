"""batch_norm and instance_norm: statistics by channel, and running statistics.

Law: statistics over the valid elements; valid where the input and the channel's parameters are.

Running statistics are updated from valid elements only. With n valid elements in a channel, its running mean does not
change if n = 0, and its running variance does not if n ≤ 1 (one element has no variance). A masked running statistic is
updated in place like any other tensor: invalid elements stay invalid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    NORMALIZATION,
    Bound,
    ByArgument,
    Dense,
    Equation,
    NotLowered,
    Rule,
    Sparse,
    Unknown,
    accumulation_dtype,
    masked_slices,
    on_call,
    valid_in_all,
)
from op_registry.bound import bind_by_name
from op_registry.ops.normalization.channels import (
    Channels,
    StoredChannels,
    by_own_statistics,
    check_shapes,
    dtype_by_channel,
    with_dense_parameters,
)
from op_registry.ops.normalization.norms import affine, saved_statistics
from op_registry.records.slices import Spread

aten = torch.ops.aten

# The tensors of a batch norm behind its input, and fills for them that make nothing infinite.
FILLS = {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1}


def of_dense(op: OpOverload, x: Dense, *args: Any, **kwargs: Any) -> Any:
    """By channel: with the batch's statistics while training, with the running ones otherwise.

    Of instance_norm, by channel of each sample; running statistics are means over the samples with enough valid
    elements. The native operators also return the statistics, and the functional ones the running statistics, which
    the others write.
    """
    return by_channel(op, Channels(x), bind_by_name(op, (x, *args), kwargs))


def _stated(*ops: Any, dims: Any) -> Rule:
    return masked_slices(*ops, category=NORMALIZATION, dims=dims)(of_dense)


# By channel, with the batch's statistics or with running ones; (E) and (F) stand for statistics that are not returned.
_IN_TRAINING, _OTHERWISE = "Nc*,c,c,c,c->Nc*", "nc*,c,c,c,c->nc*"
batch_norm = _stated(
    aten.batch_norm,
    dims=ByArgument("training", Equation(_IN_TRAINING, each="*"), Equation(_OTHERWISE)),
)
native_batch_norm = _stated(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    dims=ByArgument("training", Equation(f"{_IN_TRAINING},c,c", each="*"), Equation(f"{_OTHERWISE},E,F")),
)
batch_norm_of_itself = _stated(
    aten._native_batch_norm_legit.no_stats,
    dims=Equation("Nc*,c,c->Nc*,c,c", each="*"),
)
_functional_batch_norm = _stated(
    aten._native_batch_norm_legit_functional.default,
    dims=ByArgument("training", Equation(f"{_IN_TRAINING},c,c,c,c", each="*"), Equation(f"{_OTHERWISE},E,F,c,c")),
)
batch_norm_in_evaluation = _stated(
    aten._native_batch_norm_legit_no_training.default,
    dims=Equation(f"{_OTHERWISE},E,F"),
)
# (Their last results are memory of torch's own.)
batch_norm_with_reserve = _stated(
    aten._batch_norm_no_update.default,
    aten._batch_norm_with_update.default,
    aten._batch_norm_with_update_functional.default,
    dims=Unknown("its last result is memory of torch's own"),
)
instance_norm = _stated(
    aten.instance_norm,
    dims=ByArgument("use_input_stats", Equation("nc*,c,c,c,c->nc*", each="*"), Equation(_OTHERWISE)),
)
BATCH_NORMS = (
    batch_norm,
    native_batch_norm,
    batch_norm_of_itself,
    _functional_batch_norm,
    batch_norm_in_evaluation,
    batch_norm_with_reserve,
    instance_norm,
)


@on_call
def batch_norm_of_stored(c: Bound) -> Any:
    return by_channel(c.op, StoredChannels(c.first), with_dense_parameters(c))


for _rule in BATCH_NORMS:
    _rule.lowering(Sparse)(batch_norm_of_stored)


def by_channel(op: OpOverload, c: Channels, named: Mapping[str, Any]) -> Any:
    """One of these operators on the channels of a record."""
    name = op._schema.name
    parameters = {n: named.get(n) for n in FILLS}
    weight, bias, mean, var = parameters.values()
    check_shapes(op, c, named, not any(p is not None and p.data.requires_grad for p in (mean, var)))
    by_default = not name.endswith(("_no_training", "_no_update"))
    if not named.get("training", named.get("use_input_stats", by_default)) and "running_mean" in named:
        return by_given_statistics(op, c, named, parameters)
    instance = name == "aten::instance_norm"
    over = c.slices([d for d in range(c.x.ndim) if d > 1 or (d == 0 and not instance)])
    dtype = dtype_by_channel(one_channel, c.elements, weight, bias)
    result, m, scale = by_own_statistics(c, c.elements, over, weight, bias, named["eps"], dtype)
    updated = updated_statistics(mean, var, m, named.get("momentum", 0), c.x.shape[1])
    functional = "functional" in name
    if not functional:
        for running, values in zip((mean, var), updated, strict=True):
            write(running, values)
    if len(op._schema.returns) == 1:
        return result
    exists = m.exists.expand(m.mean.shape).reshape(-1)
    saved = saved_statistics(list(parameters.values()), c.elements, m, scale)
    results = [result, *(Dense(t.expand(m.mean.shape).reshape(-1), exists) for t in saved)]
    if "with_update" in name:
        results.append(c.elements.data.new_empty(0, dtype=torch.uint8))  # the reserve
    if functional:
        running = zip((mean, var), updated, strict=True)
        results += [old.like(new) for old, new in running if old is not None and new is not None]
    return tuple(results)


def one_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
    return aten.batch_norm(x, weight, bias, None, None, True, 0.0, 1.0, False)


def by_given_statistics(
    op: OpOverload, c: Channels, named: Mapping[str, Any], parameters: Mapping[str, Dense | None]
) -> Any:
    """The operator with a given mean and variance, which is elementwise in the input."""
    x, of_each = c.elements, [c.parameter(p) for p in parameters.values()]
    validity = valid_in_all(x, *of_each)
    if not isinstance(c, StoredChannels):
        filled = {n: p.filled(FILLS[n]) for n, p in parameters.items() if p is not None}
        result = op(**{**named, **filled, "input": x.filled(0)})
        return Dense(result, validity) if isinstance(result, Tensor) else (Dense(result[0], validity), *result[1:])
    weight, bias, mean, var = of_each
    if mean is None or var is None or len(op._schema.returns) > 1:
        raise NotLowered("it also returns statistics, or torch refuses it without them")
    wide = accumulation_dtype(x.dtype)
    centred = x.filled(0).to(wide) - mean.filled(0).to(wide)
    values = affine(centred * (var.filled(1).to(wide) + named["eps"]).rsqrt(), weight, bias)
    return c.shown(Dense(values.to(dtype_by_channel(one_channel, x, weight, bias)), validity))


def updated_statistics(
    mean: Dense | None, var: Dense | None, m: Spread, momentum: float, channels: int
) -> tuple[Tensor | None, Tensor | None]:
    """The running mean and variance after a batch with these moments, by slice and channel.

    Where a channel has several slices (instance_norm), the update is the mean over the slices that have the statistic.
    """
    count = m.count.expand(m.mean.shape).reshape(-1, channels)

    def updated(running: Dense | None, statistic: Tensor, needed: int) -> Tensor | None:
        if running is None:
            return None
        defined = count >= needed
        slices = defined.sum(0)
        of_batch = torch.where(defined, statistic.detach().reshape(-1, channels), 0).sum(0) / slices.clamp(min=1)
        old = running.data.detach()
        new = torch.where(slices > 0, of_batch.to(old.dtype) * momentum + old * (1 - momentum), old)
        return new if running.valid is None else torch.where(running.valid, new, old)

    return updated(mean, m.average, 1), updated(var, m.square / (m.count - 1), 2)


def write(running: Dense | None, values: Tensor | None) -> None:
    """Update a running statistic, the caller's buffer, in place and outside autograd, as torch does."""
    if running is not None and values is not None:
        with torch.no_grad():
            running.data.copy_(values)
