"""The API for rule authors: everything that a rule, dense or sparse, needs.

Built-in rules import only from here and from their own family, so that each of their files can be read as a tutorial;
rules of another library use the same API::

    from op_registry.authoring import REDUCTION, Dense, Equation, contraction, elementwise, masked_rule

    gelu_fast = elementwise(torch.ops.mylib.gelu_fast)  # one line, if a category's law is enough
    scores = contraction(torch.ops.mylib.scores, dims=Equation("*k,nk->*n"))  # with the dimensions that it works on

    @masked_rule(torch.ops.mylib.span, category=REDUCTION)  # else a function with the operator's signature
    def span(x: Dense, dim: int) -> Dense:
        data = x.filled(-math.inf).amax(dim) - x.filled(math.inf).amin(dim)
        return Dense(data, x.any_valid(dim))

A rule gets :class:`Dense` records in place of tensors, and returns records (masked results) or plain tensors (plain
results, if its category or ``plain=`` says so). Data under a mask must not affect anything: fill before the operation,
never multiply after. A rule is plain differentiable torch code and never defines a backward.

How it runs on :class:`Sparse` records follows from the dimensions that it states, else from a lowering.
"""

from op_registry import extents as extents
from op_registry.autocast import autocast_off as autocast_off
from op_registry.autocast import autocast_on as autocast_on
from op_registry.autocast import result_dtype as result_dtype
from op_registry.autocast import upcast_under_autocast as upcast_under_autocast
from op_registry.bound import Bound as Bound
from op_registry.bound import bind_by_name as bind_by_name
from op_registry.dimensions.equation import Equation as Equation
from op_registry.dimensions.labels import Elementwise as Elementwise

# Which dimensions an operator works on.
from op_registry.dimensions.movements import Along as Along
from op_registry.dimensions.movements import AtIndices as AtIndices
from op_registry.dimensions.movements import ByArgument as ByArgument
from op_registry.dimensions.movements import Indexed as Indexed
from op_registry.dimensions.movements import Joined as Joined
from op_registry.dimensions.movements import Loss as Loss
from op_registry.dimensions.movements import OfSizes as OfSizes
from op_registry.dimensions.movements import OnDiagonal as OnDiagonal
from op_registry.dimensions.movements import Repeated as Repeated
from op_registry.dimensions.movements import Unknown as Unknown
from op_registry.dimensions.movements import Unsqueezed as Unsqueezed
from op_registry.dimensions.movements import Windows as Windows
from op_registry.dimensions.slices import LastDims as LastDims
from op_registry.dimensions.slices import Slices as Slices
from op_registry.dimensions.views import Reshaped as Reshaped
from op_registry.dimensions.views import View as View
from op_registry.errors import InvalidValueError as InvalidValueError
from op_registry.errors import MaskedSemanticsError as MaskedSemanticsError

# Categories: laws that many operators share.
from op_registry.laws.categories import ACCUMULATION as ACCUMULATION
from op_registry.laws.categories import ASSIGNMENT as ASSIGNMENT
from op_registry.laws.categories import ATTENTION as ATTENTION
from op_registry.laws.categories import CHOICE as CHOICE
from op_registry.laws.categories import COMPOSITE as COMPOSITE
from op_registry.laws.categories import CONTRACTION as CONTRACTION
from op_registry.laws.categories import DERIVATIVE as DERIVATIVE
from op_registry.laws.categories import ELEMENTWISE as ELEMENTWISE
from op_registry.laws.categories import FACTORY as FACTORY
from op_registry.laws.categories import INDEXING as INDEXING
from op_registry.laws.categories import JOIN as JOIN
from op_registry.laws.categories import LOSS as LOSS
from op_registry.laws.categories import MOVEMENT as MOVEMENT
from op_registry.laws.categories import NORMALIZATION as NORMALIZATION
from op_registry.laws.categories import OPAQUE as OPAQUE
from op_registry.laws.categories import PLUMBING as PLUMBING
from op_registry.laws.categories import POOLING as POOLING
from op_registry.laws.categories import QUERY as QUERY
from op_registry.laws.categories import RANDOM as RANDOM
from op_registry.laws.categories import RECURRENT as RECURRENT
from op_registry.laws.categories import REDUCTION as REDUCTION
from op_registry.laws.categories import REFUSED as REFUSED
from op_registry.laws.categories import SCAN as SCAN
from op_registry.laws.categories import SORTING as SORTING
from op_registry.laws.categories import contract as contract
from op_registry.laws.categories import data_of as data_of
from op_registry.laws.categories import known_all_valid as known_all_valid
from op_registry.laws.categories import refusal as refusal
from op_registry.laws.categories import results_like as results_like
from op_registry.laws.categories import run_contraction as run_contraction
from op_registry.laws.categories import run_elementwise as run_elementwise
from op_registry.laws.categories import run_movement as run_movement
from op_registry.laws.categories import run_opaque as run_opaque

