"""What masked_dispatch/engine_internals.py assumes of torch, by the numbers in torch_internals.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import checkpoint

from masked_dispatch.api.construct import masked_tensor
from masked_dispatch.assumptions.checks import assumed, assumption, expect, expect_equal, replaced, wrapper_class
from masked_dispatch.engine_internals import become_node_of
from masked_dispatch.torch_internals import apply_outside_of_functorch


def in_the_engine() -> bool:
    """Asked in what a wrapper tells: whether the autograd engine itself called the operator."""
    caller = sys._getframe(3)  # above this function, what was notified and __torch_dispatch__
    return caller.f_code is torch.autograd.graph._engine_run_backward.__code__


@assumption(16, "the engine calls add itself, in _engine_run_backward's frame, and hooks in their own")
def the_engine_adds_by_itself() -> None:
    # Its thread for a device, in which no frame is below that: tests_on_reference_device.py.
    frames: list[tuple[Any, bool]] = []

    def noticed(func: Any) -> None:
        if torch._C._current_graph_task_id() != -1 and "add" in str(func):
            frames.append((func, in_the_engine()))

    wrap = wrapper_class(noticed).of
    add = torch.ops.aten.add.Tensor
    for create_graph in (False, True):
        x = wrap(torch.ones(2), True)
        y = x * 2
        torch.autograd.grad((y.exp() + y.sin()).sum(), x, create_graph=create_graph)
        expect_equal(frames, [(add, True)])
        frames.clear()
    y = wrap(torch.ones(2), True) * 2
    y.register_hook(lambda gradient: gradient + gradient)
    y.sum().backward()
    expect_equal(frames, [(add, False)])
    expect_equal(torch._C._current_graph_task_id(), -1)


@assumption(17, "the engine writes into .grad by add_, in a node that has the leaf as its variable")
def the_node_that_keeps_a_gradient_knows_its_leaf() -> None:
    leaf = torch.ones(2, requires_grad=True)
    seen: list[tuple[bool, bool]] = []

    def noticed(func: Any) -> None:
        if func is torch.ops.aten.add_.Tensor:
            node: Any = torch._C._current_autograd_node()
            seen.append((in_the_engine(), node.variable is leaf))

    leaf.grad = wrapper_class(noticed).of(torch.zeros(2))
    (leaf * 2).sum().backward()
    expect_equal(seen, [(True, True)])
    expect(getattr(torch._C._current_autograd_node(), "variable", None) is None)


@assumption(16, "the engine adds gradients with add, and calls Python from _engine_run_backward alone", silent=True)
def what_the_engine_calls_has_its_function_below() -> None:
    seen: list[tuple[Any, str]] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append((sys._getframe(1).f_code, type(g.grad_fn).__name__)))
    torch.autograd.grad((y.exp() + y.sin()).sum(), x, create_graph=True)
    expect_equal(seen, [(torch.autograd.graph._engine_run_backward.__code__, "AddBackward0")])


@assumption(17, "the engine writes into .grad, in a node that has the leaf as its variable", silent=True)
def a_gradient_is_accumulated_in_place() -> None:
    leaf = torch.ones(2, requires_grad=True)
    kept = leaf.grad = torch.ones(2)
    node: Any = torch.autograd.graph.get_gradient_edge(leaf).node
    leaf.sum().backward()
    expect((leaf.grad is kept, kept._version, kept.tolist()) == (True, 1, [2, 2]), leaf.grad)
    expect(node.variable is leaf)


@assumption(19, "the node that is evaluated can be asked for, and keeps what its metadata was given")
def a_node_keeps_notes_for_when_it_is_evaluated() -> None:
    noted: list[Any] = []

    def noticed(func: Any) -> None:
        if func is torch.ops.aten.neg.default:
            node: Any = torch._C._current_autograd_node()
            noted.append(node.metadata.get("note"))

    leaf = torch.ones(2, requires_grad=True)
    negative: Any = -leaf
    negative.grad_fn.metadata["note"] = "recorded here"
    torch.autograd.grad(negative, leaf, wrapper_class(noticed).of(torch.ones(2)))
    expect_equal(noted, ["recorded here"])


@assumption(29)
def what_runs_later_is_made_where_it_is_called() -> None:
    made: list[Any] = []
    ran: list[Any] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            made.append(ctx)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            ran.append((ctx, sys._getframe(1).f_code.co_name))
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    Doubled.apply(x).sum().backward()
    with assumed("an autograd function makes its node in the call, and the node's method apply calls its backward"):
        expect_equal([node for node, _ in ran], made)
        expect(isinstance(made[0], torch.autograd.function.BackwardCFunction), made)
        expect(isinstance(made[0].__dict__, dict), made[0].__dict__)
        expect(ran[0][1] in ("apply", "applied", "apply_boxed"), ran)
    with assumed("a checkpoint makes a _CheckpointFrame in the call, which keeps what it computes again"):
        frames: list[Any] = []
        with replaced(checkpoint, "_CheckpointFrame", noting(checkpoint._CheckpointFrame, frames)):
            y = checkpoint.checkpoint(torch.exp, x, use_reentrant=False)
        (frame,) = frames
        expect("recompute_fn" in frame.__dict__, list(frame.__dict__))
        frame.recompute_fn = recompute = mock.Mock(wraps=frame.recompute_fn)
        y.sum().backward()
        expect_equal(recompute.call_count, 1)


def noting(cls: Any, instances: list[Any]) -> Callable[..., Any]:
    """In place of a class, and keeping what it makes."""

    def make(*args: Any, **kwargs: Any) -> Any:
        instances.append(cls(*args, **kwargs))
        return instances[-1]

    return make


@assumption(35, "results of the older vmap pass _unwrap_batched, and their batch dimension is in front")
def the_older_vmap_takes_the_batch_dimension_off_in_one_function() -> None:
    x: Any = masked_tensor(torch.ones(2), torch.tensor([True, False]), requires_grad=True)
    (batch,) = torch.autograd.grad((x * 3).to_tensor(0.0), x, torch.eye(2), is_grads_batched=True)
    expect_equal(batch.to_tensor(0.0).tolist(), [[3.0, 0.0], [0.0, 0.0]])
    expect_equal(batch.get_mask().tolist(), [[True, False]] * 2)


@assumption(
    47, "apply is a class method of Function, and a node's class says whose backward the engine calls", silent=True
)
def a_node_may_become_one_of_a_derived_class() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    class Derived(Doubled):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * 3

    expect(isinstance(torch.autograd.Function.__dict__["apply"], classmethod))
    x = torch.ones(2, requires_grad=True)
    y: Any = apply_outside_of_functorch.__get__(None, Doubled)(x)
    expect(become_node_of(y.grad_fn, Doubled, Derived), y.grad_fn)
    y.sum().backward()
    expect(x.grad is not None and x.grad.tolist() == [3, 3], x.grad)
