"""Whatever else a file says lies in the memory of a mask or of indices: once it is loaded, nothing does."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch.tensor.masked_tensor import rebuild
from masked_dispatch.tensor.sparse_tensor import rebuild_sparse, stored_parts
from op_registry.records.validity import without_kept
from storages import STORAGES


def by_torch(x: Any, **options: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, **options)


def by_pickle(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


LOADS: dict[str, Callable[[Any], Any]] = {"torch.load": by_torch, "pickle": by_pickle}


def sample(storage: str, dtype: torch.dtype = torch.float32) -> Any:
    mask = torch.tensor([[True, False, True, True], [False, True, True, True], [True, True, False, False]])
    if storage == "packed":
        mask = mask[..., None] & torch.tensor([True, False])
    data = torch.arange(mask.numel()).reshape(mask.shape).to(dtype)
    return STORAGES[storage](md.masked_tensor(data, mask))


def checked_pieces(x: Any) -> list[Tensor]:
    """The validity and index tensors, as they are."""
    if x.storage_layout is torch.strided:
        return [x._validity]
    _, validity, _, _, pieces, _ = stored_parts(x._kept)
    return [piece for piece in (validity, *pieces) if piece is not None]


def state(x: Any) -> tuple[Any, Any]:
    return x.to_dense().get_mask().tolist(), x.to_dense().to_tensor(-1).tolist()


CASES = [(s, n) for s in STORAGES for n in range(len(checked_pieces(sample(s))))]


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize(("storage", "piece"), CASES)
@pytest.mark.parametrize(
    "alias", [without_kept, lambda t: t[...], lambda t: t.as_strided((1,), (1,))], ids=["it", "a view", "a part"]
)
def test_a_write_to_what_a_file_says_shares_memory_reaches_nothing(
    storage: str, piece: int, alias: Any, load: Any
) -> None:
    x = sample(storage)
    again, other = load([x, alias(checked_pieces(x)[piece])])
    assert state(again) == state(x)
    again.sum(), again.sum(-1)  # facts about it are kept
    other.fill_(1 if other.dtype is torch.int8 else 10**6)
    assert state(again) == state(x)
    assert torch.equal(again.sum().to_tensor(-1), x.sum().to_tensor(-1))
    other, again = load([alias(checked_pieces(x)[piece]), x])
    other.fill_(1 if other.dtype is torch.int8 else 10**6)
    assert state(again) == state(x)


class Made:
    """Saved as a call of that function."""

    def __init__(self, function: Callable[..., Any], *parts: Any) -> None:
        self.made = function, parts

    def __reduce__(self) -> Any:
        return self.made


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_data_of_int8_in_the_memory_of_its_mask(load: Any) -> None:
    both = torch.tensor([1, 0, 1], dtype=torch.int8)
    x = load(Made(rebuild, both, both, False))
    x.mul_(-2)
    assert (x.count().item(), x.tolist() if x.count() == 3 else x.to_tensor(9).tolist()) == (2, [-2, 9, -2])


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("storage", [s for s in STORAGES if s != "dense"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.int32])
def test_values_in_the_memory_of_masks_and_indices(storage: str, dtype: torch.dtype, load: Any) -> None:
    """Each piece of the dtype of the values begins where they begin, which a file may say."""
    x = sample(storage, dtype)
    values, validity, layout, sizes, pieces, block = stored_parts(x._kept)
    memory = torch.zeros(4096, dtype=dtype)

    def placed(t: Tensor) -> Tensor:
        return memory[: t.numel()].view(t.shape)

    for n, piece in enumerate([validity, *pieces]):
        if piece is None or piece.dtype is not dtype:  # torch.save takes memory of one dtype alone
            continue
        parts = [placed(p).copy_(p) if m == n else p for m, p in enumerate([validity, *pieces])]
        order = x._order
        made = Made(
            rebuild_sparse, placed(values), parts[0], layout, sizes, tuple(parts[1:]), block, False, False, order
        )
        again = load(made)
        mask = again.to_dense().get_mask()
        again.mul_(0).add_(100)
        assert torch.equal(again.to_dense().get_mask(), mask)
        assert mask.tolist() == x.to_dense().get_mask().tolist()


def test_one_mask_of_several_tensors_stays_one() -> None:
    x = sample("dense")
    mask = x.exp()._validity
    assert mask is x._validity
    a, b = by_torch([x, x.exp()])
    assert a._validity is b._validity


def test_copies_share_as_before() -> None:
    x = sample("csr")
    assert copy.copy(x)._kept is x._kept
    a, b = by_torch([x, x.detach()])
    a.mul_(2)
    assert state(a) == state(b)