# Gradient formulas that users call directly.
from op_registry.laws.derivatives import derivative as derivative
from op_registry.laws.derivatives import requested_gradients as requested_gradients
from op_registry.laws.derivatives import run_plain as run_plain
from op_registry.laws.derivatives import vjp as vjp

# Rules inside one Python function.
from op_registry.laws.inside import inside as inside
from op_registry.laws.slice_rules import masked_slices as masked_slices
from op_registry.laws.slice_rules import over_slices as over_slices

# Whole slices: matrices, lines and rows in which nothing may be missing.
from op_registry.laws.whole_slices import MATRIX as MATRIX
from op_registry.laws.whole_slices import WHOLE_SLICES as WHOLE_SLICES
from op_registry.laws.whole_slices import each_matrix as each_matrix
from op_registry.laws.whole_slices import for_each_slice as for_each_slice
from op_registry.laws.whole_slices import replaced as replaced
from op_registry.laws.whole_slices import spread_diagonal as spread_diagonal
from op_registry.laws.whole_slices import whole_slices as whole_slices
from op_registry.laws.whole_slices import whole_validity as whole_validity

# Functions that register operators under a category in a line, and rules that are functions.
from op_registry.laws.words import contraction as contraction
from op_registry.laws.words import elementwise as elementwise
from op_registry.laws.words import masked_rule as masked_rule
from op_registry.laws.words import movement as movement
from op_registry.laws.words import opaque as opaque
from op_registry.laws.words import reduction as reduction
from op_registry.laws.words import refused as refused
from op_registry.laws.words import scan as scan

# Dense records, and the algebra of validity.
from op_registry.records.broadcast import aligned_validity as aligned_validity
from op_registry.records.broadcast import broadcast_along as broadcast_along
from op_registry.records.broadcast import concatenated as concatenated
from op_registry.records.broadcast import expand_validity as expand_validity
from op_registry.records.broadcast import full_mask as full_mask
from op_registry.records.broadcast import joinable_validities as joinable_validities
from op_registry.records.broadcast import reshape_validity as reshape_validity
from op_registry.records.dense import Dense as Dense
from op_registry.records.dense import all_valid as all_valid
from op_registry.records.dense import detached_data as detached_data
from op_registry.records.dense import map_tensors as map_tensors
from op_registry.records.dense import records_in as records_in
from op_registry.records.dense import valid_in_all as valid_in_all
from op_registry.records.dims import Dims as Dims
from op_registry.records.dims import Number as Number
from op_registry.records.dims import known_to_hold as known_to_hold
from op_registry.records.dims import one_element_but_along as one_element_but_along
from op_registry.records.dims import shape_alone as shape_alone
from op_registry.records.dims import with_leading_dims as with_leading_dims
from op_registry.records.dims import wrap_dim as wrap_dim
from op_registry.records.dims import wrap_dims as wrap_dims
from op_registry.records.divided import divided_by_rows as divided_by_rows
from op_registry.records.divided import gather_along as gather_along
from op_registry.records.divided import is_divided as is_divided
from op_registry.records.divided import undivided as undivided
from op_registry.records.dtypes import accumulation_dtype as accumulation_dtype
from op_registry.records.dtypes import highest as highest
from op_registry.records.dtypes import lowest as lowest
from op_registry.records.dtypes import on_signed_bits as on_signed_bits
from op_registry.records.fill import fill_in_place as fill_in_place
from op_registry.records.fill import fill_where_invalid as fill_where_invalid
from op_registry.records.fill import zeroed as zeroed
from op_registry.records.matrices import product_validity as product_validity
from op_registry.records.matrices import transposed as transposed
from op_registry.records.memory import new_buffer as new_buffer
from op_registry.records.memory import offset_within_data as offset_within_data
from op_registry.records.memory import validity_in_strides_of_data as validity_in_strides_of_data
from op_registry.records.regrouped import regrouped as regrouped
from op_registry.records.rows import put_rows as put_rows
from op_registry.records.rows import take_rows as take_rows
from op_registry.records.rows import valid_rows as valid_rows

