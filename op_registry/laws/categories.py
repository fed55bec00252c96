"""The categories: each a law that many operators share, and a generic dense run that obeys it.

The words that register operators under them are in words.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.autocast import autocast_off
from op_registry.bound import argument, bind_by_name
from op_registry.dimensions.labels import Elementwise
from op_registry.dimensions.movements import Loss, Unknown, Windows
from op_registry.dimensions.slices import Slices
from op_registry.errors import MaskedSemanticsError
from op_registry.records.arguments import Number, wrap_dims
from op_registry.records.dense import Dense, map_tensors, records_in, valid_in_all
from op_registry.records.divided import undivided
from op_registry.records.fill import fill_where_invalid, known_zero, remember_zero
from op_registry.records.slices import any_masked, arange_along, has_whole_slices, plain_data, valid_first_positions
from op_registry.records.sums import validity_of_sum
from op_registry.records.tracing import gradients_may_flow, has_values
from op_registry.records.validity import as_int8, intersect
from op_registry.rule import Category, packet_name
from op_registry.sparse.contraction import BY_ELEMENTS, BY_EQUATION
from op_registry.sparse.lowering import first_of
from op_registry.sparse.on_values import ON_PERMUTED_VALUES, ON_STORED_ROWS
from op_registry.sparse.on_values import ON_VALUES as ELEMENTWISE_LOWERING
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import Sparse
from op_registry.sparse.slicewise import SLICEWISE, SLICEWISE_ON_BASE
from op_registry.traits import NO_TRAITS, Traits

Operator = OpOverload | OpOverloadPacket


def data_of(value: object) -> Any:
    """Arguments for plain torch: the raw data of each record. Only for operators that do not mix positions."""
    return map_tensors(lambda record: record.data, value, Dense)


def results_like(result: object, validity: Tensor | None) -> Any:
    """Each tensor of a result as a record with `validity`."""
    return map_tensors(lambda data: Dense(data, validity), result, Tensor)


# ---------------------------------------------------------------------------------------------------- elementwise


def run_elementwise(op: OpOverload, *args: Any, _traits: Traits = NO_TRAITS, **kwargs: Any) -> Any:
    """The operator on the raw data: it does not mix elements, so that masked data stays masked.

    There are two exceptions. The derivative with respect to one operand reads the others (0 · NaN in backward), and
    some kernels fail on arbitrary data. In these cases operands are first filled where the result will be invalid. The
    traits say when:

    derivative  "linear" if the derivative with respect to one operand does not use the others' values (add, and
                selections such as maximum); "bilinear" if it is a product with the others (mul: each operand is filled
                where it is invalid itself); "general" (the default) otherwise
    neutral     the fill value: the function and its first two derivatives are finite there (default 1)
    keeps_zero  True if it gives 0 for tensors that are 0: a result of operands that are all known to be zero where it
                is invalid is also zero there. (A number among them is not: x + 5.)
    traps       True if the kernel must not see masked data: it may raise, crash, fail to terminate, or let it affect
                neighbouring elements; "integers" or "complex" if only the kernel for these does
    """
    traits = _traits
    records = [*records_in(args), *records_in(kwargs.values())]
    validity = valid_in_all(*records)
    derivative = traits.derivative
    if validity is None or not (
        may_trap(records, traits) or (derivative != "linear" and endangered(records, validity))
    ):
        result = op(*data_of(args), **{k: data_of(v) for k, v in kwargs.items()})
        if (
            validity is not None
            and traits.keeps_zero
            and "alpha" not in kwargs
            and all(isinstance(a, Dense) and known_zero(a.data, validity) for a in args)
        ):
            remember_zero(result, validity)
        return results_like(result, validity)
    neutral = traits.neutral

    def fill(record: Dense) -> Tensor:
        where = record.validity if derivative == "bilinear" else validity
        data = record.data
        if where is not None and where.ndim > 0 and data.ndim == 0:
            data = data.to(type_beside(data, records))
        return fill_where_invalid(data, where, neutral)

    args, kwargs = map_tensors(fill, (args, list(kwargs.items())), Dense)
    return results_like(op(*args, **dict(kwargs)), validity)


def may_trap(records: Sequence[Dense], traits: Traits) -> bool:
    """Whether the operator's kernel must not see masked data of these records' dtypes."""
    traps = traits.traps
    if traps == "integers":
        return not all(r.dtype.is_floating_point or r.dtype.is_complex for r in records)
    if traps == "complex":
        return any(r.dtype.is_complex for r in records)
    return bool(traps)


def endangered(records: Sequence[Dense], validity: Tensor) -> bool:
    """Whether a valid element may get a gradient from an index at which the result, which has `validity`, is invalid.

    The gradient of an operand with the same validity is masked there; only detect_anomaly would see its value.
    """
    return any(
        (record.validity is not validity or torch.is_anomaly_enabled())
        and (record.dtype.is_floating_point or record.dtype.is_complex)
        and gradients_may_flow(record.data)
        for record in records
    )


def type_beside(scalar: Tensor, records: Sequence[Dense]) -> torch.dtype:
    """The dtype to which torch promotes a 0-d tensor beside `records`, as it would not if the tensor had dimensions."""
    types = (torch.result_type(record.data, scalar) for record in records if record.ndim > 0)
    return functools.reduce(torch.promote_types, types)


ELEMENTWISE = Category(
    "elementwise",
    "the op on the operands; valid where every tensor operand is valid, never revives an invalid element",
    run_elementwise,
    dims=Elementwise(),
    lowerings={Sparse: ELEMENTWISE_LOWERING, Permuted: ON_PERMUTED_VALUES},
    traits=("derivative", "neutral", "keeps_zero", "traps"),
)

# ------------------------------------------------------------------------------------------------------- movement


def run_movement(op: OpOverload, *args: Any, _traits: Traits = NO_TRAITS, **kwargs: Any) -> Any:
    """The operator on the data and on the validity alike.

    For operators that write zeros themselves, the *in*validity is moved instead, so that those zeros are valid.
    """
    writes = _traits.writes
    records = list(records_in(args))
    data = op(*data_of(args), **kwargs)
    if all(record.validity is None for record in records):
        return results_like(data, None)

    def validity_of(record: Dense) -> Tensor:
        v = record.full_validity
        if v is None:
            v = torch.ones_like(record.data, dtype=torch.int8)
        return as_int8(v) ^ 1 if writes else as_int8(v)

    moved = op(*map_tensors(validity_of, args, Dense), **kwargs)
    if writes:
        moved = map_tensors(lambda v: v ^ 1, moved, Tensor)
    if isinstance(data, Tensor):
        return Dense(data, moved)
    return type(data)(Dense(d, m) for d, m in zip(data, moved, strict=True))


MOVEMENT = Category(
    "movement",
    "an element moves with its validity; zeros that the operation writes are valid",
    run_movement,
    why_dense="it moves elements, and no lowering computes their new coordinates",
    traits=("writes",),
)

# ------------------------------------------------------------------------------------------------------ reduction


ONE_FOR_EACH_SLICE = Slices("one")


def run_reduction(op: OpOverload, x: Dense, *args: Any, _traits: Traits = NO_TRAITS, **kwargs: Any) -> Any:
    """The operator on data filled with its identity; on the data as it is, if each slice is valid as a whole or not.

    Traits: `identity`; and `mixed_derivative`, True if torch chooses the formula of the derivative for all slices by
    what any of them holds.
    """
    value, validity = reduction_steps(op, x, args, _traits, kwargs)
    if value is not None and isinstance(_traits.dims, Slices) and _traits.dims.positions and x.ndim and x.data.numel():
        return results_like(_valid_ones_first(op, x, value, _traits.dims, args, kwargs), validity)
    return results_like(op(x.data if value is None else x.filled(value), *args, **kwargs), validity)


def _valid_ones_first(
    op: OpOverload, x: Dense, value: Number, slices: Slices, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The results on slices in which what is filled in lies behind the valid elements; their positions in `x`.

    A valid element may equal the identity, and an operator takes the first of equals.
    """
    dims = wrap_dims(argument(op, slices.dim, (x, *args), kwargs), x.ndim)
    kept, behind = bool(argument(op, slices.keepdim, (x, *args), kwargs)), tuple(range(-len(dims), 0))
    size, validity = math.prod(x.shape[d] for d in dims), x.full_validity
    assert validity is not None
    filled, valid = (undivided(t).movedim(dims, behind).flatten(-len(dims)) for t in (x.filled(value), validity))
    place = valid_first_positions(valid, -1)
    element = torch.zeros_like(place).scatter(-1, place, arange_along(size, -1, place).expand_as(place))
    in_order = filled.gather(-1, element).unflatten(-1, [x.shape[d] for d in dims]).movedim(behind, dims)

    def in_x(at: Tensor) -> Tensor:
        each = (at.squeeze(dims) if kept else at).unsqueeze(-1)
        found = element.gather(-1, each.clamp(0, size - 1).long()).to(at.dtype)
        return torch.where((each >= 0) & (each < size), found, each).view(at.shape)

    results = op(in_order, *args, **kwargs)
    if isinstance(results, Tensor):
        return in_x(results)
    return tuple(in_x(r) if n in (slices.positions or ()) else r for n, r in enumerate(results))


