"""torch.sparse tensors in and out: specified = valid, gradients both ways, and indices that torch let pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from op_registry.sparse.coordinates import ravel
from storages import LAYOUTS

COO, CSR, CSC, BSR, BSC = LAYOUTS
# The size of the blocks of a layout that has any.
BLOCKS = dict.fromkeys((BSR, BSC), (2, 3))
# shape, dense dimensions
SHAPES = [((4, 6), 0), ((2, 4, 6), 0), ((4, 6, 3), 1), ((2, 4, 6, 3), 1)]
# Each layout and each shape, with another one each time.
CROSSED = [(LAYOUTS[n % 5], *SHAPES[n % 4]) for n in range(8)]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]


def torch_sparse(x: Tensor, layout: torch.layout, dense: int = 0) -> Tensor:
    if layout is COO:
        return x.to_sparse(x.ndim - dense)
    return x.to_sparse(layout=layout, dense_dim=dense or None, blocksize=BLOCKS.get(layout))


def some_data(shape: tuple[int, ...], dense: int, layout: torch.layout) -> Tensor:
    data = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    # torch wants batches of a compressed layout to store the same number of values each.
    return data if len(shape) - dense > 2 and layout is not COO else data.relu()


def indices(*lists: list[int], dtype: torch.dtype = torch.int64) -> list[Tensor]:
    return [torch.tensor(each, dtype=dtype) for each in lists]


def check(t: Tensor) -> Tensor:
    """torch's own checks of a sparse tensor."""
    if t.layout is COO:
        torch.sparse_coo_tensor(
            t._indices(), t._values(), t.shape, is_coalesced=t.is_coalesced(), check_invariants=True
        )
    else:
        by_column = t.layout in (CSC, BSC)
        pieces = (t.ccol_indices(), t.row_indices()) if by_column else (t.crow_indices(), t.col_indices())
        torch.sparse_compressed_tensor(*pieces, t.values(), t.shape, layout=t.layout, check_invariants=True)
    return t


# ------------------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize(("layout", "shape", "dense"), CROSSED, ids=str)
def test_what_is_specified_is_valid_there_and_back(layout, shape, dense):
    data = some_data(shape, dense, layout)
    given = torch_sparse(data, layout, dense)
    for x in (md.as_masked_tensor(given), md.masked_tensor(given)):
        assert (x.storage_layout, x.layout, x.shape) == (layout, torch.strided, given.shape)
        assert x.nnz == (given._values() if layout is COO else given.values()).numel() // (3 if dense else 1)
        assert torch.equal(x.to_tensor(0), data)
        back = check(x.to_torch_sparse())
        assert (back.layout, back.shape, back.dense_dim()) == (layout, given.shape, given.dense_dim())
        assert torch.equal(back.to_dense(), data)
        assert layout is not COO or back.is_coalesced()


@pytest.mark.parametrize(("layout", "shape", "dense"), CROSSED, ids=str)
def test_gradients_of_what_comes_in(layout, shape, dense):
    data = some_data(shape, dense, layout)
    leaf = torch_sparse(data, layout, dense).requires_grad_()
    for times in (1, 2):  # the engine adds the second to the first
        md.as_masked_tensor(leaf).square().sum().backward()
        assert leaf.grad.layout is (CSR if layout is CSR and len(shape) == 2 else COO)
        torch.testing.assert_close(leaf.grad.to_dense(), 2 * data * times)

    strided = data.clone().requires_grad_()
    md.as_masked_tensor(torch_sparse(strided, layout, dense)).square().sum().backward()
    torch.testing.assert_close(strided.grad, 2 * data)


@pytest.mark.parametrize(("layout", "shape", "dense"), CROSSED, ids=str)
def test_gradients_of_what_goes_out(layout, shape, dense):
    data = some_data(shape, dense, layout)
    x = md.masked_tensor(torch_sparse(data, layout, dense), requires_grad=True)
    x.to_torch_sparse().to_dense(masked_grad=False).square().sum().backward()
    assert x.grad.storage_layout is layout
    assert torch.equal(x.grad.get_mask(), x.get_mask())
    torch.testing.assert_close(x.grad.to_tensor(0), 2 * data)