# Slices: helpers for reductions, scans, norms and sorts.
from op_registry.records.slices import DenseSlices as DenseSlices
from op_registry.records.slices import Moments as Moments
from op_registry.records.slices import Order as Order
from op_registry.records.slices import Over as Over
from op_registry.records.slices import Spread as Spread
from op_registry.records.slices import abs_squared as abs_squared
from op_registry.records.slices import any_masked as any_masked
from op_registry.records.slices import arange_along as arange_along
from op_registry.records.slices import extremum as extremum
from op_registry.records.slices import filled_for_exp as filled_for_exp
from op_registry.records.slices import filled_for_exp_alone as filled_for_exp_alone
from op_registry.records.slices import first_valid_index as first_valid_index
from op_registry.records.slices import flattened as flattened
from op_registry.records.slices import has_whole_slices as has_whole_slices
from op_registry.records.slices import identity_of as identity_of
from op_registry.records.slices import is_inexact as is_inexact
from op_registry.records.slices import keepdim_shape as keepdim_shape
from op_registry.records.slices import moments as moments
from op_registry.records.slices import nonzero_count as nonzero_count
from op_registry.records.slices import plain_data as plain_data
from op_registry.records.slices import reduced_dims as reduced_dims
from op_registry.records.slices import safe_sqrt as safe_sqrt
from op_registry.records.slices import slices_on_all as slices_on_all
from op_registry.records.slices import sort_valid as sort_valid
from op_registry.records.slices import spread as spread
from op_registry.records.slices import squeeze_reduced as squeeze_reduced
from op_registry.records.slices import undivided_slices as undivided_slices
from op_registry.records.slices import valid_first_positions as valid_first_positions
from op_registry.records.tracing import being_traced as being_traced
from op_registry.records.tracing import computed_at_once as computed_at_once
from op_registry.records.tracing import gradients_may_flow as gradients_may_flow
from op_registry.records.tracing import has_values as has_values
from op_registry.records.tracing import may_be_read as may_be_read
from op_registry.records.tracing import under_transform as under_transform
from op_registry.records.validity import as_bool as as_bool
from op_registry.records.validity import as_int8 as as_int8
from op_registry.records.validity import intersect as intersect
from op_registry.records.validity import on_device_of as on_device_of
from op_registry.records.validity import unite as unite
from op_registry.records.zeros import hand_on as hand_on
from op_registry.registry import registry as registry
from op_registry.resolve import by_rule as by_rule
from op_registry.rule import Category as Category
from op_registry.rule import Gap as Gap
from op_registry.rule import Rule as Rule
from op_registry.rule import Run as Run
from op_registry.rule import packet_name as packet_name

