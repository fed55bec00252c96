"""Contractions with sparse operands, by their equation: the sum of products, and what is added to it.

Law: that of dense storage. An added operand and the sum are added elementwise: valid, and stored, where both are. What
is added to a sparse operand is computed only where that stores elements (torch's `sampled_addmm`).

Valid factors are stored, so only pairs of stored factors are visited. Sparse by dense gives a dense result, sparse by
sparse a sparse one. Any two factors are matrices whose rows and columns are ravelled from their dimensions: along
*batch* labels, which both have and the result too; along *contracted* ones; and along those that one of them has alone.
With `row` and `column` the coordinates of each stored element of such a matrix, two kernels sum:

    spmm    (rows, n)  = sum over the elements of a row: element * dense[its column]
    sddmm   (stored,)  = left[its row] * right[its column], summed

Each is the derivative of the other, to any order, without the (stored x n) intermediate that plain indexing would
allocate. In a compiled graph the compiler fuses that intermediate away, so plain indexing is used there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from op_registry.autocast import autocast_on
from op_registry.bound import Bound
from op_registry.dimensions.labels import Dimension, Labels
from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.arguments import Number, accumulation_dtype
from op_registry.records.dense import Dense
from op_registry.records.fill import OwnFunction
from op_registry.records.layout import full_mask
from op_registry.records.tracing import being_traced, computed_at_once
from op_registry.records.validity import as_int8, intersect
from op_registry.sparse.convert import coalesce, with_sparse_dims
from op_registry.sparse.coordinates import unravel
from op_registry.sparse.lowering import OnCall, planned
from op_registry.sparse.on_values import call_broadcast
from op_registry.sparse.record import NotLowered, Sparse
from op_registry.sparse.segments import Segments

aten = torch.ops.aten

AnyStorage = Dense | Sparse


class Sum(NamedTuple):
    """The plan of a sum of products.

    factors  the names and labels of its two factors
    added    the name of what is added, if anything is
    result   the labels of the result
    shared   dimensions of both factors that have one label, and whether they broadcast
    """

    factors: list[tuple[str, Own]]
    added: str | None
    result: Own
    shared: list[tuple[int, int, bool]]


def by_equation(c: Bound) -> Any:
    """A contraction whose sparse operands have no dense dimensions; products are rounded once to half precision."""
    plan = sum_of_call(c)
    dtype = dtype_of(c, plan)
    wide = accumulation_dtype(dtype)
    if wide is dtype:
        return summed(c, plan)
    return cast(summed(c.map(lambda r: cast(r, wide), (Dense, Sparse)), plan), dtype)


def by_elements(c: Bound) -> Any:
    """The same after listing the valid elements of dense dimensions one by one."""
    return by_equation(c.map(lambda x: with_sparse_dims(x, x.ndim), Sparse))


@planned
def sum_of_call(c: Bound, labels: Labels | None) -> Sum:
    """The factors of a call, and what they are multiplied along."""
    if labels is None:
        raise NotLowered("its operands have other dimensions than its rule states")
    if not labels.is_sum_of_products:
        raise NotLowered("it is no sum of products alone")
    tensors = c.tensors
    for name, x in tensors.items():
        if isinstance(x, Sparse) and x.dense_sizes:
            raise NotLowered(f"dimension {x.pattern.ndim} of its operand `{name}` is dense, behind sparse ones")
    factors = [(name, labels.operands[name]) for name in tensors if name not in labels.added]
    if len(factors) != 2 or len(labels.added) > 1:
        raise NotLowered("it has not two factors")
    (_, own), (_, theirs) = factors
    for (name, mine), others in zip(factors, (theirs, own), strict=True):
        for d, label in enumerate(mine):
            if label in labels.roles and label not in others:
                raise NotLowered(f"it sums its operand `{name}` alone along dimension {d}")
    shared = [(d, theirs.index(label), isinstance(label, int)) for d, label in enumerate(own) if label in theirs]
    return Sum(factors, next(iter(labels.added), None), labels.results[0], shared)


def dtype_of(c: Bound, plan: Sum) -> torch.dtype:
    """The dtype of all operands; NotLowered if torch computes in another one."""
    dtypes = [c.named[name].dtype for name, _ in plan.factors]
    if plan.added is not None:
        dtypes.append(c.named[plan.added].dtype)
    dtype: torch.dtype = dtypes[0]
    if dtypes.count(dtype) < len(dtypes) or dtype is torch.bool:
        raise NotLowered(f"its operands have the dtypes {', '.join(map(str, dtypes))}")
    if autocast_on(c.named[plan.factors[0][0]].device):
        raise NotLowered("autocast chooses another dtype")
    if not (dtype.is_floating_point or dtype.is_complex) and float in (type(c.named.get(n)) for n in ("alpha", "beta")):
        raise NotLowered("torch rounds fractional factors of integers")
    return dtype


def factors_of(c: Bound, plan: Sum) -> list[tuple[Any, Own]]:
    """The factors with their labels: None for a dimension of size 1 that broadcasts over the other factor's.

    NotLowered for sizes that torch refuses, or that are 0.
    """
    factors = [(c.named[name], own) for name, own in plan.factors]
    sizes = [x.pattern.sizes if isinstance(x, Sparse) else x.data.shape for x, _ in factors]
    for (name, _), mine in zip(plan.factors, sizes, strict=True):
        if known_to_hold(math.prod(mine) == 0):
            raise NotLowered(f"its operand `{name}` of shape {tuple(mine)} is empty")
    for *dims, broadcasts in plan.shared:
        size, other = (mine[d] for mine, d in zip(sizes, dims, strict=True))
        if known_to_hold(size == other):
            continue
        one = next((n for n, mine in enumerate((size, other)) if broadcasts and known_to_hold(mine == 1)), None)
        if one is not None:
            x, own = factors[one]
            factors[one] = x, (*own[: dims[one]], None, *own[dims[one] + 1 :])
        elif known_to_hold(size != other):
            name, _ = plan.factors[0]
            raise NotLowered(
                f"dimension {dims[0]} of its operand `{name}` has size {size}, and {other} in another operand"
            )
    return factors


def summed(c: Bound, plan: Sum) -> AnyStorage:
    """``beta * added + alpha * product``; with ``beta=0``, the added operand takes no part."""
    factors, result = factors_of(c, plan), plan.result
    added = None if plan.added is None or c.named.get("beta", 1) == 0 else c.named[plan.added]
    if plan.added is not None:
        shape, smaller = shape_of(factors, result), tuple(c.named[plan.added].shape)
        pairs = zip(smaller[::-1], shape[::-1], strict=False)
        if any(known_to_hold(mine != 1) and known_to_hold(mine != size) for mine, size in pairs):
            where = f"its operand `{plan.added}` of shape {smaller} does not broadcast"
            raise NotLowered(f"{where} to the result's, {shape}")
    (x, own), (y, theirs) = factors if isinstance(factors[0][0], Sparse) else factors[::-1]
    product: AnyStorage
    if isinstance(x, Dense):
        if isinstance(added, Sparse) and added.ndim == len(result) and added.shape == shape:
            return sampled_sum(c)
        product = without_added(c, plan, shape)
    else:
        multiply = sparse_by_sparse if isinstance(y, Sparse) else sparse_by_dense
        product = scaled(multiply(x, own, y, theirs, result), c.named.get("alpha", 1))
    if added is None:
        return product
    return call_broadcast(aten.add.Tensor, scaled(added, c.named.get("beta", 1)), product)


def sampled_sum(c: Bound) -> Sparse:
    """``beta * added + alpha * product`` where the added operand stores elements; elsewhere the sum is invalid."""
    plan, alpha, beta = sum_of_call(c), c.named.get("alpha", 1), c.named.get("beta", 1)
    x: Sparse = c.named[str(plan.added)]
    (a, own), (b, theirs) = factors_of(c, plan)
    product, flat = sampled(x, a, own, b, theirs, plan.result), x.flat
    data = alpha * product.data + (beta * flat.data if beta != 0 else 0)
    return x.folded(Dense(data, product.validity).masked_by(flat.full_validity))


def without_added(c: Bound, plan: Sum, shape: tuple[int, ...]) -> Dense:
    """The contraction of dense factors by its rule, with nothing added."""
    name = str(plan.added)
    if "beta" not in c:
        return c.with_(**{name: None}).run()  # type: ignore[no-any-return]
    nothing = torch.zeros((), dtype=c[name].dtype, device=c[name].device).expand(shape)
    return c.with_(**{name: Dense(nothing), "beta": 0}).run()  # type: ignore[no-any-return]


def shape_of(factors: Sequence[tuple[AnyStorage, Own]], result: Own) -> tuple[int, ...]:
    """The shape of the product."""
    sizes = {label: size for x, own in factors for label, size in zip(own, x.shape, strict=True)}
    return tuple(sizes[label] for label in result)


def scaled(x: AnyStorage, factor: Number) -> AnyStorage:
    """A record times a number."""
    if factor == 1:
        return x
    if isinstance(x, Dense):
        return x.like(x.filled(0) * factor)
    return x.like(x.values.like(x.values.filled(0) * factor))


def cast(record: AnyStorage, dtype: torch.dtype) -> AnyStorage:
    """A record in another dtype."""
    if isinstance(record, Sparse):
        return record.like(record.values.like(record.values.data.to(dtype)))
    return record.like(record.data.to(dtype))


BY_EQUATION, BY_ELEMENTS = OnCall(by_equation, of_dims=True), OnCall(by_elements, of_dims=True)


# ---------------------------------------------------------------------------------------------- products of two factors

# The label of each dimension of an operand; None for one of size 1 that broadcasts.
Own = tuple[Dimension, ...]


def among(own: Own, labels: Sequence[Dimension]) -> tuple[int, ...]:
    """The dimensions that have one of these labels, in the order of the labels."""
    return tuple(own.index(label) for label in labels if label in own)


class Places(NamedTuple):
    """The dimensions of two factors that make up matrices.

    rows             those of the first factor that the result has
    shared           those of the first factor that the other has as well
    summed           those of the first factor that the result has not
    shared_of_other  those of the other factor that the first has as well, in that one's order
    columns          those of the other factor alone that the result has
    order            where each dimension of the result comes from among `rows` and `columns`
    """

    rows: tuple[int, ...]
    shared: tuple[int, ...]
    summed: tuple[int, ...]
    shared_of_other: tuple[int, ...]
    columns: tuple[int, ...]
    order: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def places(own: Own, theirs: Own, result: Own) -> Places:
    """Which dimensions of two factors are rows, columns, and shared."""
    rows = among(own, [label for label in own if label in result])
    shared = [label for label in own if label in theirs]
    columns = among(theirs, [label for label in theirs if label in result and label not in own])
    summed = tuple(d for d in range(len(own)) if d not in rows)
    labels = (*(own[d] for d in rows), *(theirs[d] for d in columns))
    return Places(rows, among(own, shared), summed, among(theirs, shared), columns, among(labels, result))


def row_column(x: Sparse, rows: tuple[int, ...], columns: tuple[int, ...]) -> RowColumn:
    """The coordinates of the elements of `x` in a matrix whose rows are ravelled from some of its dimensions, and its
    columns from others; both may contain the same dimension, as batches do, whose matrix is block-diagonal.
    """
    if not _in_order(x, rows) and _in_order(x, columns):
        return row_column(x, columns, rows).transposed
    return x.pattern.cached(("row_column", rows, columns), lambda: _row_column(x, rows, columns))


def _in_order(x: Sparse, rows: tuple[int, ...]) -> bool:
    """Whether elements are stored row by row, if these dimensions make up the rows."""
    return x.pattern.layout.row_major and rows == tuple(range(x.pattern.ndim - 1))


def _row_column(x: Sparse, rows: tuple[int, ...], columns: tuple[int, ...]) -> RowColumn:
    pattern, in_order = x.pattern, _in_order(x, rows)
    row, column = (pattern.raveled(dims) for dims in (rows, columns))
    ends = pattern.ends() if in_order else None
    ends = ends if ends is None or ends.dtype is torch.int64 else ends.to(torch.int64)
    numbers = (math.prod(pattern.sizes[d] for d in dims) for dims in (rows, columns))
    return RowColumn(row, column, *numbers, in_order=in_order, ends=ends)


def matrix_of(x: Dense, rows: tuple[int, ...], columns: tuple[int, ...]) -> Dense:
    """A dense operand as a matrix whose rows and columns are ravelled from these dimensions; others have size 1."""
    if len(rows) == len(columns) == 1 and x.ndim == 2:
        return x if rows < columns else x.map(torch.t)
    left_out = [d for d in range(x.ndim) if d not in (*rows, *columns)]
    shape = [math.prod(x.shape[d] for d in dims) for dims in (rows, columns)]
    return x.map(lambda t: t.permute(*rows, *columns, *left_out).reshape(shape))


def sparse_by_dense(x: Sparse, own: Own, y: Dense, theirs: Own, result: Own) -> Dense:
    """A product of a sparse and a dense factor, in the result's order of dimensions."""
    at = places(own, theirs, result)
    dense = matrix_of(y.like(y.filled(0)), at.shared_of_other, at.columns)
    product = stored_by_rows(x, dense, row_column(x, at.rows, at.shared), at.summed)
    assert product.validity is not None
    if len(at.rows) != 1 or len(at.columns) != 1:
        sizes, wide = [x.pattern.sizes[d] for d in at.rows], [y.shape[d] for d in at.columns]
        narrow = [1] * len(wide) if known_to_hold(product.validity.shape[1] == 1) else wide
        product = Dense(product.data.reshape((*sizes, *wide)), product.validity.reshape((*sizes, *narrow)))
    if at.order == (*range(len(result)),):
        return product
    assert product.validity is not None
    return Dense(product.data.permute(at.order).contiguous(), product.validity.permute(at.order))


