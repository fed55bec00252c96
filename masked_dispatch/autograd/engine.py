"""Gradients stored sparsely: of embedding tables, and the sums that the autograd engine makes.

A plain parameter's gradient is plain, except where torch's own would be sparse: that one is masked, and stores the rows
that were looked up (op_registry/sparse/lookup_gradient.py), or torch's own where DistributedDataParallel needs that.
Several backward calls leave their union in `.grad`: the autograd engine's sums are `accumulate`, including the in-place
sum into a masked `.grad` of a plain leaf. Any other masked gradient of a plain leaf becomes plain when the engine
stores it: zero where it is invalid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.autograd.dense import wrap_record
from masked_dispatch.autograd.reached import carried, carry, narrowed
from masked_dispatch.autograd.sparse import (
    aligned_values,
    in_stored_order,
    unwrap_any,
    wrap_any,
    wrap_sparse_record,
)
from masked_dispatch.distributed_internals import inside_data_parallel
from masked_dispatch.engine_internals import called_by_engine, engine_run, leaf_accumulated_into, let_older_vmap_return
from masked_dispatch.policies import check_allowed
from masked_dispatch.tensor.mask_sharing import shared_validity
from masked_dispatch.tensor.masked_tensor import MaskedTensor, wrap
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import under_transform
from op_registry.records.dense import Dense
from op_registry.records.fill import known_zero, remember_zero
from op_registry.records.sums import accumulate
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_int8, unite
from op_registry.sparse.coordinates import merge_duplicates, ravel, unravel
from op_registry.sparse.layout import COO, OF_TORCH
from op_registry.sparse.lookup_gradient import Wrapper, set_wrappers
from op_registry.sparse.permuted import AnyRecord, sum_of_any_order, to_dense
from op_registry.sparse.record import NotLowered, Pattern, Sparse


def of_torch_sparse(tensor: Tensor) -> Sparse:
    """The COO record of a torch.sparse tensor: specified elements are valid, duplicates are summed."""
    coo = tensor if tensor.is_sparse else tensor.to_sparse()
    indices, values = coo._indices(), coo._values()
    sizes = tuple(coo.shape[: coo.sparse_dim()])
    if not coo.is_coalesced():
        if len(sizes) == 1:
            unique, values = merge_duplicates(indices[0], values)
            indices = unique.unsqueeze(0)
        else:
            unique, values = merge_duplicates(ravel(tuple(indices), sizes), values)
            indices = torch.stack(unravel(unique, sizes))
    return Sparse(Dense(values), Pattern(COO, sizes, (indices,)))


def masked_record(tensor: Tensor) -> Dense | Sparse | None:
    """The record, without derivatives, of a masked or torch.sparse tensor; None for a plain one."""
    if is_plain(tensor):
        return None
    plain = tensor.detach()
    return in_stored_order("a gradient", plain, _record_of(plain))


def sum_of_gradients(x: Tensor, y: Tensor) -> Tensor:
    """The autograd engine's sum of two gradients of one tensor: valid where either is.

    Plain if either of them is: a plain one is valid everywhere, as a plain tensor's gradient has to be.
    """
    total, of_x, of_y = _sum_of_gradients(x, y), carried(x), carried(y)
    if of_x is None and of_y is None:
        return total
    if _pattern_of(x) is _pattern_of(y) is _pattern_of(total):
        return carry(total, unite(_met_by(x, of_x), _met_by(y, of_y)))
    if not isinstance(total, SparseMaskedTensor):
        return total  # of different storages: what it reached is not followed
    base = total._kept.copied()
    with torch.no_grad():
        parts = [wrap_any(narrowed(unwrap_any(grad), _met_by(grad, carried(grad)))) for grad in (x, y)]
        stored = Sparse(Dense(base.values, base.validity), base.pattern)
        return carry(total, aligned_values(_sum_of_gradients(*parts), stored, total._order)[1])


def _met_by(grad: Tensor, reached: Tensor | None) -> Tensor | None:
    """What a gradient reached, beside another that did not reach everything.

    One that says nothing may be that of a part, such as x[0], and is 0 elsewhere: it reached what isn't 0.
    """
    if reached is not None or grad.layout in OF_TORCH:
        return reached
    if isinstance(grad, MaskedTensor):
        return as_int8((grad._kept_values if isinstance(grad, SparseMaskedTensor) else grad._data) != 0)
    return as_int8(grad.detach() != 0)


def _pattern_of(grad: Tensor) -> object:
    return grad._pattern if isinstance(grad, SparseMaskedTensor) else None


def _sum_of_gradients(x: Tensor, y: Tensor) -> Tensor:
    if type(x) is MaskedTensor and type(y) is MaskedTensor and x._validity is y._validity and can_add_data(x, y):
        return sum_under_one_mask(x, y)
    if type(x) is SparseMaskedTensor and type(y) is SparseMaskedTensor and can_add_values(x, y):
        return x.storing(x._kept_values + y._kept_values, None, x._pattern)
    records = [_record_of(x), _record_of(y)]
    sparse = [record for record in records if not isinstance(record, Dense)]
    if len(sparse) == len(records):
        try:
            return wrap_sparse_record(sum_of_any_order(sparse))
        except NotLowered as reason:
            check_allowed("the sum of two gradients", [x, y], str(reason))
    total = accumulate([to_dense(record) for record in records])
    return total.data if any(is_plain(t) for t in (x, y)) else wrap_record(total)


def can_add_data(x: MaskedTensor, y: MaskedTensor) -> bool:
    """Whether their sum, as `accumulate` defines it, is that of their data, with no derivative to be recorded."""
    return (
        x.dtype is y.dtype
        and x.dtype in (torch.float32, torch.float64)
        and x.shape == y.shape
        and not (torch.is_grad_enabled() and (x.requires_grad or y.requires_grad))
        and not under_transform()
    )


def can_add_values(x: SparseMaskedTensor, y: SparseMaskedTensor) -> bool:
    """Whether their sum is that of the values that they store, all of them valid, with no derivative to be recorded."""
    return (
        x._pattern is y._pattern
        and x._order == y._order
        and x._kept_validity is None
        and y._kept_validity is None
        and x._kept_values.shape == y._kept_values.shape
        and can_add_data(x, y)
    )


def sum_under_one_mask(x: MaskedTensor, y: MaskedTensor) -> MaskedTensor:
    """The sum of the data, under the mask that both have."""
    validity = shared_validity(x)
    total = x._data + y._data
    if validity is not None and known_zero(x._data, validity) and known_zero(y._data, validity):
        remember_zero(total, validity)
    return wrap(total, validity)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is neither masked nor a torch.sparse tensor."""
    return not isinstance(tensor, MaskedTensor) and tensor.layout not in OF_TORCH