# Sparse records and their layouts: how a rule runs on them.
from op_registry.sparse.broadcast import expand_sparse as expand_sparse
from op_registry.sparse.broadcast import repeat_sparse as repeat_sparse
from op_registry.sparse.broadcast import with_coordinates as with_coordinates
from op_registry.sparse.by_rows import ON_STORED_ROWS as ON_STORED_ROWS
from op_registry.sparse.compose import broadcast_to as broadcast_to
from op_registry.sparse.compose import call as call
from op_registry.sparse.compose import call_broadcast as call_broadcast
from op_registry.sparse.compose import distance as distance
from op_registry.sparse.compose import joint_sums as joint_sums
from op_registry.sparse.compose import lowers as lowers
from op_registry.sparse.compose import map_dense_dim as map_dense_dim
from op_registry.sparse.compose import refuse_permuted as refuse_permuted
from op_registry.sparse.compose import require_float as require_float
from op_registry.sparse.compose import select_along as select_along
from op_registry.sparse.compose import slice_of as slice_of
from op_registry.sparse.compressed import CSR as CSR
from op_registry.sparse.compressed import PACKED as PACKED
from op_registry.sparse.contraction import BY_ELEMENTS as BY_ELEMENTS
from op_registry.sparse.contraction import BY_EQUATION as BY_EQUATION
from op_registry.sparse.contraction import sampled_sum as sampled_sum
from op_registry.sparse.coordinates import Coordinates as Coordinates
from op_registry.sparse.coordinates import ravel as ravel
from op_registry.sparse.coordinates import unique_keys as unique_keys
from op_registry.sparse.coordinates import unravel as unravel
from op_registry.sparse.elements import from_elements as from_elements
from op_registry.sparse.elements import grid_coordinates as grid_coordinates
from op_registry.sparse.elements import layout_with_room as layout_with_room
from op_registry.sparse.elements import lookup as lookup
from op_registry.sparse.elements import sorted_coordinates as sorted_coordinates
from op_registry.sparse.elements import valid_elements as valid_elements
from op_registry.sparse.elements import valid_elements_of as valid_elements_of
from op_registry.sparse.elementwise import ON_PERMUTED_VALUES as ON_PERMUTED_VALUES
from op_registry.sparse.elementwise import ON_VALUES as ON_VALUES
from op_registry.sparse.elementwise import align_to as align_to
from op_registry.sparse.elementwise import lead_operand as lead_operand
from op_registry.sparse.layout import COO as COO
from op_registry.sparse.layout import Layout as Layout
from op_registry.sparse.layout_registry import register_layout as register_layout
from op_registry.sparse.lookup_gradient import Lookup as Lookup
from op_registry.sparse.lookup_gradient import gradient_can_be_sparse as gradient_can_be_sparse
from op_registry.sparse.lowering import first_of as first_of
from op_registry.sparse.lowering import never as never
from op_registry.sparse.lowering import on_call as on_call
from op_registry.sparse.pattern import pattern_of as pattern_of
from op_registry.sparse.permuted import AnyRecord as AnyRecord
from op_registry.sparse.permuted import Groups as Groups
from op_registry.sparse.permuted import Permuted as Permuted
from op_registry.sparse.permuted import groups_of as groups_of
from op_registry.sparse.permuted import in_base_order as in_base_order
from op_registry.sparse.permuted import keeps_dims_in_view as keeps_dims_in_view
from op_registry.sparse.permuted import order_of as order_of
from op_registry.sparse.permuted import shown as shown
from op_registry.sparse.permuted import shown_as as shown_as
from op_registry.sparse.permuted import sparse_dims_first as sparse_dims_first
from op_registry.sparse.permuted import to_base_order as to_base_order
from op_registry.sparse.permuted import to_dense as to_dense
from op_registry.sparse.permuted_slices import ALONG_BASE_DIM as ALONG_BASE_DIM
from op_registry.sparse.permuted_slices import shown_without as shown_without
from op_registry.sparse.record import NotLowered as NotLowered
from op_registry.sparse.record import Sparse as Sparse
from op_registry.sparse.record import coalesce as coalesce
from op_registry.sparse.record import concat_values as concat_values
from op_registry.sparse.record import drop_invalid as drop_invalid
from op_registry.sparse.record import from_coordinates as from_coordinates
from op_registry.sparse.record import from_dense as from_dense
from op_registry.sparse.record import to_layout as to_layout
from op_registry.sparse.record import unpadded_elements as unpadded_elements
from op_registry.sparse.record import with_sparse_dims as with_sparse_dims
from op_registry.sparse.record import without_invalid as without_invalid
from op_registry.sparse.segments import Segments as Segments
from op_registry.sparse.segments import few_of as few_of
from op_registry.sparse.segments import segment_exponentials as segment_exponentials
from op_registry.sparse.slicewise import at_elements as at_elements
from op_registry.sparse.slicewise import lowers_by_segments as lowers_by_segments
from op_registry.sparse.spmm import RowColumn as RowColumn
from op_registry.sparse.spmm import sddmm as sddmm
from op_registry.sparse.spmm import spmm as spmm
from op_registry.sparse.takes import raise_error_of_torch as raise_error_of_torch
from op_registry.traits import Traits as Traits

# What `import *` takes and help() lists.
__all__ = [name for name in dir() if not name.startswith("_")]
