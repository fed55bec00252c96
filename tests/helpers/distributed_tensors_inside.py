"""Masked tensors whose data and mask are distributed tensors (DTensor), in every placement, against one process."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import masked_dispatch as md
from op_registry import MaskedSemanticsError
from process_groups import Checks
from refused_collectives import raises

CHECKS = Checks("DTensor inside: ")
DATA = torch.arange(24.0, dtype=torch.float64).view(4, 6) / 7
MASK = torch.arange(24).view(4, 6) % 5 > 0
PLACEMENTS: dict[str, Any] = {"Shard(0)": Shard(0), "Shard(1)": Shard(1), "Replicate": Replicate()}

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "abs": torch.abs,
    "add": lambda x: x + x,
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(0),
    "any": lambda x: (x > 1).any(1),
    "argmax": lambda x: x.argmax(1),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "attention, causal": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "cat": lambda x: torch.cat([x, x]),
    "clamp": lambda x: x.clamp(0.5, 2),
    "compare": lambda x: x > 1,
    "convolution of a sample": lambda x: F.conv1d(x, x[None, :, :3]),
    "convolution of samples": lambda x: F.conv1d(x[:, None], x[None, :1, :3], padding=1),
    "cos": torch.cos,
    "cumsum": lambda x: x.cumsum(1),
    "div": lambda x: x / (x + 1),
    "exp": torch.exp,
    "expand": lambda x: x.unsqueeze(0).expand(2, 4, 6),
    "gelu": F.gelu,
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "log_softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "matmul": lambda x: x @ x.t(),
    "mean": torch.mean,
    "mean of columns": lambda x: x.mean(0),
    "median": torch.median,
    "median of rows": lambda x: x.median(1).values,
    "mse_loss": lambda x: F.mse_loss(x, x + 1),
    "mul": lambda x: 3 * x * x,
    "norm": torch.norm,
    "permute": lambda x: x.permute(1, 0),
    "pow": lambda x: x**3,
    "prod": lambda x: x.prod(1),
    "relu": F.relu,
    "reshape": lambda x: x.reshape(-1),
    "rows": lambda x: x[1:],
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(1),
    "sqrt": torch.sqrt,
    "std": torch.std,
    "sub": lambda x: x - x.mean(1, keepdim=True),
    "sum": torch.sum,
    "sum of rows": lambda x: x.sum(1),
    "tanh": torch.tanh,
    "transpose": lambda x: x.t(),
    "var": lambda x: x.var(1),
    "where": lambda x: torch.where(x > 1, x, 2 * x),
    "argsort": lambda x: x.argsort(1),
    "cummax": lambda x: x.cummax(1).values,
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "median of all": torch.median,
    "mode": lambda x: x.mode(1).values,
    "msort": torch.msort,
    "sort": lambda x: x.sort(1).values,
    "sort of columns": lambda x: x.sort(0, descending=True).values,
    "topk": lambda x: x.topk(2, 1).values,
}


def distributed_masked(placement: Any, ranks: int, hidden: float, requires_grad: bool = False) -> tuple[Any, Any]:
    """The masked tensor, and its data."""
    mesh = init_device_mesh("cpu", (ranks,))
    data = distribute_tensor(torch.where(MASK, DATA, hidden), mesh, [placement]).requires_grad_(requires_grad)
    return md.as_masked_tensor(data, distribute_tensor(MASK, mesh, [placement])), data


def gathered(x: Any) -> Any:
    return md.as_masked_tensor(x.get_data().full_tensor(), x.get_mask().full_tensor())


def agrees(rank: int, ranks: int, name: str) -> None:
    function = FUNCTIONS[name]
    for placement in PLACEMENTS.values():
        for hidden in (torch.nan, torch.inf):
            x, _ = distributed_masked(placement, ranks, hidden)
            expected = function(md.as_masked_tensor(DATA, MASK))
            with nothing_logged("torch._subclasses.fake_tensor"):
                md.testing.assert_close(gathered(function(x)), expected)


@contextlib.contextmanager
def nothing_logged(name: str) -> Iterator[None]:
    """Fail for what is logged as an error inside: each rank would print it, with its traceback."""
    logged: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = logged.append  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not logged, [record.getMessage() for record in logged]


for name in FUNCTIONS:
    CHECKS[f"DTensor inside: {name}"] = lambda rank, ranks, name=name: agrees(rank, ranks, name)


@CHECKS.named("gradients are zero where invalid")
def gradients(rank: int, ranks: int) -> None:
    for placement in PLACEMENTS.values():
        x, data = distributed_masked(placement, ranks, torch.nan, requires_grad=True)
        (F.softmax(x, 1) * x).sum().to_tensor(0).backward()
        alone = DATA.clone().requires_grad_()
        (F.softmax(md.as_masked_tensor(alone, MASK), 1) * md.as_masked_tensor(alone, MASK)).sum().to_tensor(
            0
        ).backward()
        gradient: Tensor = data.grad.full_tensor()
        torch.testing.assert_close(gradient, alone.grad)


@CHECKS.named("placed, moved and taken apart, with derivatives")
def moved(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    factors = torch.arange(32).view(4, 8)  # on 4 ranks too, parts are equal: from_local infers the whole shape from one
    data, mask = factors.double() / 7, factors % 5 > 0
    for first, second in itertools.permutations([*PLACEMENTS.values()], 2):
        leaf: Any = md.masked_tensor(data.masked_fill(~mask, torch.nan), mask).requires_grad_()
        x = md.distributed.distribute(leaf, mesh, [first])
        assert x.is_leaf
        assert x.requires_grad
        assert x.get_data().placements == (first,)
        y = md.distributed.redistribute(x, mesh, [second])
        assert y.get_data().placements == y.get_mask().placements == (second,)
        again = md.distributed.from_local(md.distributed.to_local(y), mesh, [second])
        full = md.distributed.full_tensor(again)
        md.testing.assert_close(full.detach(), leaf.detach(), rtol=0, atol=0)
        (full * factors).sum().to_tensor(0).backward()
        expected = md.masked_tensor(factors.double(), mask)
        md.testing.assert_close(gathered(x.grad), expected)


@CHECKS.named("of sums that are pending: maxima, medians, pieces")
def pending(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    mask = distribute_tensor(MASK, mesh, [Replicate()])
    functions: dict[str, Callable[[Any], Any]] = {
        **{name: FUNCTIONS[name] for name in ("amax", "argmax", "mean", "median", "median of rows", "sqrt")},
        "max": lambda x: x.max(1).values,
        "unsafe_chunk": lambda x: x.unsafe_chunk(2, 1)[1],
        "unsafe_split": lambda x: x.unsafe_split(4, 1)[1],
    }
    for name, function in functions.items():
        share = DATA if rank == 0 else torch.zeros_like(DATA)
        x = md.as_masked_tensor(DTensor.from_local(share, mesh, [Partial()]), mask)
        expected = function(md.as_masked_tensor(DATA, MASK))
        md.testing.assert_close(gathered(function(x)), expected, check_stride=False, msg=name)


@CHECKS.named("context parallel attention is refused: torch's own has no form for a CPU, nor a mask")
def in_context_parallel(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    plain, x = DATA[None, None].clone(), md.masked_tensor(DATA, MASK)[None, None]
    with context_parallel(mesh, buffers=[plain], buffer_seq_dims=[2]):
        raises(
            NotImplementedError,
            lambda: F.scaled_dot_product_attention(plain, plain, plain, is_causal=True),
            "_scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy",
        )
        raises(MaskedSemanticsError, lambda: F.scaled_dot_product_attention(x, x, x), "the outermost type")


@CHECKS.named("of rank 0, of uneven parts, all valid")
def of_first(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    data = torch.arange(5.0)[:, None] + 10 * rank
    x = md.distributed.distribute(md.as_masked_tensor(data, data < 3 + 10 * rank), mesh, [Shard(0)])
    md.testing.assert_close(
        md.distributed.full_tensor(x),
        md.as_masked_tensor(torch.arange(5.0)[:, None]).mask_with(torch.arange(5)[:, None] < 3),
    )
    whole = md.distributed.distribute(md.as_masked_tensor(torch.ones(3) * rank), mesh, [Shard(0)])
    md.testing.assert_close(md.distributed.full_tensor(whole), md.as_masked_tensor(torch.zeros(3)))


@CHECKS.named("a masked tensor inside of a DTensor is refused, and what is not distributed")
def refused(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    x: Any = md.masked_tensor(DATA, MASK)
    text = "masked tensor of shape (4, 6): a masked tensor has to be the outermost type; inside a DTensor, its mask"
    for name, call in {
        "from_local": DTensor.from_local,
        "distribute": torch.distributed.tensor.distribute_tensor,
    }.items():
        raises(
            MaskedSemanticsError,
            lambda call=call: call(x, mesh, [Shard(0)]),
            text,
            f"masked_dispatch.distributed.{name}(x",
        )
    plain: Any = DATA
    raises(
        TypeError,
        lambda: md.distributed.distribute(plain, mesh, [Shard(0)]),
        "takes a masked tensor, got Tensor of shape (4, 6)",
    )
    raises(TypeError, lambda: md.distributed.full_tensor(x), "the data of this one of shape (4, 6) is a Tensor")
    raises(
        MaskedSemanticsError, lambda: md.distributed.distribute(x.to_sparse(), mesh, [Shard(0)]), "Pass x.to_dense()"
    )
    norm = torch.nn.LayerNorm(6)
    norm.weight = torch.nn.Parameter(md.masked_tensor(torch.ones(6), MASK[0]))  # type: ignore[assignment]
    raises(MaskedSemanticsError, lambda: parallelize_module(norm, mesh, SequenceParallel()), "the outermost type")
