"""Damaged files are refused at load, by torch.load and by pickle, for every kind of storage."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from corrupted_files import tensor as tensor_of_kind
from masked_dispatch.tensor import file_format, mask_sharing
from masked_dispatch.tensor.file_format import VERSION, load
from masked_dispatch.tensor.masked_tensor import rebuild as masked_rebuild
from masked_dispatch.tensor.sparse_tensor import rebuild_sparse, rebuild_sparse_of, rebuild_stored, stored_parts

KINDS = ("dense", "coo", "hybrid", "csr", "csc", "bsr", "bsc", "packed", "padded")
Parts = dict[str, Any]


def stored(kind: str) -> Any:
    """A tensor that is stored so, some of it invalid in what is stored."""
    if kind == "heads":  # packed, and seen in another order
        return stored("packed").unflatten(-1, (1, 2)).transpose(1, 2)
    x = tensor_of_kind(kind)
    return x if kind == "dense" else x.mask_with(torch.arange(x.numel()).reshape(x.shape) % 5 != 0)


ALL_KINDS = (*KINDS, "heads")


def parts_of(x: Any) -> tuple[Callable[..., Any], Parts]:
    """What is saved of a tensor, by the names of what is called with it; of version 1 of the format."""
    x = x if x.storage_layout is torch.strided else x.without_extent()  # (packing gives one)
    _, (_, kind, *given) = x.__reduce_ex__(2)
    rebuild: Callable[..., Any] = masked_rebuild
    if kind == "sparse":
        kept, *flags = given
        rebuild, given = rebuild_sparse, [*stored_parts(kept), *flags]
    return rebuild, inspect.signature(rebuild).bind(*given).arguments


class File:
    """Something that is saved as if it were a masked tensor of these parts."""

    def __init__(self, rebuild: Callable[..., Any], parts: Parts) -> None:
        self.made = rebuild, tuple(parts.values())

    def __reduce__(self) -> Any:
        return self.made


def same_extents(x: Any, y: Any) -> bool:
    if x._extent is None or y._extent is None:
        return x._extent is y._extent
    known = x._extent.known == y._extent.known and x._extent.is_mask == y._extent.is_mask
    return known and bool((x.extent == y.extent).all())


def loaded(x: Any) -> Any:
    buffer = io.BytesIO()
    torch.save({"x": x}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)["x"]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_what_was_saved_is_loaded(kind: str) -> None:
    x = stored(kind)
    for parameter in (x, torch.nn.Parameter(x)):
        for again in (
            loaded(parameter),
            pickle.loads(pickle.dumps(parameter)),
            copy.copy(parameter),
            copy.deepcopy(parameter),
        ):
            assert type(again) is type(x)
            assert isinstance(again, torch.nn.Parameter) == isinstance(parameter, torch.nn.Parameter)
            assert again.requires_grad == parameter.requires_grad
            assert again.storage_layout is x.storage_layout
            assert torch.equal(again.detach(), x)
            assert same_extents(again, x)


def test_what_is_kept_with_a_mask_is_not_saved() -> None:
    """Counts and wide masks are made again: a file is as large, whatever was computed with the tensor before."""

    def size_of_file() -> int:
        buffer = io.BytesIO()
        torch.save((x, x[0]), buffer)
        return buffer.tell()

    x = md.masked_tensor(torch.randn(32, 32), torch.rand(32, 32) > 0.5)
    before = size_of_file()
    (x.exp().sum(0) + x.mean(1)).var()
    (x.to_tensor(3.0), torch.amax(x), x.count())
    assert size_of_file() == before
    rows = loaded((x, x[0]))
    rows[1].copy_(md.masked_tensor(torch.zeros(32), torch.zeros(32, dtype=torch.bool)))
    assert not rows[0][0].get_mask().any(), "the mask is shared in the file as before"


class Versioned:
    """Something that is saved as of that version of the format."""

    def __init__(self, version: Any, *parts: Any) -> None:
        self.made = load, (version, *parts)

    def __reduce__(self) -> Any:
        return self.made


@pytest.mark.parametrize("read", [loaded, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_file_of_a_newer_version_is_refused_by_name(read: Callable[[Any], Any]) -> None:
    """Whatever it contains: kinds, numbers and types of parts that this version has never heard of."""
    for parts in (("dense", torch.ones(2), None, False), ("ragged", [1, 2], {"rows": 3}), ()):
        file = Versioned(VERSION + 4, *(parts or ("dense",)))
        with pytest.raises(
            ValueError, match=rf"format version {VERSION + 4}, and this version of masked_dispatch reads "
        ):
            read(file)
    with pytest.raises(
        ValueError, match=rf"versions 1 to {VERSION}\. Update masked_dispatch, or save the tensor again"
    ):
        read(Versioned(VERSION + 1, "dense"))


@pytest.mark.parametrize(("version", "kind", "message"), [
    ("3", "dense", "its format version is '3'"),
    (True, "dense", "its format version is True"),
    (0, "dense", "its format version is 0"),
    (VERSION, "abc", "the kind of what was saved is 'abc', not one of dense, family, "),
])  # fmt: skip
def test_a_file_of_no_version_is_refused(version: Any, kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^this is not a saved masked tensor: {message}"):
        loaded(Versioned(version, kind, torch.ones(2), None, False))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_files_of_the_first_version_are_read(kind: str) -> None:
    x = stored(kind)
    rebuild, parts = parts_of(x)
    assert torch.equal(loaded(File(rebuild, parts)), x)


@pytest.mark.parametrize("kind", ["csr", "packed", "heads"])
def test_files_of_the_second_version_are_read(kind: str) -> None:
    x = stored(kind)
    kept = File(rebuild_stored, dict(enumerate(stored_parts(x._kept))))  # type: ignore[arg-type]
    file = File(rebuild_sparse_of, {"kept": kept, "grad": False, "parameter": False, "order": x._order})
    assert torch.equal(loaded(file), x)


def test_copies_are_not_checked() -> None:
    """A copy of what is there costs no look at it."""
    with mock.patch.object(file_format, "has_values", side_effect=AssertionError("looked at")):
        for kind in ALL_KINDS:
            x = stored(kind)
            copy.copy(x)
            copy.deepcopy(x)
        with pytest.raises(AssertionError, match="looked at"):
            pickle.loads(pickle.dumps(x))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # the files, torch 2.11 says
@pytest.mark.parametrize("kind", ["dense", "csr"])
@pytest.mark.parametrize("way", [copy.copy, loaded])
def test_copies_and_files_in_compiled_functions(way: Callable[[Any], Any], kind: str) -> None:
    """There the compiled function breaks off, and neither is looked into."""
    x = stored(kind)
    run = torch.compile(lambda t: way(t * 2) + 1, backend="eager")
    assert torch.equal(run(x), x * 2 + 1)


def test_a_copy_shares_what_is_stored() -> None:
    for kind in ("dense", "csr"):
        x = stored(kind)
        mine, theirs = (parts_of(t)[1] for t in (x, copy.copy(x)))
        name = "data" if kind == "dense" else "values"
        assert mine[name].data_ptr() == theirs[name].data_ptr()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_what_has_no_values_is_not_asked_for_them(kind: str) -> None:
    buffer = io.BytesIO()
    torch.save(stored(kind), buffer)
    buffer.seek(0)
    x = torch.load(buffer, weights_only=True, map_location="meta")
    assert x.device.type == "meta"
    assert x.shape == stored(kind).shape


# --------------------------------------------------------------------------------------------------- what may be wrong
#
# Each way of being wrong changes the parts of a tensor and has a message. It is tried on a tensor of each kind of which
# another text is said, and every kind takes its turn.

Wrong = Callable[[Parts], Parts]


def changed(name: str, change: Callable[[Any], Any]) -> Wrong:
    """One part is another."""
    return lambda parts: {**parts, name: change(parts[name])}


def of_values(change: Callable[[Tensor], Any]) -> Wrong:
    return lambda parts: {**parts, (n := "data" if "data" in parts else "values"): change(parts[n])}


def piece(position: int, change: Callable[[Tensor], Any]) -> Wrong:
    """One index tensor is another."""

    def wrong(parts: Parts) -> Parts:
        pieces = list(parts["pieces"])
        pieces[position] = change(pieces[position].clone())
        return {**parts, "pieces": tuple(pieces)}

    return wrong


def put(position: int, value: int) -> Callable[[Tensor], Tensor]:
    """An index tensor with another entry (of COO in the last dimension)."""

    def change(index: Tensor) -> Tensor:
        index[..., position] = value
        return index

    return change


def swapped(index: Tensor) -> Tensor:
    """With the first two of a line, or of COO the first two elements, changed round."""
    index[..., [0, 1]] = index[..., [1, 0]]
    return index


def twice(index: Tensor) -> Tensor:
    index[..., 1] = index[..., 0]
    return index


def whole_numbers(parts: Parts) -> Parts:
    return {**of_values(lambda v: v.long())(parts), "requires_grad": True}


def extent(change: Callable[[bool, tuple[Any, ...], Tensor], Any]) -> Wrong:
    """An extent with other parts: whether it is the mask, what it knows of its dimensions, its boolean."""
    return changed("extent", lambda parts: change(*parts))


def of_there(change: Callable[[Tensor], Any]) -> Wrong:
    return extent(lambda is_mask, known, there: (is_mask, known, change(there)))


def knowing(of_time: Any) -> Wrong:
    return extent(lambda is_mask, known, there: (is_mask, ((("samples",), of_time, None),), there))


def stating(known: tuple[Any, ...], there: list[int], *counted: bool) -> Wrong:
    """Samples at these places, of which something else is stated."""
    of_time = ("positions", *known[:2], *(known[2:] or ((),)), *counted)
    places = torch.tensor(there, dtype=torch.int8)[None, :, None].expand(4, 6, 1)
    return extent(lambda *_: (False, ((("samples",), of_time, None),), places.clone()))


validity, values, layout, sizes, pieces, block, order = (
    partial(changed, part) for part in ("validity", "values", "layout", "sizes", "pieces", "block", "order")
)

WRONG: dict[str, tuple[Wrong, str, str]] = {
    "a number for an extent": (changed("extent", lambda _: 5), "its extent is its mask: None", "padded"),
    "an extent of nothing": (changed("extent", lambda _: ()), "and of its 0 factors is known: None", "padded"),
    "text for whether it is the mask": (extent(lambda _, *rest: ("yes", *rest)), "is its mask: 'yes'", "padded"),
    "knowledge of two factors": (extent(lambda m, k, t: (m, k * 2, t)), "its 1 factors is known: ", "padded"),
    "knowledge of text": (extent(lambda m, k, t: (m, ("abc",), t)), "knows 'abc' of its 3 dimensions", "padded"),
    "knowledge of two dimensions": (extent(lambda m, k, t: (m, (k[0][:2],), t)), "of its 3 dimensions", "padded"),
    "an unknown word": (knowing(("ragged",)), "what it knows of a dimension is \\('ragged',\\)", "padded"),
    "positions of numbers": (knowing(("positions", 1, 0, ())), "of a dimension is \\('positions', 1", "padded"),
    "parts of text": (knowing(("merged", "ab")), "the parts of a dimension .* are 'ab'", "padded"),
    "parts of negative size": (knowing(("merged", ((-1, None),))), "are \\(\\(-1, None\\),\\)", "padded"),
    "a factor without a boolean": (of_there(lambda t: None), "a factor of its extent is missing", "padded"),
    "a boolean of text": (of_there(lambda t: "abc"), "the type of its extent is str", "padded"),
    "a boolean of float": (of_there(lambda t: t.float()), "its extent has dtype torch.float32", "padded"),
    "a boolean of 2": (of_there(lambda t: t * 2), "its extent runs from 0 to 2", "padded"),
    "a boolean elsewhere": (of_there(lambda t: t.to("meta")), "its extent is on meta", "padded"),
    "a boolean too short": (of_there(lambda t: t[:, :-1]), "its extent has shape \\(4, 5, 1\\)", "padded"),
    "a boolean of features": (of_there(lambda t: t.repeat(1, 1, 2)), "and does not depend on each", "padded"),
    "what is valid and not there": (
        of_there(lambda t: torch.cat([t[:, :1], t[:, 1:] * 0], 1)),
        "an element is valid where its extent says",
        "padded",
    ),
    "a mask with holes for an extent": (
        extent(lambda _, *rest: (True, *rest)),
        "an element is invalid where its extent, which is its mask",
        "padded",
    ),
    "samples that begin later": (
        stating((True, True), [0, 1, 1, 1, 1, 1]),
        "samples begin at index 0 of dimension 1",
        "padded",
    ),
    "samples with gaps": (stating((True, False), [1, 0, 1, 1, 1, 1]), "follow one another along dimension 1", "padded"),
    "a sample without a position": (
        stating((False, False), [0, 0, 0, 0, 0, 0], True),
        "every sample has a position along dimension 1",
        "padded",
    ),
    "parts of another size": (
        knowing(("positions", False, False, ((2, None), (2, None)))),
        r"dimension 1 has 6 indices, and it states parts of \[2, 2\]",
        "padded",
    ),
    "a merged dimension of another size": (
        knowing(("merged", ((2, ("positions", True, True, ())), (2, None)))),
        r"dimension 1 has 6 indices, and it states parts of \[2, 2\]",
        "padded",
    ),
    "a part that begins later": (
        stating((False, False, ((4, ("positions", True, True, ())), (2, None))), [0, 1, 1, 1, 1, 1]),
        "samples begin at index 0 of dimension 1",
        "padded",
    ),
    "validity of bool": (validity(lambda v: v.bool()), "its validity has dtype torch.bool, not int8", "dense"),
    "validity of float": (validity(lambda v: v.float()), "its validity has dtype torch.float32", "coo"),
    "validity 7": (validity(lambda v: v * 7), "its validity runs from 0 to 7, and only 0 and 1 are allowed", "hybrid"),
    "validity -3": (validity(lambda v: v * -3), "its validity runs from -3 to 0", "csr"),
    "validity of text": (validity(lambda v: "abc"), "the type of its validity is str", "csc"),
    "validity too short": (
        validity(lambda v: v[:-1]),
        r"its validity has shape \(\d+.*, which does not fit",
        "dense bsr",
    ),
    "validity of more dimensions": (
        validity(lambda v: v[None]),
        r"its validity has shape \(1, .*does not fit",
        "dense bsc",
    ),
    "validity of fewer dimensions": (validity(lambda v: v[0]), "does not fit", "dense packed"),
    "validity elsewhere": (validity(lambda v: v.to("meta")), "its validity is on meta and its", "dense heads"),
    "sparse validity": (
        validity(lambda v: v.to_sparse()),
        "the layout of its validity is torch.sparse_coo, not torch.strided",
        "coo",
    ),
    "values of text": (of_values(lambda v: "abc"), "is str, not a plain tensor", "dense hybrid"),
    "masked values": (of_values(md.masked_tensor), "is MaskedTensor, not a plain tensor", "dense csr"),
    "sparse values": (of_values(lambda v: v.to_sparse()), "is torch.sparse_coo, not torch.strided", "dense csc"),
    "values that require grad": (
        of_values(torch.nn.Parameter),
        "requires_grad is set on its (data|values)",
        "dense bsr",
    ),
    "too few values": (values(lambda v: v[:-1]), "shape", "coo"),
    "too many values": (values(lambda v: torch.cat([v, v])), "shape", "hybrid"),
    "a number for values": (values(lambda v: v.sum()), "shape", "csr"),
    "values of other blocks": (values(lambda v: v[:, :1]), "shape", "bsc"),
    "an attribute of torch for layout": (layout(lambda _: "torch.hub"), "its layout is 'torch.hub', not one of", "csc"),
    "dense layout": (layout(lambda _: "torch.strided"), "its layout is 'torch.strided'", "bsr"),
    "a number for layout": (layout(lambda _: 5), "its layout is 5", "bsc"),
    "another number of pieces": (pieces(lambda p: p[:-1]), "index tensor", "packed"),
    "one piece too many": (pieces(lambda p: (*p, p[0])), "index tensor", "heads"),
    "a list of pieces": (pieces(list), "index tensor", "coo"),
    "pieces of text": (pieces(lambda p: ("abc",) * len(p)), "the type of its indices is str", "hybrid"),
    "negative sizes": (sizes(lambda s: (-4, *s[1:])), r"the sizes of its sparse dimensions are \(-4", "csr"),
    "sizes of float": (sizes(lambda s: tuple(map(float, s))), "the sizes of its sparse dimensions are", "csc"),
    "a list of sizes": (sizes(list), "the sizes of its sparse dimensions are", "bsr"),
    "no sizes": (sizes(lambda s: ()), "sparse dimensions, and its sizes are", "bsc packed"),
    "sizes of one dimension more": (sizes(lambda s: (3, *s)), "indices|lines|sizes", "coo csr csc bsr bsc heads"),
    "sizes too small": (sizes(lambda s: tuple(1 for _ in s)), "indices|divide", "hybrid packed csc bsr"),
    "two million lines": (
        sizes(lambda s: (*s[:-2], 2_000_000, 2_000_000)),
        r"\w+_indices have \d+ entries for each matrix, and \d+ (block )?(rows|columns) need",
        "packed csc bsr bsc",
    ),
    "indices of float": (
        piece(-1, lambda p: p.double()),
        "its indices have dtype torch.float64, not int64 or",
        "heads",
    ),
    "indices of int8": (piece(0, lambda p: p.to(torch.int8)), "its indices have dtype torch.int8", "coo"),
    "indices elsewhere": (piece(0, lambda p: p.to("meta")), "its indices are on meta and its values on cpu", "hybrid"),
    "indices of more dimensions": (piece(0, lambda p: p[None]), "its indices have shapes", "csr"),
    "too few indices": (piece(-1, lambda p: p[..., :-1]), "values|entries", "coo packed bsc"),
    "too many indices": (piece(-1, lambda p: torch.cat([p, p], -1)), "values|entries", "heads bsr"),
    "an index too large": (
        piece(-1, put(-1, 10**9)),
        "run from -?\\d+ to 1000000000, and (its size is|that dimension has size) \\d+",
        "coo csr",
    ),
    "a negative index": (piece(-1, put(0, -1)), "run from -1 to \\d+, and", "hybrid csc"),
    "an index twice": (piece(-1, twice), "its indices list an element twice, or are not in", "bsc"),
    "indices out of order": (piece(-1, swapped), "its indices list an element twice, or are", "packed"),
    "lines that begin late": (piece(0, put(0, 1)), "indices begin with 1, not with 0", "heads"),
    "lines that end late": (piece(0, put(-1, 10**9)), "indices end with 1000000000, and", "csr"),
    "lines that descend": (piece(0, put(1, 10**6)), "indices descend from 1000000 to", "csc"),
    "lines below zero": (piece(0, put(1, -5)), "indices descend from 0 to -5", "bsr"),
    "a line too few": (piece(0, lambda p: p[1:]), "entries for each matrix, and", "packed csc bsr bsc"),
    "no lines": (piece(0, lambda p: p[:0]), "indices have 0 entries", "heads csc bsr bsc"),
    "blocks of no size": (block(lambda _: (0, 2)), "its block size is", "bsr"),
    "blocks that do not divide": (block(lambda _: (3, 5)), "do not evenly divide a matrix of", "bsc"),
    "blocks of text": (block(lambda _: "ab"), "its block size is 'ab'", "bsr"),
    "no blocks": (block(lambda _: None), "its layout is .* and its block size None", "bsc"),
    "blocks of what has none": (block(lambda _: (1, 1)), r"its layout is .* and its block size \(1, 1\)", "heads"),
    "an order of too many": (order(lambda _: (1, 0, 3, 2, 4)), "the order of its", "coo bsr"),
    "an order with one twice": (order(lambda _: (0, 0, 1)), "the order of its", "hybrid"),
    "an order of text": (order(lambda _: "abc"), "dimensions is 'abc'", "csr"),
    "text for a flag": (
        lambda p: {**p, "requires_grad": "abc"},
        "requires_grad is 'abc', not True or False",
        "dense bsc",
    ),
    "a number for a flag": (lambda p: {**p, "is_parameter": 3}, "is_parameter is 3, not True or False", "packed"),
    "whole numbers that require grad": (
        whole_numbers,
        "it requires grad, which is not possible for dtype torch.int64",
        "heads",
    ),
}

CASES = [(kind, name) for name, (_, _, kinds) in WRONG.items() for kind in kinds.split()]


@pytest.mark.parametrize("kind, name", CASES)
def test_what_is_wrong_is_refused(kind: str, name: str) -> None:
    rebuild, parts = parts_of(stored(kind))
    wrong, message, _ = WRONG[name]
    file = File(rebuild, wrong(parts))
    with pytest.raises(ValueError, match=f"^this is not a saved masked tensor: .*({message})"):
        loaded(file)
    with pytest.raises(ValueError, match=r"The file is damaged, or was not written by saving a masked tensor\."):
        pickle.loads(pickle.dumps(file))


def test_something_of_every_kind_was_wrong() -> None:
    assert {kind for kind, _ in CASES} == set(ALL_KINDS)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lines_that_descend_by_more_than_their_dtype_holds(dtype: torch.dtype) -> None:
    """Differences of these are all positive, as far as the dtype knows."""
    rebuild, parts = parts_of(md.masked_tensor(torch.ones(3, 3)).to_sparse_csr())
    lines = torch.tensor([0, torch.iinfo(dtype).max, -2, 9], dtype=dtype)
    assert (lines.diff() >= 0).all()
    with pytest.raises(ValueError, match=f"crow_indices descend from {torch.iinfo(dtype).max} to -2"):
        loaded(File(rebuild, {**parts, "pieces": (lines, parts["pieces"][1].to(dtype))}))


def test_more_places_than_can_be_numbered() -> None:
    """Of which torch itself makes no tensor."""
    rebuild, parts = parts_of(md.masked_tensor(torch.ones(2, 2)).to_sparse())
    with pytest.raises(ValueError, match="more than int64 can number, and torch makes no such tensor"):
        loaded(File(rebuild, {**parts, "sizes": (2**62, 2**62)}))


def test_a_family_whose_extent_contradicts_its_mask_is_refused() -> None:
    x = md.masked_tensor(torch.ones(2, 3), torch.tensor([[False, True, True], [True, True, False]]))
    known = (("samples",), ("positions", True, True, ()))
    parts = (*mask_sharing.family_of(x).contents(), (True, (known,), None))
    with pytest.raises(ValueError, match="it states that samples begin at index 0 of dimension 1"):
        load(VERSION, "family", *parts)
