"""x.record_stream(s) tells the allocator about every tensor of x: data, mask and indices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import masked_dispatch as md

MASK = torch.tensor([[True, False], [True, True]])


@pytest.fixture
def recorded() -> Iterator[list[tuple[torch.dtype, torch.Stream]]]:
    """What the allocator of the CPU, which has no streams, would have been told."""
    calls: list[tuple[torch.dtype, torch.Stream]] = []
    library = torch.library.Library("aten", "IMPL")
    library.impl("record_stream", lambda tensor, stream: calls.append((tensor.dtype, stream)), "CPU")
    yield calls
    library._destroy()


@pytest.mark.parametrize(
    ("x", "dtypes"),
    [
        (md.masked_tensor(torch.ones(2, 2)), [torch.float32]),
        (md.masked_tensor(torch.ones(2, 2), MASK), [torch.float32, torch.int8]),
        (md.masked_tensor(torch.ones(2, 2), MASK).to_sparse(), [torch.float32, torch.int64]),
        (md.masked_tensor(torch.ones(2, 2), MASK).to_sparse(1).t(), [torch.float32, torch.int8, torch.int64]),
        (md.masked_tensor(torch.ones(2, 2), MASK).to_sparse_csr(), [torch.float32, torch.int64, torch.int64]),
        (
            md.masked_tensor(torch.ones(2, 2), MASK).to_sparse_bsr((2, 2)),
            [torch.float32, torch.int8, torch.int64, torch.int64],
        ),
    ],
    ids=["all valid", "dense", "coo", "permuted", "csr", "bsr"],
)
def test_of_everything_that_is_stored(
    recorded: list[tuple[torch.dtype, torch.Stream]], x: md.MaskedTensor, dtypes: list[torch.dtype]
) -> None:
    before = (x.to_tensor(0), x.get_mask())
    stream = torch.Stream(device="cpu")
    with md.densify("never"):
        assert x.record_stream(stream) is None
    assert [dtype for dtype, _ in recorded] == dtypes
    assert all(told == stream for _, told in recorded)
    assert torch.equal(x.to_tensor(0), before[0])
    assert torch.equal(x.get_mask(), before[1])


def test_of_a_parameter(recorded: list[tuple[torch.dtype, torch.Stream]]) -> None:
    x = torch.nn.Parameter(md.masked_tensor(torch.ones(2, 2), MASK))
    x.record_stream(torch.Stream(device="cpu"))
    assert len(recorded) == 2


def test_where_there_are_no_streams_torch_says_so() -> None:
    x: Tensor = md.masked_tensor(torch.ones(2, 2), MASK)
    with pytest.raises(NotImplementedError, match="record_stream"):
        x.record_stream(torch.Stream(device="cpu"))


@pytest.mark.parametrize("stored", [lambda x: x, lambda x: x.to_sparse(), lambda x: x.to_sparse_csr()])
def test_memory_is_pinned_where_torch_can(stored: Callable[[md.MaskedTensor], md.MaskedTensor]) -> None:
    x = stored(md.masked_tensor(torch.ones(2, 2), MASK))
    assert not x.is_pinned()
    if torch.accelerator.is_available():
        pinned = x.pin_memory()
        assert pinned.is_pinned()
        assert torch.equal(pinned.get_mask(), MASK)
    else:
        with pytest.raises(RuntimeError) as plain:  # in the words of torch's build
            torch.ones(2, 2).pin_memory()
        with pytest.raises(RuntimeError, match=re.escape(str(plain.value))):
            x.pin_memory()