def reduction_steps(
    op: OpOverload, x: Dense, args: Sequence[Any], traits: Traits, kwargs: Mapping[str, Any]
) -> tuple[Number | None, Tensor | None]:
    """What the input of a reduction has to be filled with, None for nothing; and the validity of its result.

    Both depend on the mask, the shape, the dtype and the arguments, not on the data.
    """
    slices = traits.dims if isinstance(traits.dims, Slices) else ONE_FOR_EACH_SLICE
    dim = argument(op, slices.dim, (x, *args), kwargs)
    validity = x.any_valid(dim, bool(argument(op, slices.keepdim, (x, *args), kwargs)))
    unmixed = not traits.mixed_derivative or not gradients_may_flow(x.data)
    if x.validity is None or (
        unmixed and has_whole_slices(x, wrap_dims(dim, x.ndim)) and not torch.is_anomaly_enabled()
    ):
        return None, validity
    identity = traits.identity
    return identity(x.dtype) if callable(identity) else identity, validity


REDUCTION = Category(
    "reduction",
    "what torch gives on the slice with its invalid elements removed; valid where n >= 1",
    run_reduction,
    dims=ONE_FOR_EACH_SLICE,
    lowerings={Sparse: SLICEWISE, Permuted: SLICEWISE_ON_BASE},
    traits=("identity", "mixed_derivative"),
    needs=("identity",),
)