def test_dense_storage_goes_out_as_coo_or_as_asked():
    data = torch.tensor([[0.0, 2.0], [3.0, torch.nan]])
    x = md.masked_tensor(data, torch.tensor([[True, False], [False, True]]))
    out = x.to_torch_sparse()
    assert (out.layout, out.is_coalesced(), out._nnz()) == (COO, True, 2)
    assert out._values().nan_to_num(7).tolist() == [0, 7], "the valid zero and the valid NaN stay"
    assert x.to_torch_sparse(layout=CSC).row_indices().tolist() == [0, 1]
    assert x.to_torch_sparse(sparse_dim=1, fill=9).to_dense().nan_to_num(7).tolist() == [[0, 9], [9, 7]]
    assert x.to_torch_sparse(9, layout=BSR, blocksize=(1, 2)).values().nan_to_num(7).tolist() == [[[0, 9]], [[9, 7]]]
    assert x.to_sparse_csr().to_torch_sparse(layout=COO).layout is COO
    with pytest.raises(ValueError, match=re.escape("torch.strided is not a layout of torch.sparse: x.to_tensor(")):
        x.to_torch_sparse(layout=torch.strided)


def test_packed_storage_goes_out_as_csr():
    there = torch.arange(5) < torch.tensor([[2], [5], [0]])
    x = md.masked_tensor(torch.randn(3, 5, 4), there[..., None].expand(3, 5, 4)).to_packed()
    out = check(x.to_torch_sparse())
    assert (out.layout, out.dense_dim()) == (CSR, 1)
    assert torch.equal(out.to_dense(), x.to_tensor(0))
    heads = x.unflatten(2, (2, 2)).transpose(1, 2)
    assert torch.equal(heads.to_torch_sparse().to_dense(), heads.to_tensor(0))
    with pytest.raises(ValueError, match=r"torch\.jagged is not a layout of torch\.sparse"):
        x.to_torch_sparse(layout=torch.jagged)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_has_become_invalid_is_not_specified(layout):
    x = md.masked_tensor(torch.ones(4, 6)).to_layout(layout, blocksize=BLOCKS.get(layout))
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[:2, 3:] = False
    out = x.mask_with(mask).to_torch_sparse()
    assert out.layout is layout
    assert torch.equal(out.to_dense(), mask.float())
    assert check(out) is out


def test_invalid_elements_among_valid_ones_need_a_fill():
    x = md.masked_tensor(torch.ones(4, 6), torch.eye(4, 6).bool())
    with pytest.raises(ValueError, match=r"^14 invalid elements lie among the valid ones of a masked tensor of shape"):
        x.to_sparse_bsr((2, 3)).to_torch_sparse()
    with pytest.raises(ValueError, match=r"with dense dimensions, and a torch.sparse tensor specifies all of them"):
        x.to_sparse(1).to_torch_sparse()
    assert torch.equal(x.to_sparse_bsr((2, 3)).to_torch_sparse(0).to_dense(), torch.eye(4, 6))
    assert x.to_sparse(1).to_torch_sparse(5).to_dense().sum() == 4 + 5 * 20


def test_no_gradient_for_what_was_filled():
    x = md.masked_tensor(torch.ones(4, 6), torch.eye(4, 6).bool(), requires_grad=True)
    x.to_torch_sparse(0, layout=BSR, blocksize=(2, 3)).to_dense().exp().sum().backward()
    assert torch.equal(x.grad.get_mask(), x.get_mask())
    torch.testing.assert_close(x.grad.to_tensor(0), torch.eye(4, 6).exp() * torch.eye(4, 6))