def _record_of(tensor: Tensor) -> AnyRecord:
    if isinstance(tensor, MaskedTensor):
        return unwrap_any(tensor)
    return Dense(tensor, None) if tensor.layout not in OF_TORCH else of_torch_sparse(tensor)


def accumulate_into(target: MaskedTensor, addend: Tensor) -> Tensor | None:
    """The sum of `target` and `addend`, if the engine is adding into the masked `.grad` of a plain leaf; else None."""
    leaf = leaf_accumulated_into()
    if leaf is None or isinstance(leaf, MaskedTensor):
        return None
    return sum_of_gradients(target, addend)


def reached_part(grad: Tensor) -> Tensor:
    """A gradient of a base in which the node of an in-place write replaces a view's part: masked with what it reached.

    The node calls operators on it, which move and write its mask. (In a graph, a write cannot change a mask's size.)
    """
    reached = carried(grad)
    if reached is None or being_traced(reached) or leaf_accumulated_into() is not None:
        return grad
    return wrap_any(narrowed(unwrap_any(grad), reached))


def needs_plain_gradient(grad: Tensor, depth: int) -> bool:
    """Whether the engine is about to store the masked `grad` as the `.grad` of a plain leaf.

    It calls the kernel `depth` frames above this function, which makes the tensor to be stored. Such a gradient comes
    from a backward that a user has written with masked tensors, or from masked roots of `torch.autograd.backward`.
    """
    if engine_run() < 0 or type(grad) is not MaskedTensor or not called_by_engine(depth + 1):
        return False
    leaf = leaf_accumulated_into()
    return leaf is not None and not isinstance(leaf, MaskedTensor) and leaf.layout is torch.strided


def wrapper_of_gradient(table: Tensor) -> Wrapper:
    """How the sparse gradient of an embedding table becomes a tensor: masked, except for a table inside
    DistributedDataParallel. There it becomes torch's sparse tensor, because the reducer takes no other and runs before
    a hook could convert it.
    """
    return torch_sparse_of if inside_data_parallel() and table.is_leaf else wrap_sparse_record


def torch_sparse_of(record: Sparse) -> Tensor:
    """torch's COO tensor of a record without invalid elements: it specifies what the record stores."""
    indices = record.pattern.pieces[0]
    shape = (*record.pattern.sizes, *record.values.shape[1:])
    return torch.sparse_coo_tensor(indices, record.values.data, shape, is_coalesced=True, check_invariants=False)


def _parts(batch: MaskedTensor) -> tuple[Tensor, Tensor | None]:
    return batch._data, batch._validity


def _whole(data: Tensor, validity: Tensor | None) -> MaskedTensor:
    return wrap(data, None if validity is None else validity.unsqueeze(0))


def install() -> None:
    """Called once, when the package is imported.

    * Embedding lookups produce masked gradients.
    * Batches of gradients (``is_grads_batched``, ``jacobian(vectorize=True)``) may be masked.
    """
    set_wrappers(wrapper_of_gradient)
    let_older_vmap_return(MaskedTensor, _parts, _whole)