# ----------------------------------------------------------------------------------------------------------- scan


def run_scan(op: OpOverload, x: Dense, *args: Any, _traits: Traits = NO_TRAITS, **kwargs: Any) -> Any:
    """The operator on data filled with its identity, so that an invalid step leaves the running value unchanged."""
    identity = _traits.identity
    value = identity(x.dtype) if callable(identity) else identity
    return results_like(op(x.filled(value), *args, **kwargs), x.validity)


SCAN = Category(
    "scan",
    "at valid positions what torch gives on the slice with its invalid elements removed; valid where the input is",
    run_scan,
    dims=Slices("each"),
    by_rows=True,
    lowerings={Sparse: SLICEWISE, Permuted: SLICEWISE_ON_BASE},
    traits=("identity",),
    needs=("identity",),
)

# ---------------------------------------------------------------------------------------------------- contraction


def run_contraction(op: OpOverload, *args: Any, _traits: Traits = NO_TRAITS, **kwargs: Any) -> Dense:
    """A sum of products over index tuples whose factors are all valid: the operator on data filled with 0.

    The mask follows from the equation that the rule states, ``dims=Equation("mk,kn->mn")``; an operand that is added
    takes part elementwise, and not at all with ``beta=0``. Without an equation, index tuples are counted.
    """
    if not kwargs and not any_masked(args) and list not in map(type, args):
        return Dense(op(*map(plain_data, args)))
    named = bind_by_name(op, args, kwargs)
    labels = _traits.dims.labels(op, named) if _traits.dims is not None else None
    if labels is None or not labels.is_sum_of_products:
        return contract(op, *args, **kwargs)
    tensors = {name: named[name] for name in labels.operands}
    filled = [a.filled(0) if isinstance(a, Dense) else a for a in args]
    data = op(*filled, **{n: a.filled(0) if isinstance(a, Dense) else a for n, a in kwargs.items()})
    validity = validity_of_sum(labels, tensors)
    for name in labels.added if named.get("beta", 1) != 0 else ():
        validity = intersect(validity, tensors[name].validity)
    return Dense(data, validity)