@pytest.mark.parametrize(("layout", "dense"), [(COO, 1), (CSR, 0), (CSC, 1), (BSR, 0), (BSC, 1)], ids=str)
def test_on_the_meta_device_no_fill_is_needed(layout, dense):
    # Blocks and dense dimensions store invalid elements, which need a fill on devices that have values.
    mask = torch.ones(4, 6, *[2] * dense, dtype=torch.bool)
    mask[0, 0] = False
    x = md.masked_tensor(torch.ones(mask.shape), mask).to_layout(layout, sparse_dim=2, blocksize=BLOCKS.get(layout))
    out = x.to("meta").to_torch_sparse()
    assert (out.layout, out.shape, out.dtype, out.device.type) == (layout, x.shape, x.dtype, "meta")


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_batches_that_store_different_numbers_go_out_as_coo(layout):
    mask = torch.zeros(2, 4, 6, dtype=torch.bool)
    mask[0], mask[1, 0, 0] = True, True
    x = md.masked_tensor(torch.ones(2, 4, 6), mask)
    each = "1 and 4 blocks" if layout in (BSR, BSC) else "1 and 24 values"
    message = (
        f"the 2 matrices of a masked tensor of shape (2, 4, 6) store between {each} each, and torch's batched "
        f"{layout} tensors need the same number in each: use x.to_torch_sparse(layout=torch.sparse_coo)"
    )
    x = x.to_layout(layout, blocksize=BLOCKS.get(layout))
    with pytest.raises(ValueError, match=re.escape(message)):
        x.to_torch_sparse(0)
    assert torch.equal(x.to_torch_sparse(layout=COO).to_dense(), mask.float())


def test_a_mask_takes_from_what_is_specified():
    given = torch.eye(4).to_sparse()
    mask = torch.tensor([True, True, False, False])
    for make in (md.as_masked_tensor, md.masked_tensor):
        assert torch.equal(make(given, mask).get_mask(), torch.eye(4).bool() & mask)
    with pytest.raises(TypeError, match=r"the mask has layout torch.sparse_coo; pass mask.to_dense\(\)"):
        md.as_masked_tensor(given, torch.eye(4).bool().to_sparse())


def test_memory_is_shared_or_copied():
    given = torch.eye(4).to_sparse_csr()
    shared, own = md.as_masked_tensor(given), md.masked_tensor(given)
    given.values().mul_(3)
    assert shared.sum().item() == 12
    assert own.sum().item() == 4
    shared.mul_(2)
    assert given.values().tolist() == [3] * 4, "in-place operators on sparse storage store something else"
    with pytest.raises(RuntimeError, match="Only Tensors of floating point and complex dtype can require gradients"):
        md.masked_tensor(torch.eye(4).int().to_sparse(), requires_grad=True)


def test_parts_of_torchs_sparse_tensors_are_asked_of_one():
    x = md.masked_tensor(torch.eye(3))
    for tensor in (x, x.to_sparse_csr()):
        with md.densify("never"), pytest.raises(md.MaskedSemanticsError, match=r"^_nnz is refused on masked") as e:
            tensor._nnz()
        assert "x.to_torch_sparse()" in str(e.value)


# -------------------------------------------------------------------------------------------------- listed twice, or so


