"""The API for rule authors: everything that a rule, dense or sparse, needs.

Built-in rules import only from here and from their own family (tests/house/test_imports.py), so that each of their
files can be read as a tutorial; rules of another library use the same API::

    from op_registry.authoring import REDUCTION, Dense, elementwise, masked_rule

    gelu_fast = elementwise(torch.ops.mylib.gelu_fast)  # one line, if a category's law is enough


    @masked_rule(torch.ops.mylib.span, category=REDUCTION)  # else a function with the operator's signature
    def span(x: Dense, dim: int) -> Dense:
        data = x.filled(-math.inf).amax(dim) - x.filled(math.inf).amin(dim)
        return Dense(data, x.any_valid(dim))

A rule gets :class:`Dense` records in place of tensors, and returns records (masked results) or plain tensors (plain
results, if its category or ``plain=`` says so). Data under a mask must not affect anything: fill before the operation,
never multiply after. A rule is plain differentiable torch code and never defines a backward.

A lowering runs the rule on :class:`Sparse` records without making them dense, ``@rule.lowering(Sparse)``; it raises
:class:`NotLowered`, with the reason, for a call that it does not handle. docs/write-a-rule.md shows both.
"""

from op_registry.autocast import autocast_off, autocast_on, result_dtype, upcast_under_autocast
from op_registry.categories import (
    ACCUMULATION,
    ASSIGNMENT,
    ATTENTION,
    CHOICE,
    COMPOSITE,
    CONTRACTION,
    DERIVATIVE,
    ELEMENTWISE,
    FACTORY,
    INDEXING,
    JOIN,
    LOSS,
    MOVEMENT,
    NORMALIZATION,
    OPAQUE,
    PLUMBING,
    POOLING,
    QUERY,
    RANDOM,
    RECURRENT,
    REDUCTION,
    REFUSED,
    SCAN,
    SORTING,
    contract,
    contraction,
    data_of,
    elementwise,
    known_all_valid,
    masked_rule,
    movement,
    opaque,
    reduction,
    refusal,
    refused,
    results_like,
    run_elementwise,
    run_movement,
    run_opaque,
    scan,
)
from op_registry.derivatives import bind_by_name, derivative, requested_gradients, run_plain, vjp
from op_registry.errors import InvalidValueError, MaskedSemanticsError
from op_registry.inside import inside
from op_registry.records.broadcast import (
    aligned_validity,
    expand_validity,
    full_mask,
    joinable_validities,
    reshape_validity,
)
from op_registry.records.dense import (
    Dense,
    all_valid,
    detached_data,
    map_tensors,
    records_in,
    valid_in_all,
)
from op_registry.records.dims import Dims, Number, wrap_dim, wrap_dims
from op_registry.records.dtypes import accumulation_dtype, highest, lowest
from op_registry.records.fill import fill_where_invalid, zeroed
from op_registry.records.matrices import product_validity, transposed
from op_registry.records.memory import new_buffer, offset_within_data, validity_in_strides_of_data
from op_registry.records.slices import (
    DenseSlices,
    Moments,
    Order,
    Spread,
    abs_squared,
    any_masked,
    arange_along,
    extremum,
    filled_for_exp,
    filled_for_exp_alone,
    first_valid_index,
    flattened,
    has_whole_slices,
    identity_of,
    is_inexact,
    keepdim_shape,
    moments,
    nonzero_count,
    plain_data,
    reduced_dims,
    safe_sqrt,
    sort_valid,
    spread,
    squeeze_reduced,
    valid_first_positions,
)
from op_registry.records.tracing import being_traced, computed_at_once, gradients_may_flow, may_be_read
from op_registry.records.validity import as_bool, as_int8, intersect, on_device_of, unite
from op_registry.records.zeros import hand_on
from op_registry.registry import registry
from op_registry.resolve import by_rule
from op_registry.rule import Category, Gap, Rule, Run, Slices, packet_name
from op_registry.slice_rules import masked_slices
from op_registry.sparse.broadcast import expand_sparse, repeat_sparse, with_coordinates
from op_registry.sparse.compose import (
    broadcast_to,
    call,
    call_broadcast,
    dense_or_none,
    distance,
    joint_sums,
    lowers,
    map_dense_dim,
    refuse_dense_dims,
    refuse_permuted,
    require_float,
    rows_of,
    select_along,
    slice_of,
)
from op_registry.sparse.compressed import CSR, PACKED
from op_registry.sparse.coordinates import Coordinates, ravel, unravel
from op_registry.sparse.elements import (
    from_elements,
    grid_coordinates,
    layout_with_room,
    lookup,
    sorted_coordinates,
    valid_elements,
    valid_elements_of,
)
from op_registry.sparse.elementwise import ON_PERMUTED_VALUES, ON_VALUES, align_to, lead_operand
from op_registry.sparse.layout import COO, Layout
from op_registry.sparse.layout_registry import register_layout
from op_registry.sparse.lookup_gradient import Lookup, gradient_can_be_sparse
from op_registry.sparse.lowering import first_of, never
from op_registry.sparse.permuted import (
    AnyRecord,
    Groups,
    Permuted,
    in_base_order,
    keeps_dims_in_view,
    on_last_dims,
    order_of,
    sparse_dims_first,
    to_base_order,
    to_dense,
)
from op_registry.sparse.record import (
    NotLowered,
    Sparse,
    coalesce,
    concat_values,
    from_coordinates,
    from_dense,
    to_layout,
    unpadded_elements,
    without_invalid,
)
from op_registry.sparse.segments import Segments, segment_exponentials, segment_validity
from op_registry.sparse.slicewise import lowers_by_segments
from op_registry.sparse.spmm import RowColumn, sddmm, spmm
from op_registry.whole_slices import (
    MATRIX,
    WHOLE_SLICES,
    each_matrix,
    for_each_slice,
    replaced,
    spread_diagonal,
    whole_slices,
    whole_validity,
)