def zeros_filled(record: Dense) -> Tensor:
    return record.filled(0)


def contract(op: OpOverload, *args: Any, **kwargs: Any) -> Dense:
    """The same for an operator whose rule states no equation: it counts tuples to find the mask.

    The mask is the same contraction of the validities. With one masked factor, the all-ones validity of the others is
    still contracted: a convolution's padding or a size-0 dimension may leave an output without any contribution.
    """
    data = op(*map_tensors(zeros_filled, args, Dense), **kwargs)
    if all(record.validity is None for record in records_in(args)):
        return Dense(data)

    def validity_of(record: Dense) -> Tensor:
        v = record.full_validity
        return torch.ones_like(record.data, dtype=torch.float32) if v is None else v.to(torch.float32)

    def ones_of(record: Dense) -> Tensor:
        return torch.ones_like(record.data, dtype=torch.float32)

    with torch.no_grad(), autocast_off(data.device):
        valid_tuples = op(*map_tensors(validity_of, args, Dense), **kwargs)
        all_tuples = op(*map_tensors(ones_of, args, Dense), **kwargs)
        # Counts are sums of non-negative terms: at least one term keeps them ≥ 1 whatever the rounding.
        valid = (valid_tuples > 0.5) | (all_tuples < 0.5)
    return Dense(data, as_int8(valid))


CONTRACTION = Category(
    "contraction",
    "the sum over index tuples whose factors are all valid; valid where at least one such tuple exists",
    run_contraction,
    by_rows=True,
    lowerings={Sparse: first_of(BY_EQUATION, ON_STORED_ROWS, BY_ELEMENTS), Permuted: ON_STORED_ROWS},
    why_dense="it sums products over index tuples, and no kernel does so for sparse operands of this operator",
    traits=("dims",),
)

# ---------------------------------------------------------------------------------------------------------- opaque


def run_opaque(op: OpOverload, *args: Any, _traits: Traits = NO_TRAITS, **kwargs: Any) -> Any:
    """The operator itself where everything is valid, a refusal where it is not or cannot be known.

    A trait `reason` is a clause that says why, for the text of the refusal.
    """
    for record in [*records_in(args), *records_in(kwargs.values())]:
        if not known_all_valid(record):
            mixes = f"it mixes all elements of shape {tuple(record.shape)}, and no rule says how to leave some out"
            raise MaskedSemanticsError(
                f"{packet_name(op)} has no meaning on partly valid input ({_traits.reason or mixes}). "
                f"Fill them first with x.to_tensor(value), or register a rule of your own for {op}."
            )
    return results_like(op(*data_of(args), **{k: data_of(v) for k, v in kwargs.items()}), None)


def known_all_valid(record: Dense) -> bool:
    """Whether every element is known to be valid.

    While tracing, and on meta, only if no mask is stored or the tensor is empty.
    """
    if record.validity is None or record.data.numel() == 0:
        return True
    if not has_values(record.validity):
        return False
    return bool(record.validity.all())


OPAQUE = Category(
    "opaque",
    "mixes everything; runs where every element is valid, refused otherwise",
    run_opaque,
    dims=Unknown("it mixes all elements"),
    closed=True,
    why_dense="it works on a whole slice at once, in which no element may be missing",
    traits=("reason",),
)

# --------------------------------------------------------------------------------------------------------- refused


def run_refused(op: OpOverload, *args: Any, _traits: Traits = NO_TRAITS, **kwargs: Any) -> Any:
    """Raise the refusal; `reason` and `instead` are the rule's traits."""
    raise MaskedSemanticsError(refusal(op, _traits.reason, _traits.instead))


def refusal(op: OpOverload, reason: str, instead: str) -> str:
    """The error message of a refusal."""
    return f"{packet_name(op)} is refused on masked tensors: {reason}. {instead}."


