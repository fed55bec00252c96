"""Compiled functions in which autograd runs: backward, hooks, optimizers. The graph breaks there, and Dynamo then
watches every frame of Python that the autograd engine or torch calls. Those of this library run as they are.
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import masked_dispatch as md
from compiled_regions import same
from op_registry.records.fill import OwnFunction

pytestmark = pytest.mark.usefixtures("fresh_compiler")

LENGTHS = torch.tensor([6, 3])


def holes() -> md.MaskedTensor:
    return md.masked_tensor(torch.randn(2, 6, 4), torch.rand(2, 6, 4) > 0.3)


def padded() -> md.MaskedTensor:
    return md.from_lengths(torch.randn(2, 6, 4), LENGTHS)


STORAGES: dict[str, Callable[[], md.MaskedTensor]] = {
    "holes": holes,
    "padded": padded,
    "padded, with holes": lambda: md.padded(holes().mask_with(padded().get_mask()), padded().get_mask()),
    "packed": lambda: padded().to_packed(),
    "coo": lambda: holes().to_sparse(),
    "csr": lambda: holes()[0].to_sparse_csr(),
}


class Net(nn.Module):
    """Its results, of the shape of its input, are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sin() / 2 + ctx.saved_tensors[0].numel()


def loss_of(y: Tensor) -> Tensor:
    return y.pow(2).mean().to_tensor(0.0)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def backward(net: Net, x: Tensor) -> Any:
    loss = net(x).pow(2).mean()
    loss.backward()
    return loss.detach()


def backward_twice(net: Net, x: Tensor) -> Any:
    for _ in range(2):
        loss_of(net(x)).backward()
    return [p.grad for p in net.parameters()]


def gradients_asked_for(net: Net, x: Tensor) -> Any:
    return torch.autograd.grad(net(x).pow(2).mean(), list(net.parameters()))


def gradient_of_a_leaf(net: Net, x: Tensor) -> Any:
    x = leaf(x)
    loss_of(net(x) + x).backward()
    return x.grad


def gradient_of_views(net: Net, x: Tensor) -> Any:
    x = leaf(x)
    (loss_of(net(x)[1:]) + loss_of(x.transpose(0, 1))).backward()
    return x.grad


def gradient_of_a_write(net: Net, x: Tensor) -> Any:
    x = leaf(x)
    y = net(x)
    y.mul_(2).tanh_()
    loss_of(y).backward()
    return x.grad


def optimizer(net: Net, x: Tensor) -> Any:
    steps = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        steps.zero_grad()
        loss_of(net(x)).backward()
        steps.step()
    return list(net.parameters())


def optimizer_of_a_masked_parameter(net: Net, x: Tensor) -> Any:
    p = leaf(x)
    steps = torch.optim.Adam([p], lr=0.1)
    for _ in range(2):
        steps.zero_grad(set_to_none=False)
        loss_of(net(p)).backward()
        steps.step()
    return p.detach()


def tensor_hooks(net: Net, x: Tensor) -> Any:
    x = leaf(x)
    y = net(x)
    seen: list[Tensor] = []
    y.register_hook(seen.append)
    y.register_hook(lambda grad: grad * 2)
    loss_of(y).backward()
    return seen[0], x.grad


def hooks_of_nodes(net: Net, x: Tensor) -> Any:
    x = leaf(x)
    y = net(x)
    node = y.grad_fn
    assert node is not None
    node.register_prehook(lambda grads: tuple(grad * 2 for grad in grads))
    node.register_hook(lambda grads, _: tuple(grad if grad is None else grad * 3 for grad in grads))
    loss_of(y).backward()
    return x.grad


def hooks_after_accumulation(net: Net, x: Tensor) -> Any:
    x = leaf(x)
    seen: list[Tensor] = []
    for p in (x, net.out.weight):
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad * 2))
    loss_of(net(x)).backward()
    return sorted(seen, key=lambda grad: tuple(grad.shape)), x.grad