__all__ = [
    # Categories: laws that many operators share, and functions that register operators under one in a line.
    "ACCUMULATION",
    "ASSIGNMENT",
    "ATTENTION",
    "CHOICE",
    "COMPOSITE",
    "CONTRACTION",
    "DERIVATIVE",
    "ELEMENTWISE",
    "FACTORY",
    "INDEXING",
    "JOIN",
    "LOSS",
    "MOVEMENT",
    "NORMALIZATION",
    "OPAQUE",
    "PLUMBING",
    "POOLING",
    "QUERY",
    "RANDOM",
    "RECURRENT",
    "REDUCTION",
    "REFUSED",
    "SCAN",
    "SORTING",
    "WHOLE_SLICES",
    "contraction",
    "elementwise",
    "movement",
    "opaque",
    "reduction",
    "refused",
    "scan",
    "whole_slices",
    # Rules that are functions with the operator's signature, everywhere or inside one Python function.
    "inside",
    "contract",
    "data_of",
    "known_all_valid",
    "masked_rule",
    "refusal",
    "results_like",
    "run_elementwise",
    "run_movement",
    "run_opaque",
    "masked_slices",
    "Category",
    "Gap",
    "Rule",
    "Run",
    "Slices",
    "packet_name",
    "by_rule",
    "InvalidValueError",
    "MaskedSemanticsError",
    # Dense records, and the algebra of validity.
    "Dense",
    "all_valid",
    "detached_data",
    "fill_where_invalid",
    "hand_on",
    "zeroed",
    "map_tensors",
    "records_in",
    "valid_in_all",
    "as_bool",
    "as_int8",
    "intersect",
    "on_device_of",
    "unite",
    "aligned_validity",
    "expand_validity",
    "full_mask",
    "joinable_validities",
    "reshape_validity",
    "Dims",
    "Number",
    "wrap_dim",
    "wrap_dims",
    "accumulation_dtype",
    "highest",
    "lowest",
    "product_validity",
    "transposed",
    "new_buffer",
    "offset_within_data",
    "validity_in_strides_of_data",
    "being_traced",
    "computed_at_once",
    "gradients_may_flow",
    "may_be_read",
    "autocast_off",
    "autocast_on",
    "result_dtype",
    "upcast_under_autocast",
    # Slices: helpers for reductions, scans, norms and sorts.
    "DenseSlices",
    "Moments",
    "Order",
    "Spread",
    "abs_squared",
    "any_masked",
    "arange_along",
    "extremum",
    "filled_for_exp",
    "filled_for_exp_alone",
    "first_valid_index",
    "flattened",
    "has_whole_slices",
    "identity_of",
    "is_inexact",
    "keepdim_shape",
    "moments",
    "nonzero_count",
    "plain_data",
    "reduced_dims",
    "safe_sqrt",
    "sort_valid",
    "spread",
    "squeeze_reduced",
    "valid_first_positions",
    # Whole slices: matrices, lines and rows in which nothing may be missing.
    "MATRIX",
    "each_matrix",
    "for_each_slice",
    "replaced",
    "spread_diagonal",
    "whole_validity",
    # Gradient formulas that users call directly.
    "bind_by_name",
    "derivative",
    "requested_gradients",
    "run_plain",
    "vjp",
    # Lowerings: how a rule runs on sparse records.
    "NotLowered",
    "Sparse",
    "coalesce",
    "concat_values",
    "from_coordinates",
    "from_dense",
    "to_layout",
    "unpadded_elements",
    "without_invalid",
    "Coordinates",
    "ravel",
    "unravel",
    # Layouts: how sparse records list stored elements, and layouts of your own.
    "COO",
    "CSR",
    "PACKED",
    "Layout",
    "register_layout",
    "AnyRecord",
    "Groups",
    "Permuted",
    "in_base_order",
    "keeps_dims_in_view",
    "on_last_dims",
    "order_of",
    "sparse_dims_first",
    "to_base_order",
    "to_dense",
    "first_of",
    "never",
    "ON_PERMUTED_VALUES",
    "ON_VALUES",
    "align_to",
    "lead_operand",
    "lowers_by_segments",
    "Segments",
    "segment_exponentials",
    "segment_validity",
    "expand_sparse",
    "repeat_sparse",
    "with_coordinates",
    "broadcast_to",
    "call",
    "call_broadcast",
    "dense_or_none",
    "distance",
    "joint_sums",
    "lowers",
    "map_dense_dim",
    "refuse_dense_dims",
    "refuse_permuted",
    "require_float",
    "rows_of",
    "select_along",
    "slice_of",
    "from_elements",
    "grid_coordinates",
    "layout_with_room",
    "lookup",
    "sorted_coordinates",
    "valid_elements",
    "valid_elements_of",
    "RowColumn",
    "sddmm",
    "spmm",
    "Lookup",
    "gradient_can_be_sparse",
    # The registry itself.
    "registry",
]