REFUSED = Category(
    "refused",
    "has no meaning on masked tensors, for the reason stated",
    run_refused,
    dims=Unknown("no call has a result"),
    closed=True,
    traits=("reason", "instead"),
    needs=("reason", "instead"),
    may_write=True,
)

# ---------------------------------------------------------------------- laws whose operators have their own runs

NORMALIZATION = Category(
    "normalization",
    "statistics over the valid elements; valid where the input (and the affine parameters) are",
    dims=Slices("each"),
    by_rows=True,
    lowerings={Sparse: SLICEWISE, Permuted: SLICEWISE_ON_BASE},
    may_write=True,  # running statistics
)
JOIN = Category("join", "each element arrives with its validity", why_dense="it joins operands with different patterns")
ASSIGNMENT = Category(
    "assignment",
    "the written element takes the value and the validity of what is written; an invalid index writes nothing",
    why_dense="it writes at computed coordinates, which may not be stored",
    may_write=True,
)
ACCUMULATION = Category(
    "accumulation",
    "a reduction over valid contributions; valid with at least one, or a valid self",
    why_dense="it scatters contributions to computed coordinates, which may not be stored",
)
INDEXING = Category(
    "indexing",
    "an element moves with its validity; an invalid index gives an invalid element",
    why_dense="it reads at computed coordinates, which may not be stored",
)
FACTORY = Category(
    "factory",
    "as torch; valid where the input is, new_zeros, new_ones and new_full everywhere, what is uninitialised nowhere",
    dims=Elementwise(),
)
QUERY = Category(
    "query",
    "a plain answer about the valid elements",
    dims=Unknown("its answer is about all valid elements, and plain"),
    plainly=True,
    may_write=True,
)
SORTING = Category(
    "sorting",
    "valid elements in order, first, in both directions; the first n elements are valid",
    dims=Slices("front"),
    lowerings={Sparse: SLICEWISE, Permuted: SLICEWISE_ON_BASE},
    why_dense="it orders elements across stored and absent ones",
)
LOSS = Category(
    "loss",
    "the elementwise part as elementwise, reduced over what is valid with torch's own denominator",
    dims=Loss(Elementwise()),
    why_dense="it is computed from operands that are aligned densely",
)
ATTENTION = Category(
    "attention",
    "softmax over the keys that share a valid feature with the query, then the sum over valid values",
    why_dense="scores are a product of every query with every key",
)
RECURRENT = Category(
    "recurrent",
    "a scan over time: an invalid step carries the state unchanged; valid where the step's input is",
    why_dense="a step reads the state of the previous step, whether that step is stored or not",
)
RANDOM = Category(
    "random",
    "as torch, drawn for every position; valid where the input is",
    dims=Elementwise(),
    why_dense="a number is drawn for every element, stored or not, so that a mask does not change the stream",
)
POOLING = Category(
    "pooling",
    "over the valid elements of the window; valid where the window has one, or none to begin with",
    dims=Windows(),
    why_dense="a window reads neighbours by their index, stored or not",
)
CHOICE = Category(
    "choice", "the chosen branch; valid where the condition and the chosen branch are", dims=Elementwise()
)
DERIVATIVE = Category(
    "derivative",
    "what autograd gives for the masked operator that it is the derivative of; masked as its variable is, or all valid "
    "if the variable is no argument",
    dims=Unknown("they are those of the operator that it is the derivative of"),
    why_dense="the formula of the derivative is written for dense operands",
)
# Rules of this category are composed of other operators. Their runs get the tensors of the call, masked and plain, in
# place of records: for operators that write to several tensors, only some of which may be masked.
COMPOSITE = Category(
    "composite",
    "other operators, each under its own law",
    dims=Unknown("they are those of the operators that it is written in"),
    closed=True,
    may_write=True,
)
PLUMBING = Category(
    "plumbing", "queries by autograd and the compiler; data and mask alike", dims=Elementwise(), plainly=True
)


def categories() -> dict[str, Category]:
    """The categories of this module, by their names in op_registry.authoring."""
    return {name: value for name, value in globals().items() if isinstance(value, Category)}
