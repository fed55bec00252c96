"""Masked tensors in shared memory: what one process writes, values and validity, the others see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

import masked_dispatch as md

NAN = float("nan")
T, F = True, False
MASK = torch.tensor([[T, F, T], [F, T, T]])


def all_invalid(x: Tensor) -> md.MaskedTensor:
    return md.masked_tensor(torch.full(x.shape, NAN), torch.zeros(x.shape, dtype=torch.bool))


def state(x: Tensor) -> tuple[list[object], list[object]]:
    assert isinstance(x, md.MaskedTensor)
    return x.get_mask().tolist(), x.to_tensor(-1.0).tolist()


def sample(mask: Tensor | None) -> md.MaskedTensor:
    data = torch.arange(6.0).reshape(2, 3)
    return md.masked_tensor(data if mask is None else torch.where(mask, data, NAN), mask)


KINDS: dict[str, Callable[[], md.MaskedTensor]] = {
    "masked": lambda: sample(MASK),
    "all valid": lambda: sample(None),
    "broadcast mask": lambda: sample(MASK[:1]),
    "an extent": lambda: md.padded(sample(torch.tensor([[T, T, F], [T, F, F]]))),
    "transposed": lambda: sample(MASK).t(),  # type: ignore[dict-item,return-value]
    "the caller's data": lambda: md.as_masked_tensor(torch.arange(6.0).reshape(2, 3), MASK),
}
SPARSE: dict[str, Callable[[], md.MaskedTensor]] = {
    "coo": lambda: sample(MASK).to_sparse(),
    "csr": lambda: sample(MASK).to_sparse_csr(),
    "csc": lambda: sample(MASK).to_sparse_csc(),
    "bsr": lambda: sample(MASK).to_sparse_bsr((2, 1)),
    "bsc": lambda: sample(MASK).to_sparse_bsc((2, 1)),
    "packed": lambda: sample(MASK).to_packed().without_extent(),
    "all valid": lambda: sample(None).to_sparse(),
    "permuted": lambda: sample(MASK).to_sparse(1).t() * 1,  # type: ignore[dict-item,return-value]
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "fill_": lambda x: x.fill_(9.0),
    "copy_": lambda x: x.copy_(all_invalid(x)),
    "a row": lambda x: x[0].copy_(all_invalid(x[0])),
    "an index": lambda x: x.__setitem__((1, 0), 4.0),
    "index_put_": lambda x: x.index_put_((torch.tensor([0, 1]),) * 2, torch.tensor([7.0, 8.0])),
    "add_": lambda x: x.add_(all_invalid(x[:1])),
}
SPARSE_WRITES: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda x: x.mul_(3.0),
    "copy_": lambda x: x.copy_(all_invalid(x)),
    "add_": lambda x: x.add_(torch.ones(x.shape)),
    "an index": lambda x: x.__setitem__((1, 1), 4.0),
    "an invalid element": lambda x: x.copy_(x.mask_with(torch.tensor([[F], [T]]) if x.shape == (2, 3) else MASK.t())),
}


def in_a_child(work: Callable[[], object]) -> None:
    """Run `work` in a forked process."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(120)
    assert child.exitcode == 0


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_parent_sees_what_a_child_writes(kind: str, write: str) -> None:
    x, expected = KINDS[kind](), KINDS[kind]()
    row, before = x[1], x * 1
    kept = state(before)
    assert x.share_memory_() is x
    assert x.is_shared()
    assert state(x) == state(expected)
    WRITES[write](expected)
    in_a_child(lambda: WRITES[write](x))
    assert state(x) == state(expected)
    assert state(row) == state(expected[1])
    assert state(before) == kept
    assert state(x * 2) == state(expected * 2)


@pytest.mark.parametrize("write", SPARSE_WRITES)
@pytest.mark.parametrize("kind", SPARSE)
def test_the_parent_sees_what_a_child_writes_to_stored_elements(kind: str, write: str) -> None:
    x, expected = SPARSE[kind](), SPARSE[kind]()
    again, before = x.detach(), x * 1
    kept = state(before)
    x.share_memory_()
    assert x.is_shared()
    SPARSE_WRITES[write](expected)
    in_a_child(lambda: SPARSE_WRITES[write](x))
    assert state(x) == state(again) == state(expected)
    assert state(before) == kept
    result = state(x * 2)
    assert result == state(expected * 2)


