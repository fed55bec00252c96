"""Masked tensors on a device whose backward runs in a thread of the engine's own: the reference device, or that in C++.

Run by test_reference_device.py and test_backward_on_device_in_cpp.py in a process of its own, or by itself:
``TESTED_DEVICE=cpp_device python -m pytest tests/helpers/tests_on_reference_device.py``.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import device_in_cpp
import masked_dispatch as md
from benchmarks.device.functions import FUNCTIONS, forward_and_backward, operands
from kernels_of_sequences import kernels_of_sequences
from masked_dispatch.conformance_subject import Eager
from op_registry import registry
from op_registry.authoring import Dense
from op_registry.conformance.law import Trial, outcome_of
from op_registry.conformance.laws.devices import on_device
from op_registry.conformance.laws.values import compress
from op_registry.conformance.masks import masking
from op_registry.conformance.reference_device import device_called, host_reads
from op_registry.conformance.sample import Sample
from op_registry.records import fill

DEVICE = os.environ.get("TESTED_DEVICE", "reference")
if DEVICE == device_in_cpp.NAME:
    device_in_cpp.set_up()
device_called(DEVICE)
of_the_reference_device = pytest.mark.skipif(DEVICE != "reference", reason="what the reference device alone does")
aten = torch.ops.aten

FIRST = torch.tensor([[True, False, True], [False, False, True]])
SECOND = torch.tensor([[True, True, False], [False, True, True]])


def masked(device: str, mask: Tensor = FIRST, requires_grad: bool = True) -> Any:
    data = torch.arange(1.0, 7.0).reshape(2, 3).masked_fill(~mask, torch.nan)
    return md.masked_tensor(data.to(device), mask.to(device), requires_grad=requires_grad)


# ---------------------------------------------------------------------------------------------------- the device itself


def test_backward_runs_in_a_thread_without_frames() -> None:
    """What makes the device worth having: on the CPU, backward runs in the thread and frames of its caller."""
    seen = []

    def hook(gradient: Tensor) -> None:
        seen.append((threading.current_thread() is threading.main_thread(), sys._getframe().f_back is None))

    for device in ("cpu", DEVICE):
        x = torch.ones(2).to(device).requires_grad_()
        x.register_hook(hook)
        x.exp().sum().backward()
    assert seen == [(True, False), (False, True)]


@of_the_reference_device
def test_operands_on_the_cpu_are_refused() -> None:
    x = torch.ones(2, device=DEVICE)
    with pytest.raises(
        RuntimeError, match=r"aten.add.Tensor: all tensors have to be on reference:0, but one is on cpu"
    ):
        x + torch.ones(2)
    assert (x + torch.tensor(2.0)).cpu().tolist() == [3, 3]


@of_the_reference_device
def test_a_tensor_has_the_shape_of_its_elements() -> None:
    x = torch.ones(2, 3, device=DEVICE)
    x.unsqueeze_(0).transpose_(1, 2)
    assert x.shape == (1, 3, 2)
    assert x.cpu().shape == x.shape


# ------------------------------------------------------------------------------- gradients that meet in the engine


def two_uses(x: Any, other: Any) -> list[Any]:
    (x * x).sum().backward()
    return [x.grad]


def under_two_masks(x: Any, other: Any) -> list[Any]:
    (x * other).sum().backward()
    y = x * 2
    (y * other).sum().backward()
    return [x.grad, other.grad]


def into_a_grad_that_is_there(x: Any, other: Any) -> list[Any]:
    for _ in range(2):
        (x.exp() * other).sum().backward()
    return [x.grad, other.grad]


def of_a_plain_leaf(x: Any, other: Any) -> list[Any]:
    leaf = torch.ones(2, 3).to(x.device).requires_grad_()
    ((leaf * x).sum() + (leaf * other).sum()).backward()
    return [leaf.grad, x.grad]


def to_second_order(x: Any, other: Any) -> list[Any]:
    (first,) = torch.autograd.grad((x * x * x * other).sum(), x, create_graph=True)
    (first * first).sum().backward()
    return [first, x.grad, other.grad]


def with_a_hook_that_adds(x: Any, other: Any) -> list[Any]:
    """A hook's sum is an ordinary one, valid where both are."""
    y = x * 1
    y.register_hook(lambda gradient: gradient + other.detach())
    y.sum().backward()
    return [x.grad]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient + gradient


def with_a_backward_that_adds(x: Any, other: Any) -> list[Any]:
    Doubled.apply(x.exp()).sum().backward()
    return [x.grad]


def stored_sparsely(x: Any, other: Any) -> list[Any]:
    a, b = (t.detach().to_sparse().requires_grad_() for t in (x, other))
    for _ in range(2):
        (a * a).sum().backward()
        (a * b).sum().backward()
    return [a.grad.to_dense(), b.grad.to_dense()]


GRADIENTS = [
    two_uses,
    under_two_masks,
    into_a_grad_that_is_there,
    of_a_plain_leaf,
    to_second_order,
    with_a_hook_that_adds,
    with_a_backward_that_adds,
    stored_sparsely,
]


