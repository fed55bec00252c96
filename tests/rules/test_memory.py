"""Memory: peaks of what needs no more than a filled copy, as torch's profiler counts them; streams; pinned memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import masked_dispatch as md
from op_registry.ops.scans import sorting
from op_registry.records.dense import Dense
from op_registry.records.slices import filled_behind

SIZE = 1024
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A fill's slices grow with the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def peak(call: Callable[[], object]) -> int:
    """The bytes that a call allocates at its highest, less what is freed before; of its second run."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        result = call()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    del result
    return highest


# Each with the most that it may need beyond plain torch, as a multiple of the data.
CALLS: dict[str, tuple[Callable[[Tensor], object], float]] = {
    "sum": (lambda x: x.sum(), 1.2),
    "sum of rows": (lambda x: x.sum(1), 1.2),
    "mean of columns": (lambda x: x.mean(0), 1.2),
    "prod": (lambda x: x.prod(1), 1.2),
    "norm": (lambda x: x.norm(), 1.2),
    "amax": (lambda x: x.amax(1), 1.2),
    "argmax": (lambda x: x.argmax(1), 1.2),
    "var": (lambda x: x.var(1), 1.2),
    "std of all": (lambda x: x.std(), 1.2),
    "softmax": (lambda x: x.softmax(1), 1.2),
    "sort": (lambda x: x.sort(1), 1.2),
    "descending": (lambda x: x.sort(1, descending=True), 1.2),
    "matmul": (lambda x: x @ torch.ones(SIZE, SIZE), 1.2),
    # torch selects without sorting, and tells nothing of which of equal elements it takes: here a sort decides, some
    # slices at a time.
    "topk": (lambda x: x.topk(5, 1), 1.2),
    "median": (lambda x: x.median(1), 1.2),
    "mode": (lambda x: x.mode(1), 2.5),
    "layer_norm": (lambda x: F.layer_norm(x, (SIZE,)), 1.2),
    "cdist": (lambda x: torch.cdist(x[:, :64], x[:, :64]), 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_peak_memory(name: str) -> None:
    call, allowed = CALLS[name]
    generator = torch.Generator().manual_seed(0)
    data, mask = torch.randn(SIZE, SIZE, generator=generator), torch.rand(SIZE, SIZE, generator=generator) < 0.5
    x = md.masked_tensor(data, mask)
    beyond = (peak(lambda: call(x)) - peak(lambda: call(data))) / data.nbytes
    assert beyond <= allowed
    assert beyond >= 0.5  # the instrument sees the filled copy


# ------------------------------------------------------------------------------ what takes less memory is still right


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *((torch.float32, value) for value in (0, 1, -3)),
        *((torch.float16, 1), (torch.int64, -3), (torch.int8, 0), (torch.complex64, 1)),
    ],
)
def test_a_fill_in_slices(dtype: torch.dtype, value: int) -> None:
    """More than one slice, and a last one that is shorter."""
    data = torch.arange(700 * 600).reshape(700, 600).remainder(100).to(dtype)
    mask = torch.rand(700, 600) < 0.5
    for record in (Dense(data, mask.to(torch.int8)), Dense(data.t(), mask.to(torch.int8).t())):
        assert record.validity is not None
        assert torch.equal(record.filled(value), torch.where(record.validity.bool(), record.data, value))
    assert torch.equal(data, torch.arange(700 * 600).reshape(700, 600).remainder(100).to(dtype))


PICKS: dict[str, Callable[..., Any]] = {
    "topk": lambda x, dim, keepdim: x.topk(2, dim),
    "kthvalue": lambda x, dim, keepdim: x.kthvalue(2, dim, keepdim),
    "median": lambda x, dim, keepdim: x.median(dim, keepdim),
    "nanmedian": lambda x, dim, keepdim: x.nanmedian(dim, keepdim),
    "mode": lambda x, dim, keepdim: x.mode(dim, keepdim),
}


@pytest.mark.parametrize("shape", [(5, 4), (1, 6, 4), (3, 1, 4), (2, 3, 5)])
@pytest.mark.parametrize("name", PICKS)
def test_some_slices_at_a_time(name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    data, mask = torch.randint(-3, 4, shape).float(), torch.rand(shape) < 0.6
    for dim in [d for d in range(-len(shape), len(shape)) if shape[d] > 1]:
        for keepdim in (False, True):
            for m in (mask, mask.narrow(dim, 0, 1), mask.select(0, 0)[None]):
                x = md.masked_tensor(data, m)
                monkeypatch.setattr(sorting, "_AT_ONCE", 1 << 18)
                whole = PICKS[name](x, dim, keepdim)
                monkeypatch.setattr(sorting, "_AT_ONCE", 6)
                for got, want in zip(PICKS[name](x, dim, keepdim), whole, strict=True):
                    md.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    ("row", "dtype", "room"),
    [
        *(([1, 2, 0], torch.float32, True), ([NAN, -INF, 0], torch.float32, False)),
        *(([3, -4, 0], torch.int8, True), ([127, -128, 0], torch.int8, False), ([1, 0, 0], torch.bool, False)),
    ],
)
def test_a_sort_fills_with_a_number_if_one_lies_behind_all(
    row: list[float], dtype: torch.dtype, room: bool, descending: bool
) -> None:
    """test_reductions.py sorts rows with room behind them and without."""
    record = Dense(torch.tensor([row]).to(dtype), torch.tensor([[1, 1, 0]], dtype=torch.int8))
    fill = filled_behind(record, descending, torch.tensor([[2]]))
    assert (fill is not None) is room


# ----------------------------------------------------- x.record_stream(s) tells the allocator about every tensor of x


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
