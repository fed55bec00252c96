"""What dispatch modes and devices see of a call: no operator that plain torch would not ask them for."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import masked_dispatch as md
from op_registry.records.arguments import can_cast

DTYPES = [
    dtype
    for name, dtype in sorted(vars(torch).items())
    if isinstance(dtype, torch.dtype) and not re.match(r"q|bit|u?int[1-7]$", name)  # those hold no numbers to compute
]


def castable(pair: tuple[torch.dtype, torch.dtype]) -> bool | None:
    """torch's own answer; None where it has none."""
    try:
        return torch.can_cast(*pair)
    except RuntimeError:
        return None


def test_what_can_be_cast_is_what_torch_says() -> None:
    pairs = [pair for pair in itertools.product(DTYPES, DTYPES) if castable(pair) is not None]
    assert len(pairs) > 400
    assert [pair for pair in pairs if can_cast(*pair) is not castable(pair)] == []


class Seen(TorchDispatchMode):
    """Every operator that a dispatch mode is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("storage", [lambda x: x, lambda x: x.to_sparse_csr()], ids=["dense", "csr"])
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.mul_(x),
        lambda x: x.fill_(3),
        lambda x: torch.add(x, x, out=x),
        lambda x: x.to_tensor(torch.zeros(())),
    ],
    ids=["add_", "mul_", "fill_", "out", "to_tensor"],
)
def test_writes_ask_modes_for_no_cast(write: Callable[[Any], Tensor], storage: Callable[[Any], Any]) -> None:
    """Libraries that compute in a mode have no lowering for it."""
    data, mask = torch.arange(6.0).reshape(2, 3), torch.tensor([[True, False, True], [True, True, False]])
    x = storage(md.masked_tensor(data, mask))
    with Seen() as seen:
        write(x)
    assert seen.names
    assert "aten.can_cast.default" not in seen.names


# A device whose runtime this build of torch lacks: fake tensors on it have shapes, and nothing that asks it for more.
FAKE: dict[str, Callable[[Any], Tensor]] = {
    "repeat": lambda x: x.repeat(2, 1, 1),
    "tile": lambda x: x.tile(2),
    "joined": lambda x: torch.cat([x, x]),
    "expand": lambda x: x.expand(2, 2, 3),
    "sum": lambda x: x.sum(0),
    "softmax": lambda x: x.softmax(-1),
    "cumsum": lambda x: x.cumsum(0),
    "matmul": lambda x: x @ x.T,
    "sort": lambda x: x.sort().values,
    "quantile": lambda x: x.quantile(0.5, 0),
}


@pytest.mark.parametrize("name", FAKE)
@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_fake_tensors_of_a_device_that_is_not_there(device: str, name: str) -> None:
    if getattr(torch, device).is_available():
        pytest.skip(f"{device} is available: its fake tensors ask the real device")
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = torch.empty(2, 3, device=device)
        plain = FAKE[name](data)
        result = FAKE[name](md.masked_tensor(data, torch.empty(2, 3, dtype=torch.bool, device=device)))
    assert md.is_masked_tensor(result)
    assert (result.shape, result.dtype, result.device) == (plain.shape, plain.dtype, plain.device)