def hook_of_several(net: Net, x: Tensor) -> Any:
    y = net(leaf(x))
    seen: list[Any] = []
    register_multi_grad_hook([y, net.out.weight], lambda grads: seen.append([grad * 2 for grad in grads]))
    loss_of(y).backward()
    return seen[0]


def hooks_of_modules(net: Net, x: Tensor) -> Any:
    seen: list[Any] = []
    handles = [
        net.register_full_backward_hook(lambda module, given, grads: seen.append((given[0] * 2, grads[0] * 2))),
        net.out.register_forward_hook(lambda module, args, y: y * 2),
    ]
    x = leaf(x)
    loss_of(net(x)).backward()
    for handle in handles:
        handle.remove()
    return seen[0], x.grad


def hooks_of_saved_tensors(net: Net, x: Tensor) -> Any:
    x = leaf(x)
    with saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved):
        loss = loss_of(net(x))
    loss.backward()
    return x.grad


def recomputed(net: Net, x: Tensor) -> Any:
    x = leaf(x)
    loss_of(checkpoint(net, x, use_reentrant=False)).backward()
    return x.grad


def recomputed_reentrantly(net: Net, x: Tensor) -> Any:
    x = leaf(x)
    loss_of(checkpoint(net, x, use_reentrant=True)).backward()
    return x.grad


def function_of_another(net: Net, x: Tensor) -> Any:
    x = leaf(x)
    loss_of(Halved.apply(net(x))).backward()
    return x.grad


def sparse_gradient(net: Net, x: Tensor) -> Any:
    table = nn.Parameter(net.hidden.weight.detach().clone())
    index = md.masked_tensor(torch.tensor([0, 3, 3, 1]), torch.tensor([True, True, True, False]))
    for _ in range(2):
        loss_of(F.embedding(index, table, sparse=True)).backward()
    return table.grad


def products_of_matrices(net: Net, x: Tensor) -> Any:
    x = leaf(x if x.dim() == 2 else x[0].clone())
    w = net.hidden.weight.detach().clone().requires_grad_()
    loss_of(x @ w.mT).backward()
    return x.grad, w.grad


def sums(net: Net, x: Tensor) -> Any:
    x = leaf(x)
    (loss_of(x.sum(0)) + loss_of(x.sum(-1)) + loss_of(x.softmax(-1))).backward()
    return x.grad


@torch.compiler.disable
def outside(x: Tensor, w: Tensor, function: Callable[..., Tensor]) -> Tensor:
    """A result that no graph computes, so that the engine calls the library's own functions for it."""
    return function(x, w)


def second_derivatives(net: Net, x: Tensor) -> Any:
    x = leaf(x if x.dim() == 2 else x[0].clone())
    w = net.hidden.weight.detach().clone().requires_grad_()
    loss = outside(x, w, lambda x, w: loss_of(x @ w.mT))
    of_x, of_w = torch.autograd.grad(loss, [x, w], create_graph=True)
    (loss_of(of_x) + of_w.pow(2).sum()).backward()
    return x.grad, w.grad


def large_tensors(net: Net, x: Tensor) -> Any:
    x = leaf(x.to_dense())
    loss = outside(x, net.out.bias, lambda x, bias: loss_of(x.repeat_interleave(1000, -2).softmax(-1) * bias))
    loss.backward()
    return x.grad


def plain_sparse_tensors(net: Net, x: Tensor) -> Any:
    x = leaf(x)
    loss = outside(x, x, lambda x, y: loss_of(md.as_masked_tensor((x * y).to_torch_sparse())))
    loss.backward()
    return x.grad


def copied_printed_and_saved(net: Net, x: Tensor) -> Any:
    x = leaf(x)
    loss_of(net(x)).backward()
    saved = io.BytesIO()
    torch.save(x.grad, saved)
    saved.seek(0)
    assert repr(x.grad) == str(x.grad) != ""
    return copy.copy(x.grad), copy.deepcopy(x), torch.load(saved)