@pytest.mark.parametrize(
    ("values", "total"),
    [
        (torch.tensor([1.0, 2.0, 4.0]), [5.0, 2.0]),
        # One by one in float16, 2048 would swallow both ones.
        (torch.tensor([2048, 7, 1, 1], dtype=torch.float16), [2050.0, 7.0]),
        (torch.tensor([256, 7, 1, 1], dtype=torch.bfloat16), [258.0, 7.0]),
        (torch.tensor([100, 5, 27], dtype=torch.int8), [127, 5]),
        (torch.tensor([False, False, True]), [True, False]),
        (torch.tensor([1 + 1j, 2, 1j]), [1 + 2j, 2]),
        (torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]), [[4.0, 6.0], [0.0, 0.0]]),
    ],
    ids=lambda v: str(v.dtype) if isinstance(v, Tensor) else "",
)
def test_elements_listed_twice_are_accumulated(values, total):
    places = torch.tensor([[1, 0, 1, 1], [2, 0, 2, 2]])[:, : len(values)]
    given = torch.sparse_coo_tensor(places, values, (2, 3, *values.shape[1:]), check_invariants=False)
    x = md.as_masked_tensor(given)
    assert x.dtype is values.dtype
    assert x.nnz == 2
    assert x.to_torch_sparse().is_coalesced()
    assert x.to_tensor(0)[1, 2].tolist() == total[0]
    assert x.to_tensor(0)[0, 0].tolist() == total[1]
    assert int(x.count()) == values[:2].numel()
    assert torch.equal(given._indices(), places), "the input is untouched"
    assert not given.is_coalesced()


@pytest.mark.parametrize("lies", [False, True])
def test_what_says_that_it_is_coalesced_and_is_not(lies):
    options: dict[str, Any] = {"is_coalesced": lies, "check_invariants": False}
    x = md.as_masked_tensor(torch.sparse_coo_tensor([[2, 0]], torch.tensor([1.0, 2.0]), (3,), **options))
    assert x.to_tensor(0).tolist() == [2, 0, 1]
    assert x.to_torch_sparse()._indices().tolist() == [[0, 2]]


def test_the_pieces_of_a_coalesced_tensor_are_taken_as_they_are():
    given = torch.eye(3).to_sparse()
    x = md.as_masked_tensor(given)
    assert x._kept_values.data_ptr() == given._values().data_ptr()
    assert x._pattern.pieces[0].data_ptr() == given._indices().data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_compressed_indices_out_of_order_are_brought_into_order(layout):
    compressed, plain = indices([0, 3, 3], [2, 0, 2])
    values = torch.tensor([1.0, 2.0, 4.0], requires_grad=False)
    size = (3, 2) if layout in (CSC, BSC) else (2, 3)
    if layout in (BSR, BSC):
        values = values.reshape(3, 1, 1)
    given = torch.sparse_compressed_tensor(compressed, plain, values, size, layout=layout, check_invariants=False)
    x = md.as_masked_tensor(given)
    wanted = torch.tensor([[2.0, 0, 5], [0, 0, 0]])
    assert torch.equal(x.to_tensor(0), wanted.t() if layout in (CSC, BSC) else wanted)
    assert x.nnz == 2
    assert plain.tolist() == [2, 0, 2], "the input is untouched"
    check(x.to_torch_sparse())


def test_int32_indices_stay_int32():
    pieces = indices([0, 1, 2], [1, 0], dtype=torch.int32)
    x = md.as_masked_tensor(torch.sparse_csr_tensor(*pieces, torch.ones(2), (2, 2), check_invariants=False))
    assert x.exp().to_torch_sparse().col_indices().dtype is torch.int32
    assert x.to_sparse_csc().to_tensor(0).tolist() == [[0, 1], [1, 0]]
    assert x.sum(0).to_tensor(0).tolist() == [1, 1]


# ------------------------------------------------------------------------------------------------------------- nothing


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        *zip(LAYOUTS, [(0, 6), (4, 0), (0, 0), (4, 6), (2, 4, 6)], strict=True),
        *zip(LAYOUTS, [(2, 4, 6), (0, 6), (4, 6), (0, 0), (4, 0)], strict=True),
    ],
    ids=str,
)
def test_empty_tensors_and_nothing_specified(layout, shape):
    blocksize = (1, 1) if 0 in shape[-2:] and layout in BLOCKS else BLOCKS.get(layout)
    given = torch.zeros(shape).to_sparse(layout=layout, blocksize=blocksize)
    x = md.as_masked_tensor(given)
    assert (x.shape, x.nnz, int(x.count())) == (torch.Size(shape), 0, 0)
    assert x.to_torch_sparse().shape == given.shape
    leaf = torch.zeros(shape).to_sparse(layout=layout, blocksize=blocksize).requires_grad_()
    md.as_masked_tensor(leaf).sum(()).sum().to_tensor(0).backward()
    assert leaf.grad.shape == given.shape


