"""What masked_dispatch/engine_internals.py assumes of torch, one test for each of its numbers in torch_internals.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import checkpoint

import masked_dispatch as md
from assumptions import assumed


def watched(told: Callable[[Any], None]) -> Any:
    """A wrapper without the key, which tells of every operator that is called on it."""

    class Watched(Tensor):
        inner: Tensor

        @staticmethod
        def of(inner: Tensor, requires_grad: bool = False) -> Watched:
            wrapper: Watched = Tensor._make_wrapper_subclass(Watched, inner.shape, requires_grad=requires_grad)
            wrapper.inner = inner
            return wrapper

        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            told(func)
            raw = torch.utils._pytree.tree_map_only(Watched, lambda t: t.inner, (args, kwargs or {}))
            return torch.utils._pytree.tree_map_only(Tensor, Watched.of, func(*raw[0], **raw[1]))

    return Watched


def in_the_engine() -> bool:
    """Asked in what `watched` tells: whether the autograd engine itself called the operator."""
    caller = sys._getframe(3)  # above this function, what was told and __torch_dispatch__
    return caller.f_code is torch.autograd.graph._engine_run_backward.__code__


def test_16_the_engine_adds_by_itself() -> None:
    # Its thread for a device, in which no frame is below that: tests_on_reference_device.py.
    frames = []

    def told(func: Any) -> None:
        if torch._C._current_graph_task_id() != -1 and "add" in str(func):
            frames.append((func, in_the_engine()))

    wrap = watched(told).of
    add = torch.ops.aten.add.Tensor
    with assumed("the engine calls add itself, in _engine_run_backward's frame, and hooks in their own"):
        for create_graph in (False, True):
            x = wrap(torch.ones(2), True)
            y = x * 2
            torch.autograd.grad((y.exp() + y.sin()).sum(), x, create_graph=create_graph)
            assert frames == [(add, True)]
            frames.clear()
        y = wrap(torch.ones(2), True) * 2
        y.register_hook(lambda gradient: gradient + gradient)
        y.sum().backward()
        assert frames == [(add, False)]
        assert torch._C._current_graph_task_id() == -1


def test_17_the_node_that_keeps_a_gradient_knows_its_leaf() -> None:
    leaf = torch.ones(2, requires_grad=True)
    seen = []

    def told(func: Any) -> None:
        if func is torch.ops.aten.add_.Tensor:
            seen.append((in_the_engine(), torch._C._current_autograd_node().variable is leaf))

    with assumed("the engine writes into .grad by add_, in a node that has the leaf as its variable"):
        leaf.grad = watched(told).of(torch.zeros(2))
        (leaf * 2).sum().backward()
        assert seen == [(True, True)]
        assert getattr(torch._C._current_autograd_node(), "variable", None) is None


def test_19_a_node_keeps_notes_for_when_it_is_evaluated() -> None:
    noted = []

    def told(func: Any) -> None:
        if func is torch.ops.aten.neg.default:
            noted.append(torch._C._current_autograd_node().metadata.get("note"))

    with assumed("the node that is evaluated can be asked for, and keeps what its metadata was given"):
        leaf = torch.ones(2, requires_grad=True)
        negative = -leaf
        negative.grad_fn.metadata["note"] = "recorded here"
        torch.autograd.grad(negative, leaf, watched(told).of(torch.ones(2)))
        assert noted == ["recorded here"]


def test_29_what_runs_later_is_made_where_it_is_called() -> None:
    made: list[Any] = []
    ran: list[Any] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            made.append(ctx)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            ran.append((ctx, sys._getframe(1).f_code.co_name))
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    Doubled.apply(x).sum().backward()
    with assumed("an autograd function makes its node in the call, and the node's method apply calls its backward"):
        assert [node for node, _ in ran] == made
        assert isinstance(made[0], torch.autograd.function.BackwardCFunction)
        assert isinstance(made[0].__dict__, dict)
        assert ran[0][1] in ("apply", "applied", "apply_boxed")
    with assumed("a checkpoint makes a _CheckpointFrame in the call, which keeps what it computes again"):
        frames: list[Any] = []
        with mock.patch.object(checkpoint, "_CheckpointFrame", noting(checkpoint._CheckpointFrame, frames)):
            y = checkpoint.checkpoint(torch.exp, x, use_reentrant=False)
        (frame,) = frames
        assert "recompute_fn" in frame.__dict__
        frame.recompute_fn = recompute = mock.Mock(wraps=frame.recompute_fn)
        y.sum().backward()
        assert recompute.call_count == 1


def noting(cls: type, instances: list[Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        instances.append(cls(*args, **kwargs))
        return instances[-1]

    return make


def test_35_the_older_vmap_takes_the_batch_dimension_off_in_one_function() -> None:
    x = md.masked_tensor(torch.ones(2), torch.tensor([True, False]), requires_grad=True)
    with assumed("results of the older vmap pass _unwrap_batched, and their batch dimension is in front"):
        (batch,) = torch.autograd.grad((x * 3).to_tensor(0.0), x, torch.eye(2), is_grads_batched=True)
        assert torch.equal(batch.to_tensor(0.0), torch.tensor([[3.0, 0.0], [0.0, 0.0]]))
        assert torch.equal(batch.get_mask(), torch.tensor([[True, False]] * 2))