@pytest.mark.parametrize("kind", [kind for kind in SPARSE if kind != "all valid"])
def test_a_write_that_would_store_other_elements_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "MASK", torch.tensor([[T, F, T], [F, F, F]]))
    x = SPARSE[kind]().share_memory_()
    before = state(x)
    with pytest.raises(md.MaskedSemanticsError, match="lies in shared memory: its indices cannot change there"):
        x.fill_(9.0)
    assert state(x) == before
    x.clone().fill_(9.0)


def test_results_do_not_follow_what_another_process_writes() -> None:
    x = sample(MASK).share_memory_()
    y, z = x * 2, x.sum(1)
    before = state(y), state(z)
    in_a_child(lambda: x.fill_(9.0))
    assert (state(y), state(z)) == before
    assert x.sum().item() == 54.0
    assert int(x.count()) == 6
    in_a_child(lambda: x.copy_(all_invalid(x)))
    assert int(x.count()) == 0
    assert not x.sum().get_mask()


def test_a_compiled_region_reads_and_writes_shared_memory() -> None:
    x = sample(MASK).share_memory_()

    def region(x: Tensor) -> Tensor:
        y = x * 2
        x[0] = 5.0
        return y

    before = state(x * 2)
    y = torch.compile(region, backend="aot_eager", fullgraph=True)(x)
    assert state(y) == before
    assert x.get_mask()[0].all()
    in_a_child(lambda: x.copy_(all_invalid(x)))
    assert not x.get_mask().any()
    assert state(y) == before


def test_gradients_of_a_parameter_in_shared_memory() -> None:
    """Training in several processes without locks (Hogwild)."""
    weight = torch.nn.Parameter(sample(MASK)).share_memory_()

    def step() -> None:
        (weight * 2).sum().backward()
        torch.optim.SGD([weight], lr=1.0).step()

    in_a_child(step)
    assert weight.grad is None
    assert state(weight) == (MASK.tolist(), torch.where(MASK, torch.arange(6.0).reshape(2, 3) - 2, -1.0).tolist())


def test_a_view_of_another_dtype_is_refused_by_name() -> None:
    x = md.masked_tensor(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(md.MaskedSemanticsError, match=r"share_memory_\(\) of a view of another dtype"):
        torch.view_as_real(x).share_memory_()


def echo(inbox: multiprocessing.Queue, outbox: multiprocessing.Queue) -> None:
    """Write to what comes, and say what was seen, until None comes. What came is kept until the next one does."""
    while (sent := inbox.get()) is not None:
        x, row = sent
        x.mul_(2)
        row.copy_(all_invalid(row))
        outbox.put(state(x))


@pytest.fixture(scope="module", params=["fork", "spawn"])
def echoing(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """The queues of a process that echoes: one for all tensors, because a spawned one imports torch first."""
    processes = multiprocessing.get_context(request.param)
    inbox, outbox = processes.Queue(), processes.Queue()
    child = processes.Process(target=echo, args=(inbox, outbox))
    child.start()
    yield inbox, outbox
    inbox.put(None)
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize("kind", [*KINDS, "csr"])
def test_what_is_sent_through_a_queue_lies_in_shared_memory(kind: str, echoing: tuple[Any, Any]) -> None:
    inbox, outbox = echoing
    x = SPARSE["csr"]() if kind == "csr" else KINDS[kind]()
    row = x.detach() if kind == "csr" else x[0]
    expected = x.clone()
    expected.mul_(2)
    (expected if kind == "csr" else expected[0]).copy_(all_invalid(row))
    inbox.put((x, row))
    seen = outbox.get(timeout=120)
    assert seen == state(x) == state(expected)
    assert state(row) == state(expected if kind == "csr" else expected[0])
    assert x.is_shared()


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.to_sparse()])
def test_a_result_that_requires_grad_is_not_sent(make: Callable[[md.MaskedTensor], md.MaskedTensor]) -> None:
    from multiprocessing.reduction import ForkingPickler

    x = make(md.masked_tensor(torch.ones(2, 3), MASK, requires_grad=True) * 2)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"Cowardly refusing to serialize non-leaf .* send x\.detach\(\)"):
        ForkingPickler.dumps(x)