def test_without_sparse_dimensions():
    nowhere = torch.zeros(0, 2, dtype=torch.int64)
    x = md.as_masked_tensor(torch.sparse_coo_tensor(nowhere, torch.tensor([1.0, 2.0]), (), check_invariants=False))
    assert x.item() == 3
    assert md.as_masked_tensor(
        torch.sparse_coo_tensor(nowhere, torch.ones(2, 3), (3,), check_invariants=False)
    ).tolist() == [2, 2, 2]
    nothing = md.as_masked_tensor(torch.sparse_coo_tensor(nowhere[:, :0], torch.ones(0), (), check_invariants=False))
    assert not nothing.get_mask()
    with pytest.raises(ValueError, match="a tensor without dimensions cannot be stored sparsely; keep it dense"):
        x.to_torch_sparse()


def test_nan_is_a_value():
    x = md.as_masked_tensor(
        torch.sparse_coo_tensor([[0, 2]], torch.tensor([torch.nan, 1.0]), (3,), check_invariants=False)
    )
    assert x.get_mask().tolist() == [True, False, True]
    assert x.isnan().to_tensor(False).tolist() == [True, False, False]


# ----------------------------------------------------------------------------------------------- indices of nowhere


def coo(places: list[list[int]], n: int, size: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(places, torch.ones(n), size, check_invariants=False)


def csr(crow: list[int], col: list[int], values: Any, size: tuple[int, ...], layout: torch.layout = CSR) -> Tensor:
    values = values if isinstance(values, Tensor) else torch.ones(values)
    return torch.sparse_compressed_tensor(*indices(crow, col), values, size, layout=layout, check_invariants=False)


BAD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "negative": (
        lambda: coo([[0, -1]], 2, (3,)),
        "a torch.sparse_coo tensor of shape (3,) is not well formed: indices of dimension 0 run from -1 to 0, and its "
        "size is 3. Construct it with check_invariants=True to find where it comes from.",
    ),
    "out of range": (
        lambda: coo([[0, 1], [5, 7]], 2, (3, 6)),
        "indices of dimension 1 run from 5 to 7, and its size is 6",
    ),
    "crow too short": (
        lambda: csr([0, 1], [0], 1, (3, 3)),
        "crow_indices have 2 entries for each matrix, and 3 rows need 4",
    ),
    "crow too long": (
        lambda: csr([0, 1, 1, 1, 1], [0], 1, (3, 3)),
        "crow_indices have 5 entries for each matrix, and 3 rows",
    ),
    "crow starts late": (lambda: csr([1, 1, 1, 1], [0], 1, (3, 3)), "crow_indices begin with 1, not with 0"),
    "crow ends early": (
        lambda: csr([0, 0, 0, 1], [0, 1], 2, (3, 3)),
        "crow_indices end with 1, and there are 2 col_indices",
    ),
    "crow descends": (
        lambda: csr([0, 2, 1, 2], [0, 1], 2, (3, 3)),
        "crow_indices descend from 2 to 1; they are running counts",
    ),
    "crow descends by more than int64 holds": (
        lambda: csr([0, 2**63 - 1, -2, 2], [0, 1], 2, (3, 3)),
        "crow_indices descend from 9223372036854775807 to -2; they are running counts",
    ),
    "col out of range": (
        lambda: csr([0, 1, 1, 1], [3], 1, (3, 3)),
        "col_indices run from 3 to 3, and that dimension has size 3",
    ),
    "col negative": (
        lambda: csr([0, 1, 1, 1], [-1], 1, (3, 3)),
        "col_indices run from -1 to -1, and that dimension has size 3",
    ),
    "values too few": (lambda: csr([0, 1, 2, 2], [0, 1], 1, (3, 3)), "there are 1 values for 2 col_indices"),
    "by column": (
        lambda: csr([0, 1, 1], [3], 1, (3, 2), CSC),
        "row_indices run from 3 to 3, and that dimension has size 3",
    ),
    "blocks that do not divide": (
        lambda: csr([0, 1], [0], torch.ones(1, 2, 2), (3, 3), BSR),
        "blocks of (2, 2) do not divide a matrix of (3, 3)",
    ),
    "blocks out of range": (
        lambda: csr([0, 1, 1], [2], torch.ones(1, 2, 2), (4, 4), BSC),
        "row_indices run from 2 to 2, and that dimension has size 2",
    ),
    "indices that are no integers": (
        lambda: torch.sparse_csr_tensor(
            torch.tensor([0.0, 1.0]), torch.tensor([0.0]), torch.ones(1), (1, 3), check_invariants=False
        ),
        "crow_indices are of dtype torch.float32, not int64 or int32",
    ),
}