STEPS: dict[str, Callable[[Net, Tensor], Any]] = {
    step.__name__.replace("_", " "): step
    for step in (
        backward,
        backward_twice,
        gradients_asked_for,
        gradient_of_a_leaf,
        gradient_of_views,
        gradient_of_a_write,
        optimizer,
        optimizer_of_a_masked_parameter,
        tensor_hooks,
        hooks_of_nodes,
        hooks_after_accumulation,
        hook_of_several,
        hooks_of_modules,
        hooks_of_saved_tensors,
        recomputed,
        recomputed_reentrantly,
        function_of_another,
        sparse_gradient,
        products_of_matrices,
        sums,
        second_derivatives,
        large_tensors,
        plain_sparse_tensors,
        copied_printed_and_saved,
    )
}


def run(step: Callable[..., Any], x: Tensor, backend: str | None) -> Any:
    """What a step gives, and the gradients of the parameters; or the refusal that it raises."""
    torch.manual_seed(1)
    net = Net()
    call = step if backend is None else torch.compile(step, backend=backend)
    try:
        return call(net, x), [p.grad for p in net.parameters() if p.grad is not None]
    except md.MaskedSemanticsError as refusal:
        return refusal


@contextmanager
def frames_that_dynamo_compiles() -> Iterator[list[str]]:
    """The frames of this library that Dynamo compiles by themselves."""
    from torch._dynamo import convert_frame

    own: list[str] = []
    compile_frame = convert_frame._compile

    def recording(code: CodeType, names: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if str(names.get("__name__")).partition(".")[0] in ("masked_dispatch", "op_registry"):
            own.append(f"{code.co_qualname} in {names['__name__']}")
        return compile_frame(code, names, *args, **kwargs)

    with mock.patch.object(convert_frame, "_compile", recording):
        yield own


# Before any backend runs, Dynamo fails to clean up after a graph that reads `.grad` of a leaf that the region makes.
NOT_TRACED = pytest.mark.xfail(
    strict=True, raises=InternalTorchDynamoError, reason="Dynamo's own error: 'Tried to erase Node p'"
)


def marks_of(step: str, storage: str) -> Any:
    fails = step == "optimizer of a masked parameter" and storage in ("packed", "coo", "csr")
    return NOT_TRACED if fails else ()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # Dynamo's, of hooks and saved tensors
@pytest.mark.parametrize(
    "step, storage, backend",
    # Each step and each storage meets both backends.
    [
        pytest.param(step, storage, ("eager", "aot_eager")[(row + column) % 2], marks=marks_of(step, storage))
        for row, step in enumerate(STEPS)
        for column, storage in enumerate(STORAGES)
    ],
)
def test_autograd_inside_a_region(step: str, storage: str, backend: str) -> None:
    x = STORAGES[storage]()
    wanted = run(STEPS[step], x, None)
    with frames_that_dynamo_compiles() as own:
        found = run(STEPS[step], x, backend)
    assert own == []
    assert type(found) is type(wanted), found
    if not isinstance(wanted, md.MaskedSemanticsError):
        same(found, wanted)


def functions_of(kind: type) -> set[type]:
    return {kind, *(function for derived in kind.__subclasses__() for function in functions_of(derived))}


def test_every_function_of_the_library_has_a_backward_in_some_step() -> None:
    elsewhere = ("masked_dispatch.distributed", "op_registry.conformance", "masked_dispatch.interop.torch_maskedtensor")
    functions: dict[CodeType, type] = {
        function.backward.__code__: function  # type: ignore[attr-defined]
        for function in functions_of(OwnFunction)
        if "backward" in vars(function)
        and function.__module__.startswith(("masked_dispatch", "op_registry"))
        and not function.__module__.startswith(elsewhere)
    }
    called = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in functions:
            called.add(functions[frame.f_code])

    for make in STORAGES.values():
        x = make()
        for step in STEPS.values():
            sys.setprofile(profile)
            try:
                run(step, x, None)
            finally:
                sys.setprofile(None)
    assert called == set(functions.values())