@pytest.mark.parametrize("function", GRADIENTS, ids=lambda f: f.__name__)
def test_gradients_are_those_of_the_cpu(function: Callable[..., list[Any]]) -> None:
    there, here = (function(masked(device), masked(device, SECOND)) for device in (DEVICE, "cpu"))
    for mine, theirs in zip(there, here, strict=True):
        assert mine.device.type == DEVICE
        assert md.is_masked_tensor(mine) == md.is_masked_tensor(theirs)
        if md.is_masked_tensor(mine):
            assert torch.equal(mine.get_mask().cpu(), theirs.get_mask())
            mine, theirs = mine.to_tensor(0), theirs.to_tensor(0)
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach())


def test_a_layer_learns() -> None:
    losses = {}
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True).to(device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        x = md.from_lengths(torch.randn(2, 4, 6).to(device), torch.tensor([4, 2]).to(device))
        losses[device] = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = (layer(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses[device].append(loss.item())
    assert losses[DEVICE] == pytest.approx(losses["cpu"], rel=1e-5)
    assert losses[DEVICE][2] < losses[DEVICE][0]


def test_an_overlay_holds_in_the_backward_of_what_ran_in_it() -> None:
    """That of a write, whose node clones a part of a masked gradient, in the device's thread."""

    def doubled(grad: Dense, **options: Any) -> Dense:
        return grad.like(2 * grad.data)

    def written(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        table = x * 1
        table[0] = row
        return table

    for device in ("cpu", DEVICE):
        x = masked(device)
        row = x[1].detach().requires_grad_()
        with registry.overlay() as mine:
            mine.replace(aten.clone.default, doubled)
            inside = written(x, row)
        outside = written(x, row)
        gradients = [torch.autograd.grad(table.sum(), row)[0].to_tensor(0).cpu() for table in (inside, outside)]
        valid = row.get_mask().cpu()
        assert [g.tolist() for g in gradients] == [(2.0 * valid).tolist(), (1.0 * valid).tolist()], device


# ------------------------------------------------------------------------------------------- values of a Python device


def all_valid(data: Tensor, device: str) -> Any:
    """Under a stored mask, whose values say that all is valid."""
    return md.masked_tensor(data.to(device), torch.ones(data.shape, dtype=torch.bool, device=device))


# What depends on the values of a mask, which only a graph under construction does not know.
VALUES_READ: dict[str, Callable[[str], Any]] = {
    "raw factors of what is all valid": lambda device: torch.geqrf(all_valid(torch.eye(3) + 1, device))[0],
    "packed": lambda device: (
        md.from_lengths(torch.ones(2, 4, 3, device=device), torch.tensor([4, 2], device=device)).to_packed().to_dense()
    ),
    "csr": lambda device: masked(device, requires_grad=False).to_sparse_csr().to_dense(),
    "repeat_interleave by masked counts": lambda device: torch.arange(3, device=device).repeat_interleave(
        all_valid(torch.tensor([1, 0, 2]), device)
    ),
    "unique": lambda device: masked(device, requires_grad=False).unique(),
}


@pytest.mark.parametrize("name", VALUES_READ)
def test_values_of_a_python_device_are_values(name: str) -> None:
    here, there = (VALUES_READ[name](device) for device in ("cpu", DEVICE))
    assert there.device.type == DEVICE
    if md.is_masked_tensor(here):
        assert torch.equal(there.get_mask().cpu(), here.get_mask())
        here, there = here.to_tensor(0), there.to_tensor(0)
    torch.testing.assert_close(there.cpu(), here)


def test_out_of_a_device_without_addresses_is_written() -> None:
    """Whether it shares memory with an operand is not asked of addresses, which such a device does not have."""
    results = []
    for device in ("cpu", DEVICE):
        x, out = masked(device, requires_grad=False), masked(device, SECOND, requires_grad=False)
        assert torch.exp(x, out=out) is out
        assert torch.exp(x, out=x) is x
        results.append([(t.to_tensor(0).cpu(), t.get_mask().cpu()) for t in (out, x)])
    torch.testing.assert_close(*results)


STORAGES = {"dense": lambda x: x, "coo": lambda x: x.to_sparse(), "csr": lambda x: x.to_sparse_csr()}


@pytest.mark.parametrize("storage", STORAGES)
def test_a_tensor_is_printed_with_its_values(storage: str) -> None:
    here, there = (repr(STORAGES[storage](masked(device, requires_grad=False))) for device in ("cpu", DEVICE))
    assert there == here.replace("True=valid", f"True=valid, device='{DEVICE}:0'")


# ------------------------------------------------------------------------------------------------------------ scopes


@pytest.mark.parametrize("policy", ["never", "always"])
def test_the_policy_for_dense_storage_holds_in_a_thread_of_the_engine(policy: str) -> None:
    """Of what ran in it, in the backward of an autograd function; it was the default there."""
    seen = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            stored = md.masked_tensor(torch.eye(2, device=DEVICE) + 1).to_sparse_csr()
            try:
                torch.linalg.inv(stored)
            except md.MaskedSemanticsError:
                seen.append("never")
            else:
                seen.append("always")
            return gradient * 2

    with md.densify(policy):
        loss = Noting.apply(masked(DEVICE)).sum()
    loss.backward()
    assert seen == [policy]


# ---------------------------------------------------------------------------------------------- waiting for the device


@of_the_reference_device
@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_do_not_wait_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No value of data or mask is asked for, in forward or backward, which on a GPU would synchronise."""
    monkeypatch.setattr(fill, "_verified", False)  # the verification in tests reads what it verifies
    x, y = operands(DEVICE)
    with host_reads() as reads:
        forward_and_backward(FUNCTIONS[name], x, y)
    assert reads == []


def packed(lengths: Tensor) -> Any:
    return md.from_lengths(torch.randn(3, 6, 8).to(DEVICE), lengths).to_packed()


def trained(layer: nn.Module, x: Any) -> None:
    (layer(x) - 1).square().mean().backward()


# Calls with what they ask the device for, if lengths are on the CPU, and if they are on the device.
NONZERO, COPY = "aten.nonzero.default", "aten._to_copy.default"
READ: dict[str, tuple[Callable[[Tensor], Any], list[str], list[str]]] = {
    "from_lengths": (lambda lengths: md.from_lengths(torch.randn(3, 6, 8).to(DEVICE), lengths), [], [COPY]),
    "to_packed": (packed, [], [COPY, NONZERO]),
}


@of_the_reference_device
@pytest.mark.parametrize("name", READ)
def test_lengths_are_read_where_they_are_and_once(name: str) -> None:
    """On the CPU, where they wait for nothing; or on the device, at once."""
    call, on_cpu, on_device = READ[name]
    for lengths, expected in ((torch.tensor([6, 4, 3]), on_cpu), (torch.tensor([6, 4, 3]).to(DEVICE), on_device)):
        with host_reads() as reads:
            call(lengths)
        assert reads == expected


@of_the_reference_device
def test_a_packed_layer_waits_once_for_each_pattern_or_not_at_all() -> None:
    """Not at all where a kernel reads the bounds; else the lengths are read when they are first asked for."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(DEVICE)
    on_device = torch.tensor([6, 4, 3]).to(DEVICE)
    x, other = packed(on_device), packed(on_device)
    seen = []
    for batch in (x, x, packed(on_device.cpu())):
        with host_reads() as reads:
            trained(layer, batch)
        seen.append(reads)
    assert seen == [[COPY], [], []]
    with kernels_of_sequences(DEVICE) as called, host_reads() as reads:
        trained(layer, other)
    assert reads == []
    assert called == ["efficient"]


@of_the_reference_device
def test_reads_are_noted() -> None:
    x = torch.ones(3, device=DEVICE)
    with host_reads() as reads:
        x.sum().item()
        x.cpu()
        x.nonzero()
    assert reads == ["aten._local_scalar_dense.default", "aten._to_copy.default", "aten.nonzero.default"]


# ----------------------------------------------------------------------------------------------------------------- laws


def test_a_law_does_not_ask_for_what_plain_torch_cannot_do_there() -> None:
    """It brings what it compares to the CPU, where the oracles are."""

    def of_an_operand_on_the_cpu(x: Tensor) -> Tensor:
        return x + torch.ones(3)

    for function, status in ((torch.exp, "pass"), (of_an_operand_on_the_cpu, "not asked")):
        sample = Sample(function, (torch.ones(3),), {}, 0, torch.float32)
        masks = masking("half", sample.tensors, 0)
        assert masks is not None
        trial = Trial(on_device(Eager(), torch.empty(0, device=DEVICE).device), sample, masks)
        assert outcome_of(compress, trial)[0] == status


# -------------------------------------------------------------------------------------------------------------- traces


def test_a_trace_sees_the_backward_that_it_starts_in_the_thread_of_the_engine() -> None:
    threads = set()
    x = masked(DEVICE)
    with md.trace() as t:
        y = x.exp()
        y.register_hook(lambda gradient: threads.add(threading.current_thread()))
        (y * x + x).sum().backward()
    assert threads
    assert threading.main_thread() not in threads
    backward = [call for call in t.calls if call.backward]
    assert "gradient of an operand of aten.exp.default, call 0" in [call.name for call in backward]
    assert "aten.add.Tensor" in [call.name for call in backward]
    assert {str(call.results[0]) for call in backward if call.name == "aten.add.Tensor"} == {"3/6 50%"}


def test_a_trace_does_not_see_the_backward_of_others() -> None:
    started, ended = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)

    def backward() -> None:
        x = masked(DEVICE)
        loss = (x + x * x).sum()
        started.wait()
        loss.backward()
        ended.wait()

    thread = threading.Thread(target=backward)
    thread.start()
    with md.trace() as t:
        started.wait()
        ended.wait()
    thread.join()
    assert t.calls == ()