def stored_by_rows(x: Sparse, rows: Dense, coordinates: RowColumn, along: tuple[int, ...]) -> Dense:
    """The products of stored elements with rows of a dense matrix, which is 0 where invalid, summed along dimensions.

    If all of the matrix is valid, a row of the result is valid where `x` stores a valid element: validity (rows, 1).
    """
    flat = x.flat
    data = spmm(flat.filled(0), rows.data, coordinates)
    if rows.validity is None or known_to_hold(rows.shape[-1] == 0):
        return Dense(data, Segments(x, along).exists(flat).unsqueeze(1))
    valid_rows = as_int8(full_mask(rows)).to(torch.float32)
    valid_products = spmm(as_int8(full_mask(flat)).to(torch.float32), valid_rows, coordinates)
    return Dense(data, as_int8(valid_products > 0.5))


def sparse_by_sparse(a: Sparse, own: Own, b: Sparse, theirs: Own, result: Own) -> Dense | Sparse:
    """Each element of `a` times the elements of `b` that have its shared labels; products with equal coordinates are
    summed. A result without dimensions is dense.
    """
    if being_traced(a.values.data):
        raise NotLowered("the number of products is not known while tracing")
    at, left, right = places(own, theirs, result), a.flat, b.flat
    mine = row_column(a, at.rows, at.shared)
    order, columns, ends = row_column(b, at.shared_of_other, at.columns).by_row()
    partner_counts = ends.diff()[mine.column]  # for every element of `a`
    source = torch.repeat_interleave(partner_counts)
    offset = ends[mine.column] - (partner_counts.cumsum(0) - partner_counts)
    partner = offset[source] + torch.arange(source.shape[0], device=a.device)
    row, column = mine.row[source], columns[partner]
    partner = partner if order is None else order[partner]
    validity = None
    if left.validity is not None or right.validity is not None:
        validity = intersect(as_int8(full_mask(left))[source], as_int8(full_mask(right))[partner])
    products = Dense(left.filled(0)[source] * right.filled(0)[partner], validity)
    if not result:
        some = Dense(products.data, as_int8(full_mask(products))).full_validity
        assert some is not None
        return Dense(products.filled(0).sum(dtype=products.dtype), as_int8(some.any()))
    sizes = dict(zip((*own, *theirs), (*a.shape, *b.shape), strict=True)) | dict(zip(own, a.shape, strict=True))
    remaining = [own[d] for d in at.rows], [theirs[d] for d in at.columns]
    coordinates: dict[Dimension, Tensor] = {}
    for labels, positions in zip(remaining, (row, column), strict=True):
        coordinates |= zip(labels, unravel(positions, [sizes[label] for label in labels]), strict=True)
    layout = a.pattern.layout.with_room(len(result))
    shape = tuple(sizes[label] for label in result)
    return coalesce(layout, tuple(coordinates[label] for label in result), products, shape)


