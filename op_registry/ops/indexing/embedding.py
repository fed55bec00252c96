"""embedding and embedding_bag.

Law: an output is a row of the weight, valid where the index is and the row's elements are. An invalid index is never
looked up, and contributes no gradient. A bag is a reduction over the valid elements of its rows.

Law of sparse gradients: with ``sparse=True`` and masked indices or weights of samples, the gradient of a plain table is
masked, stored sparsely, and has a whole row for each row that a valid lookup reads. A lookup is valid if its index is
valid and not the padding's, and its sample's weight (if any) is valid. Lookups of one row accumulate. With plain
indices, in graphs and inside functorch transforms, the table gets the gradient that torch itself computes; in the
forward of a DistributedDataParallel, a torch.sparse tensor with the same rows, the only kind that its reducer takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.authoring import (
    ACCUMULATION,
    INDEXING,
    Bound,
    Dense,
    Equation,
    MaskedSemanticsError,
    Unknown,
    accumulation_dtype,
    aligned_validity,
    all_valid,
    as_bool,
    as_int8,
    broadcast_along,
    data_of,
    intersect,
    known_all_valid,
    masked_rule,
)
from op_registry.records.layout import full_mask
from op_registry.sparse.lookup_gradient import Lookup, gradient_can_be_sparse

aten = torch.ops.aten


@masked_rule(aten.embedding.default, category=INDEXING, dims=Equation("vd,*->*d", indexed="v"))
def embedding(
    weight: Dense, indices: Dense, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Dense:
    return _rows(weight, indices, padding_idx, scale_grad_by_freq, sparse)


def _rows(
    weight: Dense,
    indices: Dense,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
    factor_validity: Tensor | None = None,
) -> Dense:
    """The rows at `indices`; where `factor_validity` is 0, a row contributes nothing to a sparse gradient."""
    # The gradient of a masked weight has the weight's storage.
    sparse = sparse and weight.validity is None
    safe = _safe(indices, padding_idx, sparse)
    by_frequency = scale_grad_by_freq and indices.validity is not None
    if sparse and gradient_can_be_sparse(weight.data, safe) and by_frequency == scale_grad_by_freq:
        counted = _counted(safe, intersect(indices.full_validity, factor_validity), padding_idx)
        data = Lookup.apply(weight.data, safe.reshape(-1), counted).reshape(*safe.shape, weight.shape[1])
    else:
        data = aten.embedding(weight.data, safe, padding_idx, scale_grad_by_freq and not by_frequency, sparse)
    if by_frequency:
        data = _scaled_by_frequency(data, safe, indices, weight.shape[0])
    v = aligned_validity(indices)
    return Dense(data, intersect(_rows_validity(weight, safe), None if v is None else v.unsqueeze(-1)))


def _safe(indices: Dense, padding_idx: int, sparse: bool = False) -> Tensor:
    """Indices that can be looked up: an invalid one becomes `padding_idx`, which torch leaves out of every gradient.

    Without `padding_idx`, an invalid index becomes the index of some other row, to which it adds a gradient of 0. A
    sparse gradient lists all looked-up rows, so there we choose a row that a valid index looks up too.
    """
    if padding_idx >= 0:
        return indices.filled(padding_idx)
    safe = indices.filled(0)
    if sparse and indices.validity is not None and safe.numel():
        return indices.filled(safe.amax())
    return safe


def _counted(safe: Tensor, validity: Tensor | None, padding_idx: int) -> Tensor | None:
    """Which lookups contribute to a gradient: neither the invalid ones nor those of the padding (None: all)."""
    counted = None if validity is None else as_bool(validity).reshape(-1)
    if padding_idx < 0:
        return counted
    not_padding = safe.reshape(-1) != padding_idx
    return not_padding if counted is None else not_padding & counted


def _rows_validity(weight: Dense, safe: Tensor) -> Tensor | None:
    """The validity of the looked-up rows."""
    v = aligned_validity(weight)
    if v is None:
        return None
    if broadcast_along(v, 0):
        return v[0]
    return as_int8(v).index_select(0, safe.reshape(-1)).reshape(*safe.shape, v.shape[1])


def _scaled_by_frequency(data: Tensor, safe: Tensor, indices: Dense, rows: int) -> Tensor:
    """The same rows, whose gradient is divided by the number of valid indices that look up the row."""
    lookups = full_mask(indices).reshape(-1).to(torch.int64)
    counts = lookups.new_zeros(rows).index_add(0, safe.reshape(-1), lookups)
    frequency = counts.clamp(min=1).index_select(0, safe.reshape(-1)).reshape(safe.shape).unsqueeze(-1)
    value = data.detach()
    return value + (data - value) / frequency


@masked_rule(aten.embedding_renorm.default, category=INDEXING, torch_if_valid=True, dims=Equation("vD,?->vD"))
def embedding_renorm(self: Dense, indices: Dense, max_norm: float, norm_type: float) -> Dense:
    """Rows that a valid index looks up, scaled down to `max_norm`; the norm is that of their valid elements."""
    with torch.no_grad():
        scaled = aten.embedding_renorm(self.filled(0), _safe(indices, -1, sparse=True), max_norm, norm_type)
        any_lookup = indices.any_valid()
        return self.like(scaled if any_lookup is None else torch.where(as_bool(any_lookup), scaled, self.data))


# --------------------------------------------------------------------------------------------------------------- bags

SUM, MEAN, MAX = 0, 1, 2


@masked_rule(
    aten.embedding_bag,
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    category=ACCUMULATION,
    takes_call=True,
    dims=Unknown(
        "bags of several lengths lie in one dimension", reads=(("indices", None), ("per_sample_weights", None))
    ),
)
def embedding_bag(c: Bound) -> tuple[Dense, ...]:
    """Sum, mean or maximum of each bag's valid elements; a bag that is empty or all padding is 0, as in torch.

    Refused if an offset is invalid: it is unknown then where a bag begins.
    """
    weight, indices, offsets, per_sample_weights = c.weight, c.indices, c.offsets, c.per_sample_weights
    if all_valid(*c.named.values()) and not (c.sparse and gradient_can_be_sparse(weight.data, indices.data)):
        return tuple(Dense(t) for t in c.map(data_of, Dense).applied(c.op))
    padding_idx = c.named.get("padding_idx", -1)
    if c.op is aten.embedding_bag.padding_idx:  # a negative one counts from the end
        padding_idx = -1 if padding_idx is None else padding_idx % weight.shape[0]
    if not known_all_valid(offsets):
        raise MaskedSemanticsError(
            f"embedding_bag has no meaning with invalid offsets (shape {tuple(offsets.shape)}): it is unknown where a "
            "bag begins. Fill them first with x.to_tensor(value)."
        )
    starts = offsets.data[:-1] if c.include_last_offset else offsets.data
    positions = torch.arange(indices.shape[0], device=indices.device)
    bag = torch.bucketize(positions, starts.to(torch.int64), right=True) - 1
    factor_validity = None if per_sample_weights is None else per_sample_weights.full_validity
    rows = _rows(weight, indices, padding_idx, c.scale_grad_by_freq, c.sparse, factor_validity)
    dtype = rows.dtype
    elements, validity = rows.data.to(accumulation_dtype(dtype)), rows.validity
    if per_sample_weights is not None:
        elements = rows.filled(0) * per_sample_weights.filled(0).unsqueeze(-1)
        validity = intersect(validity, None if factor_validity is None else factor_validity.unsqueeze(-1))
    # The lookups over which torch would reduce, and the valid elements of their rows.
    in_bag = indices.data != padding_idx
    if indices.valid is not None:
        in_bag = in_bag | ~indices.valid
    in_bag = in_bag.unsqueeze(1)
    valid_in_bag = in_bag if validity is None else in_bag & as_bool(validity)

    def count_per_bag(flags: Tensor) -> Tensor:
        return torch.zeros((starts.shape[0], flags.shape[1]), dtype=torch.int64, device=flags.device).index_add(
            0, bag, flags.to(torch.int64)
        )

    n = count_per_bag(valid_in_bag)
    valid = (n > 0) | (count_per_bag(in_bag) == 0)
    if c.mode == MAX:
        candidates = torch.where(valid_in_bag, elements, -torch.inf)
        start = candidates.new_full((starts.shape[0], elements.shape[1]), -torch.inf)
        greatest = start.scatter_reduce(0, bag.unsqueeze(1).expand_as(candidates), candidates, "amax")
        output = torch.where(n > 0, greatest, 0)
    else:
        start = elements.new_zeros((starts.shape[0], elements.shape[1]))
        output = start.index_add(0, bag, torch.where(valid_in_bag, elements, 0))
        if c.mode == MEAN:
            output = output / n.clamp(min=1)
    size = count_per_bag(in_bag).squeeze(1)
    return Dense(output.to(dtype), as_int8(valid)), Dense(bag), Dense(size), Dense(torch.zeros_like(size))
