"""Conversions chunk by chunk give what torch's own indexing gives, whatever a chunk is."""

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
    assert torch.equal(stored.get_mask(), mask)
    assert torch.equal(stored.to_tensor(0), x.to_tensor(0))


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