def sampled(x: Sparse, a: Dense, own: Own, b: Dense, theirs: Own, result: Own) -> Dense:
    """The products of dense factors where `x`, which has the result's dimensions, stores elements: in storage order."""
    contracted = [label for label in own if label not in result]
    rows, columns = ([label for label in result if label in labels] for labels in (own, theirs))
    left = matrix_of(a.like(a.filled(0)), among(own, rows), among(own, contracted))
    right = matrix_of(b.like(b.filled(0)), among(theirs, columns), among(theirs, contracted))
    coordinates = row_column(x, among(result, rows), among(result, columns))
    products = sddmm(left.data, right.data, coordinates)
    if a.validity is None and b.validity is None:
        return Dense(products)
    a_valid, b_valid = (as_int8(full_mask(m)).to(torch.float32) for m in (left, right))
    return Dense(products, as_int8(sddmm(a_valid, b_valid, coordinates) > 0.5))


# ------------------------------------------------------------------------------------------------------ kernels of sums

# Where torch has kernels for sums of rows and sampled products; elsewhere plain indexing is used, ten times as slow.
_KERNEL_DTYPES = (torch.float32, torch.float64)
_KERNEL_DEVICES = ("cpu", "cuda")


class RowColumn:
    """The coordinates of the stored elements of a matrix, and their order by row.

    row, column  of every stored element in storage order, int64 (stored,)
    rows         number of rows
    columns      number of columns
    in_order     whether elements are stored row by row
    ends         where rows start and end, if known (see :meth:`by_row`)
    """

    def __init__(
        self, row: Tensor, column: Tensor, rows: int, columns: int, *, in_order: bool, ends: Tensor | None = None
    ) -> None:
        # The coordinates in blocks of one row or column are expanded, and torch's kernels read contiguous memory.
        self.row, self.column = row.contiguous(), column.contiguous()
        self.rows, self.columns = rows, columns
        self._in_order = in_order
        self._ends = ends
        self._sorted: tuple[Tensor | None, Tensor] | None = None
        self._transposed: RowColumn | None = None

    @property
    def transposed(self) -> RowColumn:
        if self._transposed is None:
            self._transposed = RowColumn(self.column, self.row, self.columns, self.rows, in_order=False)
            self._transposed._transposed = self
        return self._transposed

    def by_row(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """The elements row by row.

        order    the permutation that sorts them by row; None if they are stored so
        columns  int64 (stored,), in that order
        ends     int64 (rows + 1,): where the elements of each row start and end, in that order
        """
        if self._sorted is None:
            order = None if self._in_order else self.row.argsort(stable=True)
            self._sorted = (order, self.column if order is None else self.column[order])
        if self._ends is None:
            counts = torch.zeros(self.rows + 1, dtype=torch.int64, device=self.row.device)
            self._ends = counts.scatter_add(0, self.row + 1, torch.ones_like(self.row)).cumsum(0)
        return (*self._sorted, self._ends)


def spmm(values: Tensor, dense: Tensor, coordinates: RowColumn) -> Tensor:
    """(rows, n) from values (stored,) and dense (columns, n) of one dtype; differentiable to any order."""
    if not _has_kernel(values, dense):
        sum_dtype = accumulation_dtype(values.dtype)
        terms = values.to(sum_dtype).unsqueeze(1) * dense.to(sum_dtype).index_select(0, coordinates.column)
        total = terms.new_zeros((coordinates.rows, dense.shape[1])).index_add(0, coordinates.row, terms)
        return total.to(values.dtype)
    return _Spmm.apply(values, dense, coordinates)


def sddmm(left: Tensor, right: Tensor, coordinates: RowColumn) -> Tensor:
    """(stored,) from left (rows, n) and right (columns, n) of one dtype; differentiable to any order."""
    if not _has_kernel(left, right):
        sum_dtype = accumulation_dtype(left.dtype)
        rows = left.to(sum_dtype).index_select(0, coordinates.row)
        terms = rows * right.to(sum_dtype).index_select(0, coordinates.column)
        return terms.sum(1).to(left.dtype)
    return _Sddmm.apply(left, right, coordinates)


def _has_kernel(*factors: Tensor) -> bool:
    supported = all(t.dtype in _KERNEL_DTYPES and t.device.type in _KERNEL_DEVICES for t in factors)
    return supported and computed_at_once(*factors)


class _Context(Protocol):
    """What both functions save: their factors, and the coordinates."""

    saved_tensors: tuple[Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]
    coordinates: RowColumn

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def save_for_forward(self, *tensors: Tensor) -> None: ...


class _Spmm(OwnFunction):
    @staticmethod
    def forward(ctx: _Context, values: Tensor, dense: Tensor, coordinates: RowColumn) -> Tensor:
        ctx.save_for_backward(values, dense)
        ctx.save_for_forward(values, dense)
        ctx.coordinates = coordinates
        if 0 in (values.shape[0], coordinates.rows, dense.shape[1]):
            return dense.new_zeros((coordinates.rows, dense.shape[1]))
        order, columns, ends = coordinates.by_row()
        # A weighted sum of embeddings is a product with a sparse matrix, and twice as fast as torch's own product.
        weights = values if order is None else values[order]
        return aten._embedding_bag_forward_only(
            dense.contiguous(), columns, ends, False, 0, False, weights.contiguous(), True
        )[0]

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        values, dense = ctx.saved_tensors
        values_grad = sddmm(grad, dense, ctx.coordinates) if ctx.needs_input_grad[0] else None
        dense_grad = spmm(values, grad, ctx.coordinates.transposed) if ctx.needs_input_grad[1] else None
        return values_grad, dense_grad, None

    @staticmethod
    def jvp(ctx: _Context, values_tangent: Tensor | None, dense_tangent: Tensor | None, _: None) -> Tensor:
        return _product_rule(spmm, values_tangent, dense_tangent, ctx)


class _Sddmm(OwnFunction):
    @staticmethod
    def forward(ctx: _Context, left: Tensor, right: Tensor, coordinates: RowColumn) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.save_for_forward(left, right)
        ctx.coordinates = coordinates
        stored = coordinates.row.shape[0]
        if 0 in (stored, coordinates.rows, coordinates.columns, left.shape[1]):
            return left.new_zeros(stored)
        # The gradient of the weighted sum of embeddings with respect to its weights; elements may be in any order.
        return aten._embedding_bag_per_sample_weights_backward(
            left.contiguous(), right.contiguous(), coordinates.column, coordinates.column[:1], coordinates.row, 0
        )

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        left, right = ctx.saved_tensors
        left_grad = spmm(grad, right, ctx.coordinates) if ctx.needs_input_grad[0] else None
        right_grad = spmm(grad, left, ctx.coordinates.transposed) if ctx.needs_input_grad[1] else None
        return left_grad, right_grad, None

    @staticmethod
    def jvp(ctx: _Context, left_tangent: Tensor | None, right_tangent: Tensor | None, _: None) -> Tensor:
        return _product_rule(sddmm, left_tangent, right_tangent, ctx)


def _product_rule(
    product: Callable[[Tensor, Tensor, RowColumn], Tensor],
    first_tangent: Tensor | None,
    second_tangent: Tensor | None,
    ctx: _Context,
) -> Tensor:
    """The tangent of a bilinear product: the tangent of each factor times the other factor."""
    first, second = ctx.saved_tensors
    terms = [product(first_tangent, second, ctx.coordinates)] if first_tangent is not None else []
    terms += [product(first, second_tangent, ctx.coordinates)] if second_tangent is not None else []
    return sum(terms[1:], terms[0])
