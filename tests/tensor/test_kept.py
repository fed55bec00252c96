"""What is remembered of masks and tensors does not grow without limit, and keeps nothing alive."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from op_registry.records import fill
from op_registry.records.validity import MOST_KEPT, Kept, kept_with

SIZES = range(2, MOST_KEPT + 40)


def used_at_every_size(parameter: Tensor) -> list[float]:
    """Results of one mask that broadcasts to every size."""
    return [float((parameter + torch.zeros(n)).sum()) for n in SIZES]


def test_a_mask_that_meets_ever_new_sizes_keeps_a_bounded_number_of_facts() -> None:
    parameter = md.masked_tensor(torch.ones(1), torch.tensor([True]))
    assert used_at_every_size(parameter) == list(SIZES)
    validity = (parameter + torch.zeros(3))._stored_validity
    assert len(kept_with(validity)) == MOST_KEPT
    assert used_at_every_size(parameter) == list(SIZES)  # also of what was dropped


def test_the_first_is_the_first_to_go_and_a_change_of_the_mask_ends_all() -> None:
    mask = torch.ones(2, dtype=torch.int8)
    for n in range(MOST_KEPT + 2):
        kept_with(mask)["number", n] = n
    assert [kept_with(mask).get(("number", n)) for n in (0, 1, 2, MOST_KEPT + 1)] == [None, None, 2, MOST_KEPT + 1]
    mask.zero_()
    assert len(kept_with(mask)) == 0


def test_threads_that_share_a_mask_fill_it_together() -> None:
    kept, errors = Kept(), []

    def work(name: int) -> None:
        try:
            for n in range(4 * MOST_KEPT):
                kept[name, n] = n
                assert kept.get((name, n)) in (n, None)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(kept) == MOST_KEPT


USES: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda x: x.sum(),
    "mean of rows": lambda x: x.mean(1),
    "amax of no dimension": lambda x: x.detach().amax(()),
    "softmax": lambda x: x.softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "sort": lambda x: x.sort(1),
    "matmul": lambda x: x @ x.t(),
    "a view": lambda x: x.view(24).relu().std(),
    "gradients": lambda x: (x.relu().softmax(1).sum(0) ** 2).sum().to_tensor(0.0).backward(),
    "a write": lambda x: x.detach().clone().index_fill_(0, torch.tensor([1]), 2.0).sum(),
}


@pytest.mark.parametrize("use", USES)
def test_nothing_that_is_remembered_keeps_a_mask_alive(use: str) -> None:
    """Not even until the garbage collector runs: no cycle is made."""
    before = len(fill.known_tensors)
    gc.disable()
    try:
        x = md.masked_tensor(torch.rand(4, 6), torch.rand(4, 6) > 0.4, requires_grad=True)
        data, mask = weakref.ref(x._data), weakref.ref(x._stored_validity)
        result = USES[use](x)
        del x, result
        assert data() is None
        assert mask() is None
        assert len(fill.known_tensors) == before
    finally:
        gc.enable()