@pytest.mark.parametrize(
    ("make", "name"),
    [*((md.as_masked_tensor, name) for name in BAD), (md.masked_tensor, "negative"), (md.masked_tensor, "by column")],
)
def test_indices_that_are_not_well_formed(make, name):
    given, message = BAD[name]
    tensor = given()
    with pytest.raises(ValueError, match=re.escape(message)):
        make(tensor)


def test_more_places_than_int64_can_number():
    place = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"a tensor of sizes \(4294967296, 4294967296\) has 18,446,744,073,709,551,616"
    ):
        ravel((place, place), (2**32, 2**32))


def test_elsewhere_sparse_data_is_refused():
    with pytest.raises(md.MaskedSemanticsError, match="is accepted by masked_tensor and as_masked_tensor only"):
        md.from_nan(torch.eye(3).to_sparse())


# ----------------------------------------------------------------------------------------- gradients of duplicates

LISTED_TWICE = {
    "COO": lambda v: torch.sparse_coo_tensor([[0, 0, 2]], v, (4,)),
    "COO of two dimensions": lambda v: torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 0]], v, (2, 2)),
    "COO out of order": lambda v: torch.sparse_coo_tensor([[2, 1, 2]], v, (4,)),
    "hybrid COO": lambda v: torch.sparse_coo_tensor([[0, 0, 2]], v[:, None] * torch.ones(3, 2), (4, 2)),
}
READ = {
    "sum": lambda x: x.sum(),
    "pow": lambda x: x.pow(2).sum(),
    "product": lambda x: (x * torch.arange(1.0, 1 + x.numel()).reshape(x.shape)).sum(),
    "imputed": lambda x: (x.to_tensor(0.0) if isinstance(x, md.MaskedTensor) else x).exp().sum(),
}


@pytest.mark.parametrize("read", READ.values(), ids=READ)
@pytest.mark.parametrize("make", LISTED_TWICE.values(), ids=LISTED_TWICE)
def test_what_is_listed_twice_has_the_gradient_of_its_element(make, read):
    values = torch.tensor([1.0, 2.0, 3.0])
    mine, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    read(md.as_masked_tensor(make(mine))).backward()
    read(make(theirs).to_dense()).backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_sparse_leaf_that_lists_an_element_twice_gets_its_gradient_once():
    leaf = torch.sparse_coo_tensor([[0, 0, 2]], torch.tensor([1.0, 2.0, 3.0]), (4,)).requires_grad_()
    md.as_masked_tensor(leaf).sum().backward()
    assert leaf.grad.to_dense().tolist() == [1, 0, 1, 0]
    blocks = torch.ones(3, 2, 2).mul_(torch.tensor([1.0, 2.0, 3.0])[:, None, None])
    leaf = torch.sparse_bsr_tensor([0, 2, 3], [1, 1, 0], blocks, (4, 4)).requires_grad_()
    md.as_masked_tensor(leaf).sum().backward()
    assert leaf.grad.to_dense()[:2].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]
