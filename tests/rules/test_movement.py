"""Views, movement, indexing, assignment, scatters and joins on bare records, small enough to be checked by eye.

Elements are numbered from 1, so that a result tells by itself where each of its elements came from: what is numbered k
must be as valid as element k of the input, and a 0 is a zero that the operator wrote, valid.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from op_registry import MaskedSemanticsError, registry
from op_registry.authoring import Dense
from op_registry.records.dense import map_tensors
from op_registry.records.validity import as_bool

aten = torch.ops.aten
nan, inf = math.nan, math.inf
T, F = True, False


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    rule = registry.get(op)
    assert rule is not None, f"{op} has no rule"
    return rule.bind(op)(*args, **kwargs)


def plain(values: Any) -> Dense:
    return Dense(values if isinstance(values, Tensor) else tensor(values))


def masked(values: Any, mask: Any) -> Dense:
    return Dense(values if isinstance(values, Tensor) else tensor(values), tensor(mask).to(torch.int8))


def valid_of(x: Dense) -> Tensor:
    """The mask of a record in full, checking on the way that it is one."""
    if x.validity is None:
        return torch.ones(x.shape, dtype=torch.bool)
    assert x.validity.ndim <= x.ndim
    assert x.validity.dtype in (torch.int8, torch.bool)
    return as_bool(x.validity).expand(x.shape)


def shows(x: Dense, expected: Any) -> None:
    """`x` has the expected values, None standing for invalid."""

    def read(data: Any, valid: Any) -> Any:
        if isinstance(data, list):
            return [read(d, v) for d, v in zip(data, valid, strict=True)]
        return data if valid else None

    assert read(x.data.tolist(), valid_of(x).tolist()) == expected


def pieces(result: Any) -> list[Dense]:
    return [result] if isinstance(result, Dense) else list(result)


def mask_variants(shape: tuple[int, ...]) -> list[Tensor]:
    """A full mask, and masks that are broadcast in one dimension, and in all but one."""
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    full = torch.rand(shape, generator=generator) < 0.6
    variants = [full, torch.zeros(shape, dtype=torch.bool)]
    for d in range(len(shape)):
        variants.append(full.narrow(d, 0, min(1, shape[d])))
        only = full
        for other in set(range(len(shape))) - {d}:
            only = only.narrow(other, 0, min(1, shape[other]))
        variants.append(only)
    return [v.to(torch.int8) for v in variants]


MOVES: list[tuple[Any, tuple[int, ...], tuple[Any, ...]]] = [
    (aten.view.default, (2, 3, 4), ((6, 4),)),
    (aten.view.default, (2, 3, 4), ((2, 3, 2, 2),)),
    (aten.view.default, (2, 3, 4), ((2, -1),)),
    (aten.view.default, (2, 1, 4), ((1, 2, 4, 1),)),
    (aten.view.default, (2, 3, 4), ((4, 3, 2),)),
    (aten.view.default, (2, 0, 4), ((0, 8),)),
    (aten.view.default, (), ((1, 1),)),
    (aten._unsafe_view.default, (2, 3, 4), ((2, 12),)),
    (aten.view_copy.default, (2, 6), ((3, 4),)),
    (aten._reshape_alias.default, (2, 3, 4), ((6, 4), (4, 1))),
    (aten.expand.default, (3, 1), ((2, 3, 4),)),
    (aten.expand.default, (3, 1), ((-1, 4),)),
    (aten.expand_copy.default, (3, 1), ((3, 4),)),
    (aten.as_strided.default, (3, 4), ((2, 2), (4, 2))),
    (aten.as_strided.default, (3, 4), ((2, 2), (4, 2), 3)),
    (aten.permute.default, (2, 3, 4), ((2, 0, 1),)),
    (aten.permute.default, (2, 3, 4), ((-1, 0, 1),)),
    (aten.transpose.int, (2, 3, 4), (-1, 0)),
    (aten.transpose.int, (), (0, -1)),
    (aten.transpose_copy.int, (2, 3), (0, 1)),
    (aten.t.default, (2, 3), ()),
    (aten.t.default, (3,), ()),
    (aten.unsqueeze.default, (2, 3), (-1,)),
    (aten.unsqueeze.default, (), (0,)),
    (aten.squeeze.default, (1, 3, 1), ()),
    (aten.squeeze.dim, (1, 3, 1), (-1,)),
    (aten.squeeze.dim, (1, 3, 1), (1,)),
    (aten.squeeze.dim, (), (0,)),
    (aten.squeeze.dims, (1, 3, 1), ((0, 1),)),
    (aten.squeeze_copy.dims, (1, 3, 1), ((0, -1),)),
    (aten.select.int, (2, 3, 4), (1, -1)),
    (aten.select_copy.int, (2, 3), (-1, 0)),
    (aten.slice.Tensor, (5, 3), (0, 1, 4, 2)),
    (aten.slice.Tensor, (5, 3), (1, -2)),
    (aten.slice.Tensor, (5, 3), (0, 4, 2)),
    (aten.narrow_copy.default, (5, 3), (0, 1, 2)),
    (aten.split.Tensor, (5, 3), (2,)),
    (aten.split.Tensor, (5, 3), (2, -1)),
    (aten.unsafe_split.Tensor, (5, 3), (2,)),
    (aten.split_with_sizes.default, (5, 3), ([2, 0, 3],)),
    (aten.unsafe_split_with_sizes.default, (5, 3), ([1, 2], 1)),
    (aten.split_with_sizes_copy.default, (5, 3), ([1, 4],)),
    (aten.unbind.int, (2, 3), (1,)),
    (aten.unbind_copy.int, (2, 3), ()),
    (aten.diagonal.default, (3, 4), ()),
    (aten.diagonal.default, (3, 4, 2), (1, 1, -1)),
    (aten.diagonal.default, (3, 4), (-2,)),
    (aten.diagonal.default, (3, 4), (9,)),
    (aten.diagonal_copy.default, (3, 4), ()),
    (aten.unfold.default, (2, 7), (1, 3, 2)),
    (aten.unfold.default, (2, 7), (0, 1, 1)),
    (aten.unfold.default, (), (0, 1, 1)),
    (aten.unfold_copy.default, (7,), (0, 3, 2)),
    (aten.alias.default, (2, 3), ()),
    (aten.flip.default, (2, 3, 4), ((0, -1),)),
    (aten.rot90.default, (2, 3), ()),
    (aten.rot90.default, (2, 3, 4), (-1, (1, 2))),
    (aten.roll.default, (2, 5), ((2,),)),
    (aten.roll.default, (2, 5), ((2, -1), (1, 0))),
    (aten.repeat.default, (2, 3), ((2, 1, 3),)),
    (aten.repeat.default, (2, 3), ((0, 2),)),
    (aten.pixel_shuffle.default, (1, 8, 2, 3), (2,)),
    (aten.pixel_unshuffle.default, (1, 2, 4, 6), (2,)),
    (aten.channel_shuffle.default, (1, 4, 2, 2), (2,)),
    (aten.reflection_pad1d.default, (2, 5), ((2, 1),)),
    (aten.reflection_pad2d.default, (1, 3, 4), ((1, 1, 2, 0),)),
    (aten.replication_pad2d.default, (1, 3, 4), ((1, 1, 2, 0),)),
    (aten._pad_circular.default, (1, 2, 5), ((2, 1),)),
    (aten.tril.default, (3, 4), ()),
    (aten.triu.default, (2, 3, 4), (1,)),
    (aten.diag_embed.default, (2, 3), (1,)),
    (aten.constant_pad_nd.default, (2, 3), ((1, 0, 0, 2),)),
    (aten.constant_pad_nd.default, (3, 4), ((-1, 2, 0, 0),)),
    (aten.select_backward.default, (2, 4), ((2, 3, 4), 1, 2)),
    (aten.slice_backward.default, (2, 2), ((2, 5), 1, 0, 4, 2)),
    (aten.diagonal_backward.default, (3,), ((3, 4), 1, 0, 1)),
]


@pytest.mark.parametrize("op,shape,args", MOVES, ids=[f"{op}-{shape}-{args}" for op, shape, args in MOVES])
def test_an_element_moves_with_its_validity(op, shape, args):
    numbered = torch.arange(1, math.prod(shape) + 1).reshape(shape)
    expected = op(numbered, *args)
    assert all(p.validity is None for p in pieces(call(op, Dense(numbered), *args)))
    for mask in mask_variants(shape):
        origin_valid = torch.cat([torch.ones(1, dtype=torch.bool), mask.expand(shape).reshape(-1).bool()])
        results = pieces(call(op, Dense(numbered, mask), *args))
        assert len(results) == (1 if isinstance(expected, Tensor) else len(expected))
        for result, data in zip(results, [expected] if isinstance(expected, Tensor) else expected, strict=True):
            assert torch.equal(result.data, data)
            assert torch.equal(valid_of(result), origin_valid[data])


@pytest.mark.parametrize("op,shape,args", [m for m in MOVES if "_backward" not in str(m[0])][::3], ids=str)
def test_movement_has_the_gradient_of_what_is_valid(op, shape, args):
    if math.prod(shape) == 0:
        return
    for mask in mask_variants(shape)[:3]:
        grads = []
        for garbage in (nan, inf, 3.0):
            data = torch.randn(shape, generator=torch.Generator().manual_seed(1))
            data = torch.where(mask.bool(), data, garbage).requires_grad_()
            loss = sum(r.filled(0).sin().sum() for r in pieces(call(op, Dense(data, mask), *args)))
            (grad,) = torch.autograd.grad(loss, data)
            grads.append(torch.where(mask.bool(), grad, 0))
        assert grads[0].isfinite().all()
        assert torch.equal(grads[0], grads[1])
        assert torch.equal(grads[0], grads[2])


def test_a_mask_over_tokens_stays_small_on_its_way_through_attention():
    tokens = torch.tensor([[T, T, F], [T, F, F]]).unsqueeze(-1).to(torch.int8)
    x = Dense(torch.randn(2, 3, 8), tokens)
    heads = call(aten.view.default, x, (2, 3, 2, 4))
    assert heads.validity.shape == (2, 3, 1, 1)
    swapped = call(aten.transpose.int, heads, 1, 2)
    assert swapped.validity.shape == (2, 1, 3, 1)
    rows = call(aten.view.default, call(aten.expand.default, x, (2, 3, 8)), (6, 8))
    assert rows.validity.shape == (6, 1)
    q, k = call(aten.split.Tensor, x, 4, -1)
    assert q.validity is k.validity
    assert call(aten.cat.default, [q, k], -1).validity.shape == (2, 3, 1)
    assert call(aten.cat.default, [q, k], 1).validity.shape == (2, 6, 1)
    assert call(aten.stack.default, [q, k], 0).validity.shape == (1, 2, 3, 1)
    assert call(aten.index_select.default, x, -1, plain([0, 5])).validity.shape == (2, 3, 1)
    assert call(aten.index.Tensor, x, [plain([1, 0])]).validity.shape == (2, 3, 1)
    assert call(aten.constant_pad_nd.default, x, (0, 0, 1, 1)).validity.shape == (2, 5, 1)
    assert call(aten.repeat.default, x, (2, 1, 3)).validity.shape == (4, 3, 1)


def test_view_of_a_validity_with_other_strides_than_the_datas():
    data, mask = torch.arange(6).reshape(2, 3), torch.tensor([[T, F], [T, T], [F, T]]).to(torch.int8).t()
    shows(call(aten.view.default, Dense(data, mask), (6,)), [0, 1, None, None, 4, 5])


def test_parts_of_elements():
    z = masked(torch.tensor([1 + 2j, 3 + 4j]), [T, F])
    parts = call(aten.view_as_real.default, z)
    shows(parts, [[1, 2], [None, None]])
    both = call(aten.view_as_complex.default, masked(torch.ones(3, 2), [[T, T], [T, F], [F, F]]))
    shows(both, [1 + 1j, None, None])
    assert valid_of(call(aten._conj.default, z)).tolist() == [T, F]
    quarters = call(aten.view.dtype, masked(torch.zeros(2, dtype=torch.int32), [T, F]), torch.int8)
    assert valid_of(quarters).tolist() == [T] * 4 + [F] * 4
    assert valid_of(call(aten.view.dtype, quarters, torch.int32)).tolist() == [T, F]
    pairs = Dense(torch.zeros(4, dtype=torch.int16), tensor([T, T, T, F]))
    assert valid_of(call(aten.view.dtype, pairs, torch.float32)).tolist() == [T, F]
    same = call(aten.view.dtype, masked([1.0, 2.0], [T, F]), torch.int32)
    assert valid_of(same).tolist() == [T, F]


def test_as_strided_outside_of_what_is_known_is_refused():
    part = Dense(torch.arange(12).reshape(3, 4)[:, :2], torch.ones(3, 1, dtype=torch.int8))
    with pytest.raises(MaskedSemanticsError, match="may reach elements"):
        call(aten.as_strided.default, part, (2, 2), (4, 1))


def test_errors_are_torchs_own():
    x = masked(torch.ones(2, 3), [[T], [F]])
    for op, args, error in [
        (aten.select.int, (2, 0), IndexError),
        (aten.view.default, ((5,),), RuntimeError),
        (aten.flip.default, ((2,),), IndexError),
        (aten.index_select.default, (5, plain([0])), IndexError),
        (aten.gather.default, (0, plain([[2]])), (IndexError, RuntimeError)),
        (aten.split_with_sizes.default, ([1, 2], 0), RuntimeError),
        (aten.tril.default, (), None),
    ]:
        if error is None:
            with pytest.raises(RuntimeError, match="at least 2"):
                call(op, masked(torch.ones(2), [T, F]), *args)
        else:
            with pytest.raises(error):
                call(op, x, *args)


# ------------------------------------------------------------------------------------------------------ what is written


def test_zeros_and_padding_are_valid():
    x = masked([[1, 2], [3, 4]], [[F, F], [T, F]])
    shows(call(aten.tril.default, x), [[None, 0], [3, None]])
    shows(call(aten.constant_pad_nd.default, x, (1, 0), 7), [[7, None, None], [7, 3, None]])
    shows(call(aten.block_diag.default, [masked([1], [F]), plain([2])]), [[None, 0], [0, 2]])
    # 2×2 windows at stride 2 over [[0 0 0 0] [0 _ _ 0] [0 3 _ 0] [0 0 0 0]]: each holds one of the four.
    image = Dense(x.data.float()[None], x.validity[None])
    columns = call(aten.im2col.default, image, (2, 2), (1, 1), (1, 1), (2, 2))
    shows(columns, [[0, 0, 0, None], [0, 0, 3, 0], [0, None, 0, 0], [None, 0, 0, 0]])


def test_one_hot_and_repeats():
    shows(call(aten.one_hot.default, masked([1, 99, 0], [T, F, T])), [[0, 1], [None, None], [1, 0]])
    assert call(aten.repeat_interleave.Tensor, masked([2, -5, 1], [T, F, T])).tolist() == [0, 0, 2]
    with pytest.raises(MaskedSemanticsError, match="was given output_size=4"):
        call(aten.repeat_interleave.Tensor, masked([2, 1], [T, F]), output_size=4)


def test_fold_and_its_like_add_up_what_is_valid():
    windows = masked([[1.0, 2.0], [nan, 4.0], [nan, nan]], [[T, T], [F, T], [F, F]])
    shows(call(aten.unfold_backward.default, windows, (7,), 0, 2, 2), [1, 2, None, 4, None, None, 0])
    columns = masked([[[1.0, nan], [nan, 4.0]]], [[[T, F], [F, T]]])
    image = call(aten.col2im.default, columns, (1, 3), (1, 2), (1, 1), (0, 0), (1, 1))
    shows(image, [[[[1, None, 4]]]])


# --------------------------------------------------------------------------------------------------------------- index


def test_index_by_integers():
    x = masked([[1, 2, 3], [4, 5, 6]], [[T, F, T], [T, T, F]])
    shows(call(aten.index.Tensor, x, [plain([1, 0])]), [[4, 5, None], [1, None, 3]])
    shows(call(aten.index.Tensor, x, [None, masked([2, 10**9, 0], [T, F, T])]), [[3, None, 1], [None, None, 4]])
    shows(call(aten.index.Tensor, x, [plain([1, 1]), masked([1, -(10**9)], [T, F])]), [5, None])
    shows(call(aten.index.Tensor, plain([1, 2, 3]), [masked([[0], [9]], [[T], [F]])]), [[1], [None]])
    rows = Dense(x.data, tensor([[T], [F]]))
    shows(call(aten.index.Tensor, rows, [None, plain([0, 2])]), [[1, 3], [None, None]])
    shows(call(aten.index.Tensor, rows, [plain([1, 0])]), [[None] * 3, [1, 2, 3]])


def test_index_places_the_indices_validity_where_torch_places_the_indices():
    x = plain(torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5))
    a, b = masked([[0], [7]], [[T], [F]]), masked([1, 2, 9], [T, T, F])
    for indices in ([None, a, b], [a, None, b], [None, a, None, b], [a, b], [None, None, a, b]):
        result = call(aten.index.Tensor, x, indices)
        spots = [None if i is None else i.filled(0) for i in indices]
        # The same index applied to numbered elements of a mask that is invalid at one place only shows where it went.
        dims = [k for k, i in enumerate(indices) if i is not None]
        expected = torch.zeros_like(aten.index(x.data, spots), dtype=torch.bool)
        valid = a.valid & b.valid
        front = dims[0] if dims[1] == dims[0] + 1 else 0
        expected = expected | valid.reshape(valid.shape + (1,) * (expected.ndim - front - 2))
        assert torch.equal(valid_of(result), expected)


def test_index_by_a_mask():
    x = masked([1, 2, 3, 4], [T, F, T, T])
    shows(call(aten.index.Tensor, x, [plain([T, T, F, T])]), [1, None, 4])
    shows(call(aten.index.Tensor, x, [masked([T, T, T, T], [T, F, F, T])]), [1, 4])
    shows(call(aten.masked_select.default, x, masked([T, T, T, T], [T, T, F, T])), [1, None, 4])
    rows = Dense(torch.tensor([[1, 2], [3, 4]]), tensor([[T], [F]]))
    shows(call(aten.masked_select.default, rows, plain([T, F])), [1, None])
    shows(call(aten.index.Tensor, rows, [plain([[T, F], [F, T]])]), [1, None])
    shows(call(aten.index.Tensor, rows, [plain([T, T]), masked([0, 8], [T, F])]), [1, None])


def test_index_select_gather_take():
    x = masked([[1, 2, 3], [4, 5, 6]], [[T, F, T], [T, T, F]])
    shows(call(aten.index_select.default, x, 1, masked([2, 77, 0], [T, F, T])), [[3, None, 1], [None, None, 4]])
    shows(call(aten.gather.default, x, 1, masked([[0, 5], [1, 2]], [[T, F], [T, T]])), [[1, None], [5, None]])
    columns = Dense(x.data, tensor([[T, F, T]]))
    shows(call(aten.gather.default, columns, 0, plain([[1, 1]])), [[4, None]])
    shows(call(aten.gather.default, columns, 1, plain([[1], [2]])), [[None], [6]])
    shows(call(aten.take.default, x, masked([5, 0, -1, 99], [T, T, T, F])), [None, 1, None, None])
    shows(call(aten.index_select.default, masked(3.0, F), 0, plain([0])), None)
    shows(call(aten.gather.default, masked(3.0, T), 0, masked([9], [F])), [None])


def test_an_index_that_is_valid_and_out_of_range_still_raises():
    x, index = plain([1.0, 2.0, 3.0]), masked([3, 9], [T, F])
    values = plain([5.0, 6.0])
    for op, args in [
        (aten.index.Tensor, ([index],)),
        (aten.index_put.default, ([index], values)),
        (aten.index_select.default, (0, index)),
        (aten.index_copy.default, (0, index, values)),
        (aten.index_fill.int_Scalar, (0, index, 1.0)),
        (aten.index_add.default, (0, index, values)),
        (aten.index_reduce.default, (0, index, values, "amax")),
        (aten.gather.default, (0, index)),
        (aten.scatter.src, (0, index, values)),
        (aten.scatter_add.default, (0, index, values)),
        (aten.scatter_reduce.two, (0, index, values, "prod")),
        (aten.put.default, (index, values)),
    ]:
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)|index"):
            call(op, x, *args)


def test_the_pieces_that_torchs_decompositions_use():
    x, at = masked([1, 2, 3], [T, F, T]), masked([0, 1, 99, 2], [T, T, F, T])
    chosen = masked([T, F, F, T], [T, T, T, F])
    shows(call(aten._unsafe_masked_index.default, x, chosen, [at], 7), [1, 7, 7, None])
    shows(call(aten._unsafe_masked_index.default, x, plain([T, T, T, F]), [at], 7), [1, None, None, 7])
    added = call(aten._unsafe_masked_index_put_accumulate.default, x, chosen, [at], plain([10, 20, 30, 40]))
    shows(added, [11, None, 3])
    added = call(
        aten._unsafe_masked_index_put_accumulate.default, x, plain([F, T, T, T]), [at], plain([10, 20, 30, 40])
    )
    shows(added, [1, 20, 43])
    put = call(aten._index_put_impl.default, x, [plain([0, 1])], masked([8, 9], [F, T]), False, True)
    shows(put, [None, 9, 3])
    joined = call(aten._chunk_cat.default, [masked([1, 2, 3], [T, F, T]), plain([4])], 0, 2)
    shows(joined, [[1, None, 4], [3, 0, 0]])


# ---------------------------------------------------------------------------------------------------------- assignment


def test_assignment_writes_value_and_validity():
    x = masked([1, 2, 3, 4], [T, F, T, F])
    shows(call(aten.index_put.default, x, [plain([0, 1])], masked([10, 20], [F, T])), [None, 20, 3, None])
    shows(call(aten.index_put.default, x, [plain([-1])], plain(9)), [1, None, 3, 9])
    shows(call(aten.index_put.default, x, [masked([0, 99, -1], [T, F, T])], plain([7, 8, 9])), [7, None, 3, 9])
    shows(call(aten.index_put.default, x, [masked([T, T, T, T], [T, T, F, F])], plain(0)), [0, 0, 3, None])
    shows(call(aten.index_put.default, plain([1, 2, 3]), [plain([0, 1])], masked([8, 9], [T, F])), [8, None, 3])
    shows(call(aten.index_copy.default, x, 0, masked([3, 50], [T, F]), masked([7, 8], [T, T])), [1, None, 3, 7])
    shows(call(aten.put.default, x, masked([[3], [50]], [[T], [F]]), plain([[7], [8]])), [1, None, 3, 7])
    shows(call(aten.scatter.src, x, 0, masked([3, 50], [T, F]), masked([7, 8, 9], [F, T, T])), [1, None, 3, None])
    shows(call(aten.scatter.value, x, 0, masked([3, 50], [T, F]), 7), [1, None, 3, 7])
    shows(call(aten.select_scatter.default, x, masked(5, F), 0, 0), [None, None, 3, None])
    shows(call(aten.slice_scatter.default, x, plain([5, 6]), 0, 1, 3), [1, 5, 6, None])
    shows(call(aten.slice_scatter.default, plain([1, 2, 3]), masked([5, 6], [F, T]), 0, 1, 3), [1, None, 6])
    shows(call(aten.as_strided_scatter.default, x, masked([5, 6], [T, F]), (2,), (2,), 1), [1, 5, 3, None])
    shows(call(aten.copy.default, x, masked([5.0], [T])), [5, 5, 5, 5])
    shows(call(aten.copy.default, plain([1, 2]), masked([5, 6], [T, F])), [5, None])
    square = masked([[1, 2], [3, 4]], [[F, F], [F, F]])
    shows(call(aten.diagonal_scatter.default, square, plain([5, 6])), [[5, None], [None, 6]])


def test_index_put_with_several_indices_and_rows():
    x = Dense(torch.zeros(2, 3, dtype=torch.int64), tensor([[F], [T]]))
    put = call(aten.index_put.default, x, [plain([0, 1]), masked([-1, 5], [T, F])], plain([7, 8]))
    shows(put, [[None, None, 7], [0, 0, 0]])
    put = call(aten.index_put.default, x, [None, masked([1, 5], [T, F])], plain([7, 8]))
    shows(put, [[None, 7, None], [0, 7, 0]])
    put = call(aten.index_put.default, x, [plain([T, F]), masked([1], [F])], plain(7))
    shows(put, [[None, None, None], [0, 0, 0]])


def test_index_fill_is_elementwise():
    x = masked([1, 2, 3, 4], [T, F, T, T])
    shows(call(aten.index_fill.int_Scalar, x, 0, masked([0, 1, 50], [T, T, F]), 9), [9, None, 3, 4])
    shows(call(aten.index_fill.int_Scalar, x, 0, masked([-1, 50], [T, F]), 9), [1, None, 3, 9])
    shows(call(aten.index_fill.int_Tensor, x, 0, plain([0, 1]), masked(9, F)), [None, None, 3, 4])
    shows(
        call(aten.index_fill.int_Tensor, x, 0, plain([]).like(torch.tensor([], dtype=torch.long)), masked(9, F)),
        [1, None, 3, 4],
    )
    rows = Dense(torch.zeros(2, 2), tensor([[T], [F]]))
    shows(call(aten.index_fill.int_Tensor, rows, 1, plain([0]), masked(9.0, F)), [[None, 0], [None, None]])


def test_masked_scatter_is_opaque():
    x, source = masked([1, 2], [T, F]), plain([3, 4])
    with pytest.raises(MaskedSemanticsError):
        call(aten.masked_scatter.default, x, plain([T, T]), source)
    shows(call(aten.masked_scatter.default, masked([1, 2], [T, T]), plain([F, T]), source), [1, 3])


# -------------------------------------------------------------------------------------------------------- accumulation


def test_accumulation_by_index():
    x = masked([1.0, nan, nan, 4.0], [T, F, F, T])
    source = masked([10.0, nan, 30.0, nan], [T, F, T, F])
    at = plain([0, 0, 1, 2])
    for op, args in [
        (aten.scatter_add.default, (0, at, source)),
        (aten.scatter.reduce, (0, at, source)),
        (aten.index_add.default, (0, at, source)),
        (aten.scatter_reduce.two, (0, at, source, "sum")),
        (aten.index_put.default, ([at], source, True)),
        (aten.put.default, (at, source, True)),
    ]:
        extra = {"reduce": "add"} if op is aten.scatter.reduce else {}
        shows(call(op, x, *args, **extra), [11, 30, None, 4])
    shows(call(aten.index_add.default, x, 0, masked([0, 99], [T, F]), plain([5.0, nan]), alpha=2), [11, None, None, 4])
    shows(call(aten.scatter_add.default, x, 0, masked([0, 99], [T, F]), plain([5.0, nan, 1.0])), [6, None, None, 4])
    shows(call(aten.index_put.default, x, [masked([1, 99], [T, F])], plain([5.0, nan]), True), [1, 5, None, 4])
    shows(call(aten.scatter.value_reduce, x, 0, masked([0, 99], [T, F]), 3.0, reduce="multiply"), [3, None, None, 4])
    everywhere = call(aten.scatter_add.default, plain([1.0, 2.0]), 0, plain([0, 0]), masked([nan, 5.0], [F, T]))
    assert everywhere.validity is None
    shows(everywhere, [6, 2])


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
def test_reductions_by_index_against_a_loop(reduce, include_self, dtype):
    generator = torch.Generator().manual_seed(3)
    rows, columns, n = 4, 3, 6
    for self_mask in (torch.rand(rows, columns, generator=generator) < 0.5, torch.zeros(rows, 1).bool(), None):
        x = Dense(torch.randint(-3, 4, (rows, columns), generator=generator).to(dtype), self_mask)
        src = Dense(
            torch.randint(-3, 4, (n, columns), generator=generator).to(dtype),
            torch.rand(n, 1 if self_mask is None else columns, generator=generator) < 0.6,
        )
        index = Dense(torch.randint(0, rows, (n, columns), generator=generator), torch.rand(n, columns) < 0.8)
        line = Dense(index.data[:, 0].clone(), index.valid[:, 0].clone())
        for by_line in (False, True):
            if by_line and reduce == "sum":
                continue
            op = aten.index_reduce.default if by_line else aten.scatter_reduce.two
            result = call(op, x, 0, line if by_line else index, src, reduce, include_self=include_self)
            for r in range(rows):
                for c in range(columns):
                    given = [
                        src.data[k, c]
                        for k in range(n)
                        if (
                            line.valid[k] and line.data[k] == r
                            if by_line
                            else index.valid[k, c] and index.data[k, c] == r
                        )
                        and valid_of(src)[k, c]
                    ]
                    own = bool(valid_of(x)[r, c])
                    assert bool(valid_of(result)[r, c]) == (own or bool(given))
                    if not given:
                        if own:
                            assert result.data[r, c] == x.data[r, c]
                        continue
                    start = x.data[r : r + 1, c] if own and include_self else x.data[:0, 0]
                    parts = torch.stack(given)
                    first = start if len(start) else parts[:1]
                    rest = parts if len(start) else parts[1:]
                    expected = torch.scatter_reduce(
                        first, 0, torch.zeros(len(rest), dtype=torch.long), rest, reduce, include_self=True
                    )
                    torch.testing.assert_close(result.data[r : r + 1, c], expected)


def test_segments():
    x, lengths = masked([1.0, nan, nan, 4.0, nan], [T, F, F, T, F]), plain([3, 0, 1, 1])
    for reduce, empty in (("sum", 0), ("prod", 1), ("max", -inf), ("min", inf)):
        shows(call(aten.segment_reduce.default, x, reduce, lengths=lengths), [1, empty, 4, None])
    mean = call(aten.segment_reduce.default, x, "mean", lengths=lengths)
    assert valid_of(mean).tolist() == [T, T, T, F]
    assert mean.data[1].isnan()
    shows(call(aten.segment_reduce.default, x, "mean", lengths=lengths, initial=2.0), [3, 2, 6, 2])
    with pytest.raises(MaskedSemanticsError, match="lengths of shape"):
        call(aten.segment_reduce.default, x, "sum", lengths=masked([4, 1], [T, F]))


def test_max_unpool():
    x = masked([[[[1.0, nan]]]], [[[[T, F]]]])
    shows(call(aten.max_unpool2d.default, x, plain([[[[3, 0]]]]), (2, 2)), [[[[None, 0], [0, 1]]]])
    at = masked([[[[3, 10**9]]]], [[[[T, F]]]])
    shows(call(aten.max_unpool2d.default, x, at, (2, 2)), [[[[0, 0], [0, 1]]]])


# --------------------------------------------------------------------------------------------------------------- joins


def test_cat_and_stack():
    a, b = masked([1, 2], [T, F]), plain([3])
    shows(call(aten.cat.default, [a, b]), [1, None, 3])
    shows(call(aten.stack.default, [a, plain([5, 6])], 1), [[1, 5], [None, 6]])
    empty = Dense(torch.tensor([]))
    shows(call(aten.cat.default, [empty, masked([[1.0, 2.0]], [[T, F]])], -1), [[1, None]])
    rows, columns = Dense(torch.ones(2, 2), tensor([[T], [F]])), Dense(torch.ones(2, 2), tensor([[T, F]]))
    shows(call(aten.cat.default, [rows, columns], 1), [[1, 1, 1, None], [None, None, 1, None]])
    assert call(aten.cat.default, [b, b]).validity is None


def test_where_takes_validity_from_the_chosen_branch():
    condition = masked([T, T, F, F, T], [T, T, T, T, F])
    a = masked([1.0, nan, 3.0, nan, 5.0], [T, F, T, F, T])
    b = masked([nan, 20.0, nan, 40.0, 50.0], [F, T, F, T, T])
    shows(call(aten.where.self, condition, a, b), [1, None, None, 40, None])
    shows(call(aten.where.self, plain([T, F, T, F, T]), a, plain(0.0)), [1, 0, 3, 0, 5])
    rows = Dense(torch.ones(2, 3), tensor([[T], [F]]))
    shows(call(aten.where.self, plain([T, F, T]), rows, plain(0.0)), [[1, 0, 1], [None, 0, None]])


# ----------------------------------------------------------------------------------------------------------- gradients

x_mask = tensor([[T, F, T], [F, F, T], [T, T, T], [F, T, F]])
s_mask = tensor([[T, T, F], [F, T, T]])
at = tensor([[0, 1, 2], [0, 1, 3]])
at_mask = tensor([[T, T, T], [T, F, T]])
line = Dense(tensor([2, 0]), tensor([T, T]))
broken_line = Dense(tensor([2, 77]), tensor([T, F]))

DIFFERENTIABLE: dict[str, Any] = {
    "index_put": lambda x, s: call(aten.index_put.default, x, [broken_line], s),
    "index_put-accumulate": lambda x, s: call(aten.index_put.default, x, [line], s, True),
    "index_copy": lambda x, s: call(aten.index_copy.default, x, 0, broken_line, s),
    "index_add": lambda x, s: call(aten.index_add.default, x, 0, broken_line, s, alpha=2),
    "scatter": lambda x, s: call(aten.scatter.src, x, 0, Dense(at, at_mask), s),
    "scatter_add": lambda x, s: call(aten.scatter_add.default, x, 0, Dense(at, at_mask), s),
    "put": lambda x, s: call(aten.put.default, x, Dense(at, at_mask), s, True),
    "select_scatter": lambda x, s: call(aten.select_scatter.default, x, call(aten.select.int, s, 0, 1), 0, 2),
    "slice_scatter": lambda x, s: call(aten.slice_scatter.default, x, s, 0, 1, 3),
    "cat": lambda x, s: call(aten.cat.default, [x, s, x]),
    "copy": lambda x, s: call(aten.copy.default, x, call(aten.select.int, s, 0, 0)),
    "where": lambda x, s: call(aten.where.self, plain([[T], [F], [T], [F]]), x, call(aten.select.int, s, 0, 0)),
    "gather": lambda x, s: call(aten.gather.default, x, 0, Dense(at, at_mask)),
    "index": lambda x, s: call(aten.index.Tensor, x, [broken_line, plain([0, 2])]),
    "masked_select": lambda x, s: call(aten.masked_select.default, x, plain([T, F, T])),
    "unfold_backward": lambda x, s: call(aten.unfold_backward.default, x, (6,), 0, 3, 1),
    "prod": lambda x, s: call(aten.scatter_reduce.two, x, 0, Dense(at, at_mask), s, "prod"),
    "mean": lambda x, s: call(aten.scatter_reduce.two, x, 0, Dense(at, at_mask), s, "mean"),
    "mean-without-self": lambda x, s: call(
        aten.scatter_reduce.two, x, 0, Dense(at, at_mask), s, "mean", include_self=False
    ),
    "amax": lambda x, s: call(aten.scatter_reduce.two, x, 0, Dense(at, at_mask), s, "amax"),
    "index_reduce": lambda x, s: call(aten.index_reduce.default, x, 0, broken_line, s, "amin"),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_exact_and_blind_to_what_is_hidden(name):
    f = DIFFERENTIABLE[name]
    generator = torch.Generator().manual_seed(5)
    x0 = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    s0 = torch.randn(2, 3, generator=generator, dtype=torch.float64)

    def loss(x: Tensor, s: Tensor, garbage: float) -> Tensor:
        # What the tensor does at its boundary: the gradient is masked, what lies under the mask is anything.
        hidden_x = torch.where(x_mask, x, torch.full_like(x, garbage))
        hidden_s = torch.where(s_mask, s, torch.full_like(s, garbage))
        out = f(Dense(hidden_x, x_mask.to(torch.int8)), Dense(hidden_s, s_mask.to(torch.int8)))
        return (out.filled(0.5) ** 3).sum()

    x, s = x0.clone().requires_grad_(), s0.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, s: loss(x, s, nan), (x, s))
    assert torch.autograd.gradgradcheck(lambda x, s: loss(x, s, nan), (x, s))
    seen = []
    for garbage in (nan, inf, -1e38, 2.0):
        # The gradient at the stored data itself: plain operands and valid elements get the same, bit for bit.
        data = torch.where(x_mask, x0, garbage).requires_grad_()
        source = torch.where(s_mask, s0, garbage).requires_grad_()
        value = (f(Dense(data, x_mask), Dense(source, s_mask)).filled(0.5) ** 3).sum()
        grads = torch.autograd.grad(value, (data, source), allow_unused=True, materialize_grads=True)
        seen.append([value, torch.where(x_mask, grads[0], 0), torch.where(s_mask, grads[1], 0)])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))
    assert all(t.isfinite().all() for t in map_tensors(lambda t: t, seen[0], Tensor))


@pytest.mark.parametrize("name", ["index_put", "scatter_add", "cat", "where", "gather", "mean"])
def test_forward_mode_and_vmap(name):
    f = DIFFERENTIABLE[name]
    x, s = torch.randn(4, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)

    def run(x: Tensor, s: Tensor) -> Tensor:
        return f(Dense(x, x_mask.to(torch.int8)), Dense(s, s_mask.to(torch.int8))).filled(0)

    if name != "mean":
        _, tangent = torch.func.jvp(run, (x, s), (torch.ones_like(x), torch.ones_like(s)))
        assert torch.equal(tangent, torch.func.jvp(run, (x + 1, s + 1), (torch.ones_like(x), torch.ones_like(s)))[1])
    batched = torch.func.vmap(run)(torch.stack([x, x + 1]), torch.stack([s, s + 1]))
    torch.testing.assert_close(batched[1], run(x + 1, s + 1))


def test_without_a_mask_it_is_the_operator_itself():
    x = torch.randn(3, 3)
    for op, args in [
        (aten.scatter_reduce.two, (0, plain([[0, 1, 2]]), plain(torch.ones(1, 3)), "prod")),
        (aten.index_put.default, ([plain([1])], plain(torch.ones(3)))),
        (aten.index_add.default, (0, plain([1]), plain(torch.ones(1, 3)))),
        (aten.where.self, ()),
    ]:
        records = (plain(x > 0), plain(x), plain(x + 1)) if op is aten.where.self else (plain(x), *args)
        result = call(op, *records)
        assert result.validity is None
        unwrapped = map_tensors(lambda r: r.data, list(records), Dense)
        assert torch.equal(result.data, op(*unwrapped))


def test_conjugate_views_are_filled():
    z = call(aten._conj.default, masked(torch.tensor([1 + 2j, 3 + 4j]), [T, F]))
    assert z.data.is_conj()
    assert z.filled(0).tolist() == [1 - 2j, 0]
    imaginary = z.like(z.data.imag)
    assert imaginary.data.is_neg()
    assert imaginary.filled(0).tolist() == [-2, 0]
