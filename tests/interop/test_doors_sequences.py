"""PackedSequence, nested tensors and torch.masked.MaskedTensor there and back, with gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import masked_dispatch as md
from door_samples import INTEGERS, batch_of, lengths, masked, same, shapes
from masked_dispatch import interop

RESTS = st.sampled_from([(), (2,), (2, 3)])


@given(lengths(least=1), RESTS, st.booleans(), st.integers(0, 2))
def test_packed_sequences_there_and_back(sizes: Tensor, rest: tuple[int, ...], batch_first: bool, more: int) -> None:
    steps = int(sizes.max()) + more
    x = batch_of(sizes, *rest, steps=steps)
    x = x if batch_first else x.transpose(0, 1)  # type: ignore[assignment]
    packed = interop.to_packed_sequence(x, batch_first)
    again = interop.from_packed_sequence(packed, batch_first, total_length=steps)
    same(again, x)
    twice = interop.to_packed_sequence(again, batch_first)
    assert torch.equal(twice.data, packed.data)
    assert torch.equal(twice.batch_sizes, packed.batch_sizes)
    assert torch.equal(twice.sorted_indices, packed.sorted_indices)


def test_packed_sequences_of_a_sorted_batch() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    x = interop.from_packed_sequence(packed)
    assert x.get_mask().tolist() == [[True, True], [True, True], [True, False]]
    assert interop.to_packed_sequence(x, enforce_sorted=True).sorted_indices is None


def test_gradients_of_packed_sequences() -> None:
    leaf = torch.arange(5.0, requires_grad=True)
    packed = pack_sequence([leaf[:2], leaf[2:]], enforce_sorted=False)
    (interop.from_packed_sequence(packed, batch_first=True) * torch.tensor([[2.0], [3.0]])).sum().backward()
    assert leaf.grad.tolist() == [2, 2, 3, 3, 3]
    x = batch_of(torch.tensor([1, 2])).requires_grad_()
    (interop.to_packed_sequence(x, batch_first=True).data * 4).sum().backward()
    same(x.grad, md.masked_tensor(torch.full((2, 2), 4.0, dtype=torch.float64), x.get_mask()))


def test_masked_values_of_a_packed_sequence_stay_invalid() -> None:
    holes = [md.masked_tensor([1.0, 2.0, 3.0], [True, False, True]), md.masked_tensor([4.0])]
    x = interop.from_packed_sequence(pack_sequence(holes), batch_first=True)
    assert x.get_mask().tolist() == [[True, False, True], [True, False, False]]


@given(lengths(), RESTS, st.integers(0, 2), st.booleans())
def test_nested_tensors_there_and_back(sizes: Tensor, rest: tuple[int, ...], more: int, packed: bool) -> None:
    steps = int(sizes.max()) + more
    x = batch_of(sizes, *rest, steps=steps)
    nested = interop.to_nested_tensor(x.to_packed() if packed and rest else x)
    assert nested.layout is torch.jagged
    assert [len(part) for part in nested.unbind()] == sizes.tolist()
    assert not nested.values().isnan().any()
    same(interop.from_nested_tensor(nested, total_length=steps), x)


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_of_either_layout(layout: torch.layout, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2, dtype=dtype), torch.ones(1, dtype=dtype)], layout=layout)
    same(interop.from_nested_tensor(nested), md.masked_tensor(torch.ones(2, 2, dtype=dtype), [[1, 1], [1, 0]]))


def test_gradients_of_nested_tensors() -> None:
    leaf = torch.arange(6.0).reshape(3, 2).requires_grad_()
    nested = torch.nested.nested_tensor_from_jagged(leaf * 1, torch.tensor([0, 2, 3]))
    (interop.from_nested_tensor(nested) * torch.tensor([2.0, 3.0]).view(2, 1, 1)).sum().backward()
    assert leaf.grad.tolist() == [[2, 2], [2, 2], [3, 3]]
    x = batch_of(torch.tensor([1, 2]), 2).requires_grad_()
    (interop.to_nested_tensor(x) * 4).values().sum().backward()
    same(x.grad, md.masked_tensor(torch.full((2, 2, 2), 4.0, dtype=torch.float64), x.get_mask()))


LEFT = batch_of(torch.tensor([1, 2])).flip(1)
EMPTY = batch_of(torch.tensor([2, 0]))
PARTLY = md.masked_tensor(torch.ones(1, 2, 2), [[[True, False], [True, True]]])


def nested_of(*shapes: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(shape) for shape in shapes])


@pytest.mark.parametrize(
    ("convert", "text"),
    [
        (lambda: interop.to_packed_sequence(LEFT, batch_first=True), "valid positions of row 0 are not its first 1"),
        (lambda: interop.to_packed_sequence(EMPTY, batch_first=True), r"sequence 1 has no valid .* x\[lengths > 0\]"),
        (lambda: interop.to_packed_sequence(EMPTY.t()), r"of length 0: leave it out of the batch, x\[:, lengths > 0\]"),
        (lambda: interop.to_packed_sequence(PARTLY, batch_first=True), "1 of 2 positions .* are partly valid"),
        (lambda: interop.to_packed_sequence(EMPTY[0]), r"shape \(2,\) is not a batch of sequences"),
        (lambda: interop.to_nested_tensor(LEFT), "valid positions of row 0 are not its first 1"),
        (lambda: interop.to_nested_tensor(PARTLY), "partly valid"),
        (
            lambda: interop.from_nested_tensor(nested_of((1, 2), (1, 3))),
            r"have shapes \[\(1, 2\), \(1, 3\)\]\.\.\..*Swap",
        ),
        (
            lambda: interop.from_nested_tensor(nested_of((2,), (3,)), total_length=2),
            "total_length=2 is less .* part, 3",
        ),
        (lambda: interop.from_nested_tensor(nested_of()), "a nested tensor without parts has no shape"),
    ],
)
def test_what_does_not_fit_is_refused(convert: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        convert()


def test_a_plain_tensor_is_not_nested() -> None:
    with pytest.raises(TypeError, match=r"shape \(2,\) is not nested: pass it to masked_tensor"):
        interop.from_nested_tensor(torch.ones(2))


# ------------------------------------------------------------------------------------------------------- torch.masked


@pytest.fixture
def prototype() -> Iterator[Any]:
    """torch.masked.masked_tensor, which warns at every use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch.masked.masked_tensor


