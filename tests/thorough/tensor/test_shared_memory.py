"""Which tensors share data and validity, and which do not: the paragraph *Memory* of docs/semantics.md."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch.tensor.masked_tensor import rebuild, rebuild_family
from masked_dispatch.tensor.sparse_tensor import rebuild_sparse_of
from storages import MASK, STORAGES, F, T, state

LAYOUTS = {**STORAGES, "view": lambda x: torch.cat([x, x])[:4]}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def sample(layout: str = "dense") -> md.MaskedTensor:
    """4 × 4 with NaN under its mask, stored so."""
    return LAYOUTS[layout](md.masked_tensor(torch.where(MASK, torch.arange(16.0).reshape(4, 4), torch.nan), MASK))


def all_invalid(x: Tensor) -> md.MaskedTensor:
    return md.masked_tensor(torch.full(x.shape, torch.nan), torch.zeros(x.shape, dtype=torch.bool))


# ---------------------------------------------------------------- mask_with, mask_like, as_masked_tensor(masked, mask)

HALF = torch.tensor([[T, T, T, F]]).expand(4, 4)
REMASKED: dict[str, Callable[[md.MaskedTensor], md.MaskedTensor]] = {
    "mask_with": lambda x: x.mask_with(HALF),
    "mask_with int8": lambda x: x.mask_with(HALF[:1].to(torch.int8)),
    "mask_with all": lambda x: x.mask_with(torch.ones(4, 4, dtype=torch.bool)),
    "mask_like dense": lambda x: x.mask_like(md.masked_tensor(torch.zeros(4, 4), HALF)),
    "mask_like nothing masked": lambda x: x.mask_like(md.masked_tensor(torch.zeros(4, 4))),
    "mask_like sparse": lambda x: x.mask_like(md.masked_tensor(torch.zeros(4, 4), HALF).to_sparse()),
    "mask_like itself": lambda x: x.mask_like(x),
    "as_masked_tensor": lambda x: md.as_masked_tensor(x, HALF),
}
remasked = pytest.mark.parametrize("remask", REMASKED)
WRITES: dict[str, Callable[[Tensor], object]] = {
    "fill_": lambda x: x.fill_(7.0),
    "copy_ invalid": lambda x: x.copy_(all_invalid(x)),
    "add_": lambda x: x.add_(1.0),
    "index": lambda x: x.index_put_((torch.tensor([0, 1]), torch.tensor([0, 2])), torch.tensor([7.0, 8.0])),
}


@pytest.mark.parametrize("write", WRITES)
@remasked
@layouts
def test_no_write_passes_between_a_tensor_and_what_got_another_mask(layout: str, remask: str, write: str) -> None:
    x = sample(layout)
    y = REMASKED[remask](x)
    before = state(x), state(y)
    WRITES[write](y)
    assert state(x) == before[0]
    y = REMASKED[remask](x)
    WRITES[write](x)
    assert state(y) == before[1]


@remasked
@pytest.mark.parametrize("sparse", [False, True])
def test_nor_through_data_that_the_caller_kept(remask: str, sparse: bool) -> None:
    """Be it a plain tensor, or the values of a torch.sparse one."""
    data = torch.arange(1.0, 17.0).reshape(4, 4)
    data = data.to_sparse().coalesce() if sparse else data
    memory = data.values() if sparse else data
    y = REMASKED[remask](md.as_masked_tensor(data))
    before = state(y)
    memory.fill_(5.0)
    assert state(y) == before
    y.fill_(6.0)
    assert (memory == 5).all()


def test_mask_like_of_a_plain_tensor_is_a_copy() -> None:
    plain = torch.arange(16.0).reshape(4, 4)
    for other in (sample(), sample("csr")):
        y = md.mask_like(plain, other)
        before = state(y)
        plain.add_(1.0)
        assert state(y) == before
        y.fill_(-3.0)
        assert plain.min() >= 0


@pytest.mark.parametrize("write", ["fill_", "copy_ invalid"])
@remasked
def test_no_write_passes_in_a_compiled_region(remask: str, write: str) -> None:
    def written(x: md.MaskedTensor) -> Tensor:
        y = REMASKED[remask](x) * 1
        z = REMASKED[remask](x)
        WRITES[write](z)
        return y

    torch.compiler.reset()  # the function is compiled for each case
    x = sample()
    before = state(x), state(REMASKED[remask](x))
    y = torch.compile(written, backend="aot_eager", fullgraph=True)(x)
    assert (state(x), state(y)) == before


def test_no_write_reaches_what_a_compiled_region_returned() -> None:
    x = sample()
    y = torch.compile(lambda x: x.mask_with(HALF), backend="aot_eager", fullgraph=True)(x)
    before = state(x), state(y)
    y.fill_(3.0)
    assert state(x) == before[0]
    y = torch.compile(lambda x: x.mask_with(HALF), backend="aot_eager", fullgraph=True)(x)
    x.fill_(3.0)
    assert state(y) == before[1]


@remasked
@layouts
def test_gradients_pass_through_another_mask(layout: str, remask: str) -> None:
    x = sample(layout).requires_grad_()
    y = REMASKED[remask](x)
    (y * 2).sum().backward()
    assert isinstance(x.grad, md.MaskedTensor)
    assert x.grad.get_mask().tolist() == x.get_mask().tolist()
    assert torch.equal(x.grad.to_tensor(0), y.get_mask() * 2.0)


# ---------------------------------------------------------------- the caller's mask

MASKS: dict[str, Callable[[], Tensor]] = {
    "bool": lambda: HALF.clone(),
    "int8": lambda: HALF.to(torch.int8),
    "uint8": lambda: HALF.to(torch.uint8),
    "int64": lambda: HALF.to(torch.int64),
    "transposed": lambda: HALF.t().clone().t(),
    "expanded": lambda: HALF[:1].clone().expand(4, 4),
    "broadcast": lambda: HALF[:1].clone(),
    "vector": lambda: HALF[0].clone(),
}
DOORS: dict[str, Callable[[Tensor, Tensor], md.MaskedTensor]] = {
    "as_masked_tensor": md.as_masked_tensor,
    "masked_tensor": md.masked_tensor,
    "mask_with": lambda data, mask: md.as_masked_tensor(data).mask_with(mask),
    "compiled": lambda data, mask: torch.compile(md.as_masked_tensor, backend="aot_eager")(data, mask),
    "exchanged twice": lambda data, mask: md.as_masked_tensor(md.as_masked_tensor(data, mask), mask),
    "sparse": lambda data, mask: md.as_masked_tensor(data.to_sparse(), mask),
}
of_a_caller = pytest.mark.parametrize("kind", MASKS)
doors = pytest.mark.parametrize("door", DOORS)


@of_a_caller
@doors
def test_a_callers_mask_is_never_written_to(door: str, kind: str) -> None:
    mask = MASKS[kind]()
    x = DOORS[door](torch.arange(1.0, 17.0).reshape(4, 4), mask)
    before = mask.clone()
    for write in WRITES.values():
        write(x)
        assert torch.equal(mask, before)


@of_a_caller
@doors
def test_later_writes_to_a_callers_mask_do_not_show(door: str, kind: str) -> None:
    mask = MASKS[kind]()
    x = DOORS[door](torch.arange(1.0, 17.0).reshape(4, 4), mask)
    before = state(x), state(x * 2)
    (mask[0] if kind == "expanded" else mask).zero_()
    assert (state(x), state(x * 2)) == before


@of_a_caller
@doors
def test_tensors_under_one_callers_mask_do_not_revive_each_others_elements(door: str, kind: str) -> None:
    mask = MASKS[kind]()
    a, b = (DOORS[door](torch.full((4, 4), torch.nan), mask) for _ in range(2))
    a.fill_(0.0)
    assert a.get_mask().all()
    assert torch.equal(b.get_mask(), HALF)


def test_a_compiled_write_does_not_reach_a_callers_mask() -> None:
    def written(data: Tensor, mask: Tensor) -> Tensor:
        x = md.as_masked_tensor(data * 1, mask)
        x[0] = 5.0
        return x

    for kind, make in MASKS.items():
        mask = make()
        x = torch.compile(written, backend="aot_eager")(torch.zeros(4, 4), mask)
        assert torch.equal(mask, make()), kind
        assert torch.equal(x.get_mask(), written(torch.zeros(4, 4), make()).get_mask()), kind


@pytest.mark.parametrize("n", [3, 64, 1000])
def test_a_bool_mask_of_odd_bytes_is_read_as_torch_reads_it(n: int) -> None:
    odd = torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    x = md.as_masked_tensor(torch.zeros(n), odd.view(torch.bool))
    assert torch.equal(x.get_mask(), odd != 0)
    assert int(x.count()) == int((odd != 0).sum())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.int64])
def test_a_mask_of_other_integers_is_refused_with_their_range(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"dtype {dtype} and values between 0 and 2; integers in a mask have to be"):
        md.masked_tensor(torch.zeros(2), torch.tensor([0, 2]).to(dtype))
    assert md.masked_tensor(torch.zeros(2), torch.tensor([0, 1]).to(dtype)).get_mask().tolist() == [F, T]


# ---------------------------------------------------------------- copies and files


@layouts
def test_copy_copy_shares_data_and_validity(layout: str) -> None:
    x = sample(layout)
    y = copy.copy(x)
    for written, read in ((x, y), (y, x)):
        for write in WRITES.values():
            write(written)
            assert state(written) == state(read)
    assert type(y) is type(x)
    assert y.storage_layout is x.storage_layout


def test_copy_copy_of_a_parameter_is_a_parameter_of_the_same_memory() -> None:
    for layout in ("dense", "csr"):
        x = torch.nn.Parameter(sample(layout))
        y = copy.copy(x)
        assert isinstance(y, torch.nn.Parameter)
        assert y.requires_grad
        assert y.is_leaf
        with torch.no_grad():
            y.fill_(2.0)
        assert state(x) == state(y)


def test_a_compiled_write_to_a_copy_shows_in_the_original() -> None:
    x = sample()
    x[0, 0] = 4.0
    y = copy.copy(x)
    torch.compile(lambda x: x.mul_(2), backend="aot_eager", fullgraph=True)(y)
    assert state(x) == state(y)
    assert x[0, 0].item() == 8.0


def saved_and_loaded(x: object) -> object:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


COPIES: dict[str, Callable[[object], object]] = {"deepcopy": copy.deepcopy, "torch.save": saved_and_loaded}
AGAIN = {**COPIES, "pickle": lambda x: pickle.loads(pickle.dumps(x))}
ALIASES: dict[str, Callable[[md.MaskedTensor], Tensor]] = {
    "row": lambda x: x[0],
    "column": lambda x: x[:, 1],
    "transpose": lambda x: x.t(),
    "detach": lambda x: x.detach(),
    "itself": lambda x: x,
    "copy": copy.copy,
    "view of a view": lambda x: x.t()[1:],
}
STARTS: dict[str, Callable[[], md.MaskedTensor]] = {
    "own mask": sample,
    "no mask": lambda: md.masked_tensor(torch.arange(16.0).reshape(4, 4)),
    "broadcast mask": lambda: md.masked_tensor(torch.zeros(4, 4), torch.tensor([T, F, T, T])),
    "written before": lambda: _written(sample()),
    "in shared memory": lambda: sample().share_memory_(),
    "part of a larger one": lambda: _written(md.masked_tensor(torch.zeros(8, 4)))[2:6],
}


def _written(x: md.MaskedTensor) -> md.MaskedTensor:
    x[1, 1:] = md.masked_tensor(torch.full((3,), torch.nan), torch.zeros(3, dtype=torch.bool))
    return x


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("copied", COPIES)
def test_copies_keep_aliases_with_their_validity(copied: str, alias: str, start: str) -> None:
    x = STARTS[start]()
    pair = (x, ALIASES[alias](x))
    before = state(pair[0]), state(pair[1])
    p, q = COPIES[copied](pair)  # type: ignore[misc]
    assert (state(p), state(q)) == before
    q.copy_(all_invalid(q))
    assert state(ALIASES[alias](p)) == state(q)
    p.fill_(3.0)
    assert q.get_mask().all()
    assert (q == 3).to_tensor(F).all()
    assert (state(pair[0]), state(pair[1])) == before


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("start", STARTS)
def test_a_pickle_separates_what_torch_s_separates_and_keeps_a_copy_together(start: str, protocol: int) -> None:
    x = STARTS[start]()
    p, q, r = pickle.loads(pickle.dumps((x, copy.copy(x), x[0]), protocol))
    before = state(p)
    r.copy_(all_invalid(r))
    assert state(p) == before
    assert not r.get_mask().any()
    q.copy_(all_invalid(q))
    assert not p.get_mask().any()
    p.fill_(3.0)
    assert q.get_mask().all()


@pytest.mark.parametrize("copied", AGAIN)
@layouts
def test_copies_keep_what_shares_its_storage(copied: str, layout: str) -> None:
    """A detached tensor is one with what it was detached from, in every storage."""
    x = sample(layout)
    p, q = AGAIN[copied]((x, x.detach()))  # type: ignore[misc]
    assert state(p) == state(q) == state(x)
    if copied == "pickle" and layout in ("dense", "view"):
        return  # torch's own pickle copies memory for each tensor
    q.fill_(5.0)
    assert state(p) == state(q)


@layouts
def test_copies_of_one_tensor_are_independent_of_it(layout: str) -> None:
    x = sample(layout)
    before = state(x)
    for again in AGAIN.values():
        y = again(x)
        assert isinstance(y, md.MaskedTensor)
        assert state(y) == before
        y.fill_(5.0)
        assert state(x) == before


def test_modules_with_tied_and_sliced_parameters() -> None:
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(sample())
    module.b = module.a
    module.register_buffer("row", module.a.detach()[0])
    again = copy.deepcopy(module)
    assert again.a is again.b
    with torch.no_grad():
        again.a.zero_()
    assert again.row.get_mask().all()
    assert not module.row.get_mask().all()


@pytest.mark.parametrize("copied", AGAIN)
def test_a_view_of_another_dtype_is_copied_as_a_tensor_of_its_own(copied: str) -> None:
    x = md.masked_tensor(torch.zeros(2, 2, dtype=torch.complex64), torch.tensor([[T, F], [T, T]]))
    p, q = AGAIN[copied]((x, torch.view_as_real(x)))  # type: ignore[misc]
    q.fill_(1.0)
    assert state(p) == state(x)
    assert q.get_mask().all()


WRONG_FAMILIES: dict[str, tuple[Callable[[Tensor, Tensor], tuple[object, ...]], str]] = {
    "too short": (lambda d, m: (d, None, m[:-1]), r"its mask has shape \(15,\) on cpu, and its data spans 16"),
    "other numbers": (lambda d, m: (d, None, m * 7), "its validity runs from 0 to 7"),
    "of bool": (lambda d, m: (d, None, m.bool()), "its validity has dtype torch.bool"),
    "of text": (lambda d, m: (d, None, "abc"), "the type of its mask is str"),
    "no data": (lambda d, m: ("abc", None, m), "the type of its data is str"),
    "a validity that does not fit": (lambda d, m: (d, m[:3], None), "does not fit data"),
    "smaller data": (lambda d, m: (d[:2], None, m[:8]), "reaches beyond the masked tensor it was made from"),
}


@pytest.mark.parametrize("name", WRONG_FAMILIES)
def test_a_damaged_file_of_what_views_share_is_refused(name: str) -> None:
    wrong, message = WRONG_FAMILIES[name]
    data, memory = torch.zeros(4, 4), (torch.arange(16) % 3 > 0).to(torch.int8)

    class Family:
        def __reduce__(self) -> object:
            return rebuild_family, wrong(data, memory)

    class File:
        def __reduce__(self) -> object:
            return rebuild, (data, None, False, False, Family())

    with pytest.raises(ValueError, match=f"^this is not a saved masked tensor: .*{message}"):
        saved_and_loaded(File())


def test_something_else_for_what_is_shared_is_refused() -> None:
    class Dense:
        def __reduce__(self) -> object:
            return rebuild, (torch.zeros(2), None, False, False, "abc")

    class Stored:
        def __reduce__(self) -> object:
            return rebuild_sparse_of, ("abc", False, False, None)

    for file in (Dense(), Stored()):
        with pytest.raises(ValueError, match=r"the type of what it (shares with its views|stores) is str"):
            saved_and_loaded(file)


# ------------------------------------------------------------------------------------------ plain tensors handed out

HANDED_OUT: dict[str, Callable[[md.MaskedTensor], Tensor]] = {
    "to_tensor": lambda x: x.to_tensor(0),
    "to_tensor of a tensor": lambda x: x.to_tensor(torch.zeros(())),
    "compressed": lambda x: x.compressed(),
    "values": lambda x: (x.to_sparse() if x.storage_layout is torch.strided else x).values(),
}
ALL_VALID: dict[str, Callable[[Tensor], md.MaskedTensor]] = {
    "a mask that is all True": lambda data: md.masked_tensor(data, torch.ones(data.shape, dtype=torch.bool)),
    "no mask": md.as_masked_tensor,
}


@pytest.mark.parametrize("handed_out", HANDED_OUT)
@pytest.mark.parametrize("mask", ALL_VALID)
@layouts
def test_plain_tensors_handed_out_are_copies(layout: str, mask: str, handed_out: str) -> None:
    x = LAYOUTS[layout](ALL_VALID[mask](torch.arange(16.0).reshape(4, 4)))
    if handed_out == "values" and layout == "permuted":
        x = x.to_sparse(1)  # what is permuted has no values in torch's shape
    before = state(x)
    plain = HANDED_OUT[handed_out](x)
    plain.fill_(7.0)
    assert state(x) == before
    x.fill_(5.0)
    assert (plain == 7).all()


@pytest.mark.parametrize("mask", ALL_VALID)
def test_a_write_after_to_tensor_leaves_its_gradient(mask: str) -> None:
    x = ALL_VALID[mask](torch.arange(4.0)).requires_grad_()
    y = x * 2
    plain = y.to_tensor(0)
    y.zero_()
    assert plain.tolist() == [0, 2, 4, 6]
    plain.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2, 2]  # type: ignore[attr-defined]
