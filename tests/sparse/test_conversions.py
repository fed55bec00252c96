"""Conversions: chunk by chunk, of other orders of dimensions, of blocks and of tensors of one dimension or none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from op_registry.records.dense import Dense
from op_registry.sparse import compaction
from op_registry.sparse.convert import from_dense, to_dense, to_layout
from op_registry.sparse.layout import BSC, BSR, COO, CSC, CSR, Layout
from op_registry.sparse.record import Sparse
from storages import STORAGES, F, T, permuted, sample, state

LAYOUTS = (COO, CSR, CSC, BSR, BSC)
# shape, sparse dimensions
SHAPES = [
    ((16, 24), 2), ((3, 8, 24), 3), ((16, 24, 3), 2), ((2, 4, 6, 3), 3), ((2, 3, 4, 6), 4), ((50,), 1), ((7, 3), 1),
    ((0, 6), 2), ((4, 0), 2), ((0, 4, 6), 3), ((2, 0, 6), 3), ((4, 6, 0), 2),
]  # fmt: skip
VALID = [0.0, 0.03, 0.4, 0.95, 1.0]
CHUNKS = [7, 64, 2**17]


def block_of(layout: Layout) -> tuple[int, int] | None:
    return (2, 3) if layout.blocks else None


def fits(layout: Layout, dims: int) -> bool:
    """Every layout but COO is one of matrices."""
    return dims > 1 or layout is COO


# Each shape in two layouts, each layout with shapes of every kind.
CASES = [
    (layout, *shape)
    for n, shape in enumerate(SHAPES)
    for layout in ((LAYOUTS[n % 5], LAYOUTS[(n + 1) % 5]) if fits(CSR, shape[1]) else (COO,))
]


def some_record(shape: tuple[int, ...], valid: float) -> Dense:
    generator = torch.Generator().manual_seed(5)
    data = torch.randn(shape, generator=generator)
    validity = torch.rand(shape, generator=generator) < valid
    return Dense(torch.where(validity, data, torch.nan), validity.to(torch.int8))


def same(a: Sparse, b: Sparse) -> None:
    assert (a.pattern.layout, a.pattern.sizes, a.pattern.block) == (b.pattern.layout, b.pattern.sizes, b.pattern.block)
    for mine, other in zip(a.pattern.pieces, b.pattern.pieces, strict=True):
        assert mine.dtype is other.dtype
        assert torch.equal(mine, other)
    assert torch.equal(a.values.data.nan_to_num(7), b.values.data.nan_to_num(7))
    assert (a.values.validity is None) == (b.values.validity is None)
    if a.values.validity is not None:
        assert torch.equal(a.values.validity, b.values.validity)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Several threads find positions by torch's nonzero."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def chunked(monkeypatch) -> Callable[[int], None]:
    def set_to(chunk: int) -> None:
        monkeypatch.setattr(compaction, "SMALL", -1)
        monkeypatch.setattr(compaction, "CHUNK", chunk)
        monkeypatch.setattr(compaction, "LARGE_CHUNK", chunk)

    return set_to


@pytest.mark.parametrize(("layout", "shape", "dims"), CASES, ids=str)
def test_chunks_give_what_nonzero_gives(layout, shape, dims, chunked, threads):
    arguments = (layout, dims, block_of(layout))
    records = [some_record(shape, valid) for valid in VALID]
    data = records[2].data
    records.append(Dense(data, None))
    if data.numel():
        records.append(Dense(data, some_record(shape, 0.5).validity[..., :1]))  # broadcast
    turn = list(range(dims))[::-1] + list(range(dims, len(shape)))
    if block_of(layout) is None:
        records.append(records[2].map(lambda t: t.permute(turn)))  # of other strides
    expected = [from_dense(record, *arguments) for record in records]
    for count, chunk in zip((1, 1, 4), CHUNKS, strict=True):
        threads(count)
        chunked(chunk)
        for record, wanted in zip(records, expected, strict=True):
            same(from_dense(record, *arguments), wanted)


def test_few_elements_of_a_batch_by_column(chunked):
    """So few that they are collected by row, then sorted by column."""
    mask = torch.zeros(2, 16, 24, dtype=torch.bool)
    mask[0, 3, 20], mask[0, 9, 1], mask[1, 2, 20] = True, True, True
    x = Dense(torch.arange(2 * 16 * 24.0).reshape(mask.shape), mask.to(torch.int8))
    chunked(7)
    found = to_dense(from_dense(x, CSC, 3, None))
    assert torch.equal(found.filled(0), x.filled(0))
    assert torch.equal(found.validity, x.validity)


@pytest.mark.parametrize(
    ("layout", "shape", "dims"), [(layout, *SHAPES[n % 4]) for n, layout in enumerate(LAYOUTS)], ids=str
)
def test_chunks_are_differentiable(layout, shape, dims, chunked):
    x = some_record(shape, 0.4)
    data = x.data.nan_to_num(7).double().requires_grad_()

    def values(data: Tensor) -> Tensor:
        return from_dense(Dense(data, x.validity), layout, dims, block_of(layout)).values.data

    weight = torch.randn_like(values(data)).requires_grad_()
    (expected,) = torch.autograd.grad((values(data) * weight).sum(), data)
    chunked(64)
    (found,) = torch.autograd.grad((values(data) * weight).sum(), data, create_graph=True)
    assert torch.equal(found, expected)
    direction = torch.randn_like(data)
    (second,) = torch.autograd.grad((found * direction).sum(), weight)
    assert torch.equal(second, values(direction))


DTYPES = [torch.bool, torch.uint8, torch.uint16, torch.uint64, torch.float16, torch.bfloat16, torch.float8_e5m2,
          torch.complex64, torch.complex128]  # fmt: skip


@pytest.mark.parametrize(("dtype", "layout"), zip(DTYPES, itertools.cycle(LAYOUTS), strict=False), ids=str)
def test_every_dtype_moves(layout, dtype, chunked):
    data = torch.arange(24).reshape(4, 6).to(dtype)
    validity = (torch.arange(24).reshape(4, 6) % 3 > 0).to(torch.int8)
    chunked(7)
    x = from_dense(Dense(data, validity), layout, 2, block_of(layout))
    assert x.dtype is dtype
    dense = to_dense(x)
    assert torch.equal(dense.validity, validity)
    assert torch.equal(dense.filled(0).to(torch.complex128), (data.to(torch.complex128) * validity))


@pytest.mark.parametrize(
    ("n", "every"),
    [(1, 1), (1, 2), (7, 1), (7, 2), (8, 1), (8, 17), (64, 2), (64, 17), (64, 10**6), (4096, 1), (4096, 100)],
)
def test_positions(n, every):
    mask = (torch.arange(n) % every == every - 1).to(torch.int8)
    wanted = mask.nonzero()[:, 0]
    assert torch.equal(compaction.positions(mask, len(wanted)), wanted)
    shifted = torch.cat([mask.new_zeros(3), mask])[3:]
    assert torch.equal(compaction.positions(shifted, len(wanted)), wanted)


@pytest.mark.parametrize("across", [1, 8, 100, 128, 1024, 2048, 2056])
def test_ones_by_row(across):
    for mask in (torch.ones(3, across), torch.randn(3, across) > 0):
        assert torch.equal(compaction.ones_by_row(mask.to(torch.int8)), mask.to(torch.int64).sum(1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_large_tensor(layout):
    """As above, without chunks made small: 400 × 600 elements, a little more than one chunk."""
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(400, 600, generator=generator) < 0.3
    mask[100:], mask[:, 590:] = mask[100:] & (torch.rand(300, 600, generator=generator) < 0.02), True
    x = md.masked_tensor(torch.randn(400, 600, generator=generator), mask)
    blocks = {"blocksize": (4, 6)} if layout.blocks else {}
    stored = x.to_layout(layout, **blocks)
    md.testing.assert_close(stored, x, rtol=0, atol=0)


@pytest.mark.parametrize(("shape", "dims"), SHAPES)
def test_between_all_layouts(shape, dims):
    layouts = [layout for layout in LAYOUTS if fits(layout, dims)]
    for valid in VALID:
        x = some_record(shape, valid)
        stored = {layout: from_dense(x, layout, dims, block_of(layout)) for layout in layouts}
        for a, b in itertools.product(layouts, layouts):
            found = to_layout(stored[a], b, block_of(b))
            assert found.pattern.layout == b
            for mine, other in zip(found.pattern.pieces, stored[b].pattern.pieces, strict=True):
                assert torch.equal(mine, other)
            dense = to_dense(found)
            assert torch.equal(dense.filled(0), x.filled(0))
            assert torch.equal(dense.validity, x.validity)


# ---------------------------------------------------------------------------------------- dimensions in another order


def heads() -> md.MaskedTensor:
    """(2, 2, 4, 3): the heads of a packed batch, before time."""
    x = md.from_lengths(torch.arange(48.0).reshape(2, 4, 6), torch.tensor([3, 2])).to_packed()
    return x.unflatten(-1, (2, 3)).transpose(1, 2)


CONVERSIONS: dict[str, Callable[[md.MaskedTensor], Tensor]] = {
    "to_sparse": lambda x: x.to_sparse(),
    "to_sparse(1)": lambda x: x.to_sparse(1),
    "to_sparse_csr": lambda x: x.to_sparse_csr(),
    "to_sparse_csc": lambda x: x.to_sparse_csc(),
    "to_sparse_bsr": lambda x: x.to_sparse_bsr((2, 1)),
    "to_sparse_bsc": lambda x: x.to_sparse_bsc((2, 3)),
    "to_packed": lambda x: x.to_packed(),
    "to_torch_sparse": lambda x: x.to_torch_sparse(),
    "to_torch_sparse by rows": lambda x: x.to_torch_sparse(layout=torch.sparse_csr),
    "to_torch_sparse, hybrid": lambda x: x.to_torch_sparse(0, sparse_dim=1),
}
FIT_HEADS = ("to_sparse", "to_sparse(1)", "to_torch_sparse", "to_torch_sparse, hybrid", "to_packed")

PERMUTED = [(permuted, name) for name in CONVERSIONS] + [(heads, name) for name in FIT_HEADS]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(("make", "name"), PERMUTED)
def test_without_dense_storage(make: Callable[[], md.MaskedTensor], name: str) -> None:
    convert, x = CONVERSIONS[name], make()
    with md.densify("never"):
        converted = convert(x)
    want = convert(x.to_dense())
    assert converted.layout is want.layout
    if isinstance(converted, md.MaskedTensor):
        assert converted.storage_layout is want.storage_layout
        assert converted.nnz == want.nnz
    md.testing.assert_close(converted.to_dense(), want.to_dense(), rtol=0, atol=0)


@pytest.mark.parametrize("convert", [lambda x: x.to_sparse_csr(), lambda x: x.to_sparse()])
def test_gradients(convert: Callable[[md.MaskedTensor], md.MaskedTensor]) -> None:
    leaves = [permuted().detach().requires_grad_() for _ in range(2)]
    for x, y in zip(leaves, (convert(leaves[0]), leaves[1].to_dense()), strict=True):
        (y * y).sum().backward()
        assert x.grad is not None
    md.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=0, atol=0)


def test_of_a_shape_that_no_machine_stores() -> None:
    indices, values = torch.tensor([[5, 2**50 - 1]]), torch.ones(2, 3)
    stored = torch.sparse_coo_tensor(indices, values, (2**50, 3), is_coalesced=True, check_invariants=False)
    x = md.as_masked_tensor(stored).t()
    with md.densify("never"):
        assert x.to_torch_sparse().indices().tolist() == [[0, 0, 1, 1, 2, 2], [5, 2**50 - 1] * 3]
        assert x.to_sparse_csr().nnz == 6


# ---------------------------------------------------------------------------------------- blocks, one dimension, none


@pytest.mark.parametrize("layout", STORAGES)
def test_blocks_do_not_depend_on_the_storage_they_are_made_from(layout: str) -> None:
    data, mask = torch.arange(40.0).reshape(2, 5, 4), torch.arange(40).reshape(2, 5, 4) % 3 > 0
    x = md.masked_tensor(data, mask)
    if layout == "permuted":
        stored = x.transpose(0, 1).to_sparse(1).transpose(0, 1) * 1  # type: ignore[attr-defined]
    elif layout in ("bsr", "bsc"):
        stored = x.to_layout(getattr(torch, f"sparse_{layout}"), sparse_dim=2, blocksize=(1, 5))
    else:
        stored = STORAGES[layout](x)
    blocks, expected = (t.to_layout(torch.sparse_bsr, blocksize=(1, 2)) for t in (stored, x))
    assert state(blocks) == state(expected) == state(x)
    assert blocks._kept_values.shape == expected._kept_values.shape
    assert blocks._pattern.block == (1, 2)


@pytest.mark.parametrize("mask", [T, F])
def test_a_tensor_without_dimensions_stays_dense(mask: bool) -> None:
    x = md.masked_tensor(torch.tensor(1.0), torch.tensor(mask))
    for stored in (x.to_sparse(), x.to_layout(torch.sparse_coo), x.to_sparse(0)):
        assert stored.storage_layout is torch.strided
        assert state(stored) == state(x)
    assert state(x.to_sparse().to_dense()) == state(x)
    with pytest.raises(ValueError, match="a tensor without dimensions cannot be stored sparsely"):
        x.to_layout(torch.sparse_csr)


def test_the_largest_elements_of_a_vector() -> None:
    x = md.masked_tensor([3.0, 9.0, 1.0, 5.0], [T, F, T, T])
    top = md.sparse_topk(x, 2)
    assert top.storage_layout is torch.sparse_coo
    assert state(top) == ([T, F, F, T], [3.0, 1.0, 1.0, 5.0])
    assert md.sparse_relu(torch.tensor([-1.0, 2.0])).compressed().tolist() == [2.0]
    assert md.sparse_topk(sample(), 2).storage_layout is torch.sparse_csr


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_one_flag_for_each_stored_element_is_no_mask_and_the_error_says_what_to_do_with_them(
    layout: torch.layout,
) -> None:
    x = md.masked_tensor(torch.arange(12.0).reshape(2, 6), torch.arange(12).reshape(2, 6) % 5 == 1).to_layout(layout)
    flags = torch.tensor([True, False, True])
    with pytest.raises(ValueError, match=r"does not broadcast .*\(2, 6\)\. It has one flag for each stored") as caught:
        x.mask_with(flags)
    advice = str(caught.value).partition("coo = x.to_sparse(), ")[2]
    coo = x.to_sparse()
    with torch.sparse.check_sparse_tensor_invariants():
        chosen = eval(advice, {"torch": torch, "as_masked_tensor": md.as_masked_tensor, **locals()})
    assert torch.equal(chosen.indices(), coo.indices()[:, flags])
    assert torch.equal(chosen.values(), coo.values()[flags])


# --------------------------------------------------------------------------------------------------------- coalescing


X = md.masked_tensor([[1.0, 2.0], [3.0, 4.0]], [[True, False], [True, True]])


def test_coo_is_coalesced_and_coalesces_to_itself() -> None:
    x = X.to_sparse()
    assert x.is_coalesced()
    assert x.coalesce() is x


def test_the_gradient_of_an_embedding_is_coalesced() -> None:
    weight = torch.zeros(5, 2, requires_grad=True)
    torch.nn.functional.embedding(md.masked_tensor([1, 3, 1], [True, True, True]), weight, sparse=True).sum().backward()
    gradient = weight.grad
    assert isinstance(gradient, md.MaskedTensor)
    assert gradient.is_coalesced()
    assert gradient.coalesce().indices().tolist() == [[1, 3]]


@pytest.mark.parametrize(
    "storage, name", [("to_dense", "Strided"), ("to_sparse_csr", "SparseCsr"), ("to_packed", "Jagged")]
)
def test_other_storages_raise_as_torch_does(storage: str, name: str) -> None:
    x = getattr(X, storage)()
    for asked in ("is_coalesced", "coalesce"):
        with pytest.raises(RuntimeError, match=f"^{asked} expected sparse coordinate tensor layout but got {name}, "):
            getattr(x, asked)()
    with pytest.raises(RuntimeError, match=r"^coalesce expected sparse coordinate tensor layout but got Strided"):
        torch.zeros(2).coalesce()
