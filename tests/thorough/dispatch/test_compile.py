"""torch.compile with masked tensors: whole graphs, forward and backward, and no recompiles.

Everything runs on aot_eager, which traces as inductor does and generates no code; a few compile for real.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md
from compiled_regions import NAN, check, compiled, copies, masked, results_and_gradients, same, x_and_weight

pytestmark = pytest.mark.usefixtures("fresh_compiler")

aten = torch.ops.aten


# ----------------------------------------------------------------------------------------- graphs, forward and backward

# Several operators, or several results: each operator by itself is compiled by P7, and chains of them by P7 of fuzz.
REGIONS: dict[str, Callable[..., Any]] = {
    "mean": lambda x, w: x.exp().mean(-1),
    "var of a product": lambda x, w: (x * w[0]).var(0),
    "two masks": lambda x, w: (x + (x @ w).relu()).sum(),
    "views": lambda x, w: (x[1:].t().reshape(3, 6).exp(), x[0], x.unsqueeze(0).expand(2, 4, 6).sum(0)),
    "joins": lambda x, w: torch.cat([x, x.flip(0), w], 0).amax(0),
    "returns its input": lambda x, w: (x, (x * w[0]).sum()),
    "filled": lambda x, w: (x.to_tensor(0.5) @ w, x.get_mask(), x.count(0)),
    "plain from masked": lambda x, w: (x @ w).mean().to_tensor(0.0) + w.sum(),
    "where and fill": lambda x, w: torch.where(x > 0, x, w[0]).masked_fill(w[1] > 0, 2.0),
    "mask_with": lambda x, w: x.mask_with(w[:4] > 0).sum(0),
}


@pytest.mark.parametrize("name", REGIONS)
def test_masked_leaves_in_a_whole_graph(name: str) -> None:
    check(REGIONS[name], x_and_weight)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_plain_to_masked_to_plain(dynamic: bool | None) -> None:
    def region(data: Tensor, mask: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        x = md.as_masked_tensor(data, mask)
        return (x @ w).softmax(-1).mean(0).to_tensor(0.0), x.count(-1)

    def make() -> list[Any]:
        mask = torch.rand(4, 6) > 0.4
        return [torch.where(mask, torch.randn(4, 6), NAN).requires_grad_(), mask, torch.randn(6, 6, requires_grad=True)]

    check(region, make, dynamic=dynamic)


def test_constructors_inside() -> None:
    def region(data: Tensor, lengths: Tensor) -> tuple[Any, ...]:
        x = md.interop.from_attention_mask(data, (data > 0).int())
        made = md.from_lengths(data, lengths).mean(1), md.from_nan(data).sum(), md.masked_tensor(data, data > 0)
        return (*made, x.sum(1), md.interop.to_lengths(md.from_lengths(data, lengths)))

    def make() -> list[Any]:
        return [torch.where(torch.rand(3, 5) > 0.3, torch.randn(3, 5), NAN), torch.randint(0, 6, (3,))]

    check(region, make)


def test_modules_with_plain_parameters_and_masked_input() -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2))
    run, backend = compiled(net)
    for _ in range(3):
        x = masked()
        gradients = []
        for function in (run, net):
            net.zero_grad()
            function(x).mean().backward()
            gradients.append([p.grad for p in net.parameters()])
        same(*gradients)
    assert backend.graphs == 1


def test_masked_parameters_and_buffers() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(masked())
            self.register_buffer("shift", masked())

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x + self.shift).mean()

    module, x = Scale(), torch.randn(4, 6)
    run, _ = compiled(module)
    run(x).backward()
    gradient = module.weight.grad
    module.zero_grad()
    module(x).backward()
    same(gradient, module.weight.grad)


# Dynamo looks at .grad of what crosses, and hides torch's warning in a way that "warnings as errors" does not know.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_graph_breaks_with_masked_tensors_crossing() -> None:
    def region(x: Tensor, w: Tensor) -> Tensor:
        y = x.exp()
        torch._dynamo.graph_break()
        y = y @ w
        if y.sum().to_tensor(0.0).item() > 1e9:  # reads a value: another break
            y = y * 2
        print(end="")
        return y.mean(-1)

    run, backend = compiled(region, fullgraph=False)
    for _ in range(3):
        arguments = x_and_weight()
        same(results_and_gradients(run, arguments), results_and_gradients(region, arguments))
    assert backend.graphs > 1


def test_eager_operators_between_graphs_are_not_compiled() -> None:
    """Where a function breaks off, Dynamo watches Python frames, and must leave those of our kernels alone."""

    def region(x: Tensor) -> Tensor:
        return x.exp().nonzero().sum() + x.sum().to_tensor(0.0).item()

    run, backend = compiled(region, fullgraph=False)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False, capture_scalar_outputs=False):
        x = masked()
        same(run(x), region(x))
        counted = backend.graphs
        same(run(x), region(x))
    assert counted == backend.graphs <= 3


# ----------------------------------------------------------------------------------------------------------- recompiles


def test_rules_replaced_are_seen_and_forgotten_without_recompiling() -> None:
    def region(x: Tensor) -> Tensor:
        return x.exp().sum()

    def from_plain(data: Tensor, mask: Tensor) -> Tensor:
        return region(md.as_masked_tensor(data, mask)).to_tensor(0.0)

    x = md.masked_tensor(torch.zeros(3), torch.tensor([True, True, False]))
    for function, arguments in ((region, (x,)), (from_plain, (x.get_data(), x.get_mask()))):
        run, backend = compiled(function)
        assert run(*arguments).item() == 2.0
        with md.registry.overlay() as mine:
            mine.replace(aten.exp.default, lambda x: x.like(x.filled(0) + 5))
            assert run(*arguments).item() == 10.0
        assert run(*arguments).item() == 2.0
        assert backend.graphs == 2


def test_compiling_keeps_no_input_alive() -> None:
    run, _ = compiled(lambda x: (x.add_(1), x.sum())[1])
    x = masked()
    run(x)
    gone = weakref.ref(x._data)
    del x
    gc.collect()
    assert gone() is None


# ---------------------------------------------------------------------------------- outputs that the loss does not need


@pytest.mark.parametrize("used", [0, 1, 2])
def test_unused_masked_output(used: int) -> None:
    """`return loss, hidden`: the engine hands plain zeros to the backward of outputs that the loss does not need."""

    def region(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (x * w[0]).mean(), (x @ w).tanh(), x.to_tensor(0.0) @ w

    run, _ = compiled(region)
    start, gradients = x_and_weight(), []
    for function in (region, run):
        x, w = copies(start)
        function(x, w)[used].sum().backward()
        gradients.append((x.grad, w.grad))
    same(gradients[1], gradients[0])


def test_tangents_may_have_other_masks_than_outputs() -> None:
    def region(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    run, _ = compiled(region)
    mask = torch.rand(4, 6) > 0.5
    start, gradients = x_and_weight(), []
    for function in (region, run):
        x, w = copies(start)
        y = function(x, w).mask_with(mask)
        (y * y).sum().backward()
        gradients.append((x.grad, w.grad))
    same(gradients[1], gradients[0])


# ----------------------------------------------------------------------------------------------------------- inductor


def test_inductor_generates_what_eager_computes() -> None:
    def region(x: Tensor, w: Tensor) -> Tensor:
        return nn.functional.layer_norm(x.exp() * w[0], (6,)).softmax(-1).mean(0)

    arguments = x_and_weight()
    run = torch.compile(region, fullgraph=True)
    same(results_and_gradients(run, arguments), results_and_gradients(region, arguments))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_a_graph_makes_of_a_row_without_anything_stays_there(backend: str) -> None:
    def region(x: Tensor, w: Tensor) -> Tensor:
        return ((x.softmax(-1) * w).sum(-1) + x.log_softmax(-1).sum(-1) * x.logsumexp(-1) * w[0, 0]).sum()

    data = torch.where(torch.arange(4)[:, None] == 1, NAN, torch.randn(4, 6))
    x, w = md.masked_tensor(data, data == data, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    run = torch.compile(region, backend=backend, fullgraph=True)
    compiled_gradients = torch.autograd.grad(run(x, w), (x, w))
    same(compiled_gradients, torch.autograd.grad(region(x, w), (x, w)))
    assert compiled_gradients[1].isfinite().all()
    assert compiled_gradients[0].to_tensor(0.0).isfinite().all()


def test_inductor_fuses_a_masked_mean_into_one_kernel() -> None:
    from torch._inductor.utils import run_and_get_code

    run = torch.compile(lambda x: (x.exp() * 2).mean(-1), fullgraph=True)
    x = masked(64, 64)
    y, (code, *_) = run_and_get_code(run, x)
    same(y, (x.exp() * 2).mean(-1))
    assert code.count("async_compile.cpp") == 1


def test_a_value_read_in_a_graph_has_to_be_valid() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = torch.compile(lambda x, s: x * s.item(), backend="aot_eager", fullgraph=True)
        x, factor = torch.arange(3.0), torch.tensor(2.0)
        assert run(x, md.masked_tensor(factor, torch.tensor(True))).tolist() == [0, 2, 4]
        with pytest.raises(RuntimeError, match=r"asked for as a Python value, and it is invalid"):
            run(x, md.masked_tensor(factor, torch.tensor(False)))


@pytest.mark.parametrize("known", [False, True])
def test_a_conjugate_that_a_graph_returns_is_one(known: bool) -> None:
    """It is a view of the argument, and shows the argument's memory conjugated."""
    data = torch.complex(torch.arange(6.0), torch.ones(6)).view(2, 3)
    x: Any = md.masked_tensor(data, torch.arange(3) < torch.tensor([[3], [1]]))
    x = md.padded(x) if known else x
    found = torch.compile(lambda t: t.conj(), backend="aot_eager", fullgraph=True)(x)
    md.testing.assert_close(found, x.conj(), rtol=0, atol=0)
    assert found._extent is x._extent or found._extent.known == x._extent.known
    md.testing.assert_close(torch.compile(lambda t: t.mH, backend="aot_eager")(x), x.mH, rtol=0, atol=0)


@pytest.mark.parametrize(
    "part",
    [lambda x: x.conj().imag, lambda x: x.conj().real, lambda x: torch.view_as_real(x.conj()), lambda x: x.mH.imag],
    ids=["imag", "real", "view_as_real", "imag of mH"],
)
def test_parts_of_a_conjugate_that_a_graph_returns(part: Callable[[Any], Any]) -> None:
    """They are computed: the argument's memory shows the imaginary part with the other sign."""
    data = torch.complex(torch.arange(6.0), torch.arange(1.0, 7)).view(2, 3)
    leaf: Any = md.masked_tensor(data, torch.arange(3) < torch.tensor([[3], [1]])).requires_grad_()
    compiled = torch.compile(part, backend="aot_eager", fullgraph=True)
    md.testing.assert_close(compiled(leaf.detach()), part(leaf.detach()), rtol=0, atol=0)
    found, wanted = (torch.autograd.grad(f(leaf).square().sum(), leaf)[0] for f in (compiled, part))
    md.testing.assert_close(found, wanted)
