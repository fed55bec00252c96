"""The API for rule authors: the words that rules, dense or sparse, are written in.

Built-in rules import what only one or two families use from the rooms below, and all else from here, so that each of
their files can be read as a tutorial; rules of another library use the same API::

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

from op_registry.autocast import autocast_on as autocast_on
from op_registry.bound import Bound as Bound
from op_registry.dimensions.equation import Equation as Equation
from op_registry.dimensions.labels import Elementwise as Elementwise
from op_registry.dimensions.movements import Along as Along
from op_registry.dimensions.movements import ByArgument as ByArgument
from op_registry.dimensions.movements import Unknown as Unknown
from op_registry.dimensions.slices import Slices as Slices
from op_registry.errors import MaskedSemanticsError as MaskedSemanticsError
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
from op_registry.laws.inside import inside as inside
from op_registry.laws.slice_rules import masked_slices as masked_slices
from op_registry.laws.slice_rules import over_slices as over_slices
from op_registry.laws.whole_slices import MATRIX as MATRIX
from op_registry.laws.whole_slices import WHOLE_SLICES as WHOLE_SLICES
from op_registry.laws.whole_slices import each_matrix as each_matrix
from op_registry.laws.whole_slices import for_each_slice as for_each_slice
from op_registry.laws.whole_slices import replaced as replaced
from op_registry.laws.whole_slices import spread_diagonal as spread_diagonal
from op_registry.laws.whole_slices import whole_slices as whole_slices
from op_registry.laws.whole_slices import whole_validity as whole_validity
from op_registry.laws.words import contraction as contraction
from op_registry.laws.words import elementwise as elementwise
from op_registry.laws.words import masked_rule as masked_rule
from op_registry.laws.words import movement as movement
from op_registry.laws.words import opaque as opaque
from op_registry.laws.words import reduction as reduction
from op_registry.laws.words import refused as refused
from op_registry.laws.words import run_plain as run_plain
from op_registry.laws.words import scan as scan
from op_registry.records.arguments import Number as Number
from op_registry.records.arguments import accumulation_dtype as accumulation_dtype
from op_registry.records.arguments import highest as highest
from op_registry.records.arguments import lowest as lowest
from op_registry.records.arguments import shape_alone as shape_alone
from op_registry.records.arguments import wrap_dim as wrap_dim
from op_registry.records.dense import Dense as Dense
from op_registry.records.dense import all_valid as all_valid
from op_registry.records.dense import valid_in_all as valid_in_all
from op_registry.records.fill import fill_where_invalid as fill_where_invalid
from op_registry.records.layout import aligned_validity as aligned_validity
from op_registry.records.layout import broadcast_along as broadcast_along
from op_registry.records.slices import safe_sqrt as safe_sqrt
from op_registry.records.tracing import being_traced as being_traced
from op_registry.records.tracing import gradients_may_flow as gradients_may_flow
from op_registry.records.validity import as_bool as as_bool
from op_registry.records.validity import as_int8 as as_int8
from op_registry.records.validity import intersect as intersect
from op_registry.records.validity import on_device_of as on_device_of
from op_registry.resolve import by_rule as by_rule
from op_registry.rule import Rule as Rule
from op_registry.rule import packet_name as packet_name
from op_registry.sparse.coordinates import Coordinates as Coordinates
from op_registry.sparse.coordinates import ravel as ravel
from op_registry.sparse.coordinates import unravel as unravel
from op_registry.sparse.layout import CSR as CSR
from op_registry.sparse.layout import Layout as Layout
from op_registry.sparse.layout import register_layout as register_layout
from op_registry.sparse.lowering import first_of as first_of
from op_registry.sparse.lowering import never as never
from op_registry.sparse.lowering import on_call as on_call
from op_registry.sparse.lowering import raise_error_of_torch as raise_error_of_torch
from op_registry.sparse.on_values import align_to as align_to
from op_registry.sparse.on_values import broadcast_to as broadcast_to
from op_registry.sparse.on_values import call as call
from op_registry.sparse.permuted import AnyRecord as AnyRecord
from op_registry.sparse.permuted import Permuted as Permuted
from op_registry.sparse.permuted import shown as shown
from op_registry.sparse.permuted import to_dense as to_dense
from op_registry.sparse.record import NotLowered as NotLowered
from op_registry.sparse.record import Sparse as Sparse

# What `import *` takes and help() lists.
__all__ = [name for name in dir() if not name.startswith("_")]