@given(masked((torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64), shapes(2)))
def test_torch_masked_there_and_back(x: md.MaskedTensor) -> None:
    same(interop.from_torch_masked(interop.to_torch_masked(x)), x)


def test_layouts_of_torch_masked(prototype: Any) -> None:
    data, mask = torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([[True, True], [False, False]])
    expected = md.masked_tensor(data, mask)
    same(interop.from_torch_masked(prototype(data, mask)), expected)
    for layout in (torch.sparse_coo, torch.sparse_csr):
        stored = (torch.ones(2, 2) * mask).to_sparse(layout=layout)
        values = torch.sparse_coo_tensor([[0, 0], [0, 1]], [1.0, 0.0], (2, 2)).coalesce()
        values = (
            values if layout is torch.sparse_coo else torch.sparse_csr_tensor([0, 2, 2], [0, 1], [1.0, 0.0], (2, 2))
        )
        x = interop.from_torch_masked(
            prototype(values, stored.bool() if layout is torch.sparse_coo else to_bool(stored))
        )
        assert x.storage_layout is layout
        same(x, expected)


def to_bool(csr: Tensor) -> Tensor:
    return torch.sparse_csr_tensor(csr.crow_indices(), csr.col_indices(), csr.values().bool(), csr.shape)


def test_gradients_of_torch_masked(prototype: Any) -> None:
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    other = torch.masked.as_masked_tensor(leaf * 1, torch.tensor([True, False]))
    (interop.from_torch_masked(other) * 3).sum().backward()
    assert (leaf.grad.to_tensor(0) if hasattr(leaf.grad, "to_tensor") else leaf.grad).tolist() == [3, 0]
    x = md.masked_tensor([1.0, 2.0], [True, False], requires_grad=True)
    (interop.to_torch_masked(x) * 3).sum().backward()
    same(x.grad, md.masked_tensor([3.0, 0.0], [True, False]))


def test_only_tensors_of_torch_masked_are_taken() -> None:
    with pytest.raises(
        TypeError, match=r"takes a MaskedTensor of torch\.masked as tensor, not a Tensor: pass torch\.masked"
    ):
        interop.from_torch_masked(torch.ones(2))  # type: ignore[arg-type]


# ------------------------------------------------------------------ torch's own pack_padded_sequence, of padded batches


@pytest.mark.parametrize("stored", [lambda x: x, lambda x: x.to_packed()], ids=["dense", "packed"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_pack_padded_sequence_takes_the_lengths_of_a_batch(batch_first: bool, stored: Callable[[Any], Any]) -> None:
    sizes = torch.tensor([2, 4, 1])
    data = torch.arange(24.0).view(3, 4, 2)
    x = stored(md.from_lengths(data, sizes))
    x = x if batch_first else x.transpose(0, 1)
    packed = pack_padded_sequence(x, sizes, batch_first, enforce_sorted=False)
    expected = pack_sequence([d[:n] for d, n in zip(data, sizes, strict=True)], enforce_sorted=False)
    assert packed.data.get_mask().all()
    assert packed.data.to_tensor(0).equal(expected.data)
    assert packed.batch_sizes.equal(expected.batch_sizes)


def test_pack_padded_sequence_of_steps_that_are_not_there_is_refused() -> None:
    sizes = torch.tensor([2, 4, 1])
    x = md.from_lengths(torch.arange(24.0).view(3, 4, 2), sizes)
    in_front = md.padded(x.without_extent().flip(1), dim=1)
    missing = x.mask_with(x.get_data() != 2)
    packed = pack_padded_sequence(missing, torch.tensor([2, 3, 1]), True, enforce_sorted=False).data
    assert packed.get_mask().all(1).tolist() == [True, True, True, True, False, True]
    for batch, lengths_given in ((x, torch.tensor([3, 4, 1])), (in_front, sizes)):
        with pytest.raises(md.MaskedSemanticsError, match="have steps that are not there"):
            pack_padded_sequence(batch, lengths_given, True, enforce_sorted=False)
