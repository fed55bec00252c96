"""torch.compile, export and make_fx with masked tensors: whole graphs, forward and backward, and no recompiles.

Everything runs on aot_eager, which traces as inductor does and generates no code; a few compile for real.
"""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import masked_dispatch as md

NAN = float("nan")
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Backend:
    """aot_eager that counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(graph, inputs)


def compiled(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Backend]:
    backend = Backend()
    return torch.compile(function, backend=backend, **{"fullgraph": True} | options), backend


def masked(*shape: int, requires_grad: bool = False, mask: Any = "random") -> md.MaskedTensor:
    """Random data, NaN under a random mask."""
    shape = shape or (4, 6)
    if isinstance(mask, str):
        mask = torch.rand(shape) > 0.4
    data = torch.randn(shape)
    if mask is not None:
        data = torch.where(mask, data, NAN)
    return md.masked_tensor(data, mask, requires_grad=requires_grad)


def same(actual: Any, expected: Any) -> None:
    """Equal masks, close valid values, plain where plain is expected."""
    if isinstance(expected, (tuple, list)):
        for a, e in zip(actual, expected, strict=True):
            same(a, e)
    elif isinstance(expected, md.MaskedTensor):
        assert isinstance(actual, md.MaskedTensor)
        assert_close(actual.get_mask(), expected.get_mask())
        assert_close(actual.to_tensor(0), expected.to_tensor(0), equal_nan=True)
    else:
        assert not isinstance(actual, md.MaskedTensor)
        assert_close(actual, expected, equal_nan=True)


def copies(arguments: Any) -> list[Any]:
    return [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in arguments]


def results_and_gradients(function: Callable[..., Any], arguments: Any) -> tuple[Any, Any]:
    """What the function gives, and the gradients of the sum of everything it gives."""
    leaves = copies(arguments)
    outputs = function(*leaves)
    total = sum(
        (o.to_tensor(0.0) if isinstance(o, md.MaskedTensor) else o).sum()
        for o in (outputs if isinstance(outputs, tuple) else (outputs,))
        if o.requires_grad
    )
    if isinstance(total, Tensor):
        total.backward()
    return outputs, [a.grad for a in leaves if isinstance(a, Tensor) and a.grad is not None]


def check(
    function: Callable[..., Any], make: Callable[[], Any], graphs: int = 1, calls: int = 3, **options: Any
) -> None:
    """Compiled gives what eager gives, gradients included, for several masks, in `graphs` graphs."""
    run, backend = compiled(function, **options)
    for _ in range(calls):
        arguments = make()
        same(results_and_gradients(run, arguments), results_and_gradients(function, arguments))
    assert backend.graphs == graphs


def x_and_weight() -> list[Any]:
    return [masked(requires_grad=True), torch.randn(6, 6, requires_grad=True)]


# ----------------------------------------------------------------------------------------- graphs, forward and backward

REGIONS: dict[str, Callable[..., Any]] = {
    "mean": lambda x, w: x.exp().mean(-1),
    "var of a product": lambda x, w: (x * w[0]).var(0),
    "linear": lambda x, w: nn.functional.linear(x, w).tanh().sum(0),
    "matmul, softmax": lambda x, w: ((x @ w) * 2 + 1).softmax(-1),
    "two masks": lambda x, w: (x + (x @ w).relu()).sum(),
    "norm": lambda x, w: nn.functional.layer_norm(x, (6,), w[0], w[1]),
    "views": lambda x, w: (x[1:].t().reshape(3, 6).exp(), x[0], x.unsqueeze(0).expand(2, 4, 6).sum(0)),
    "joins": lambda x, w: torch.cat([x, x.flip(0), w], 0).amax(0),
    "returns its input": lambda x, w: (x, (x * w[0]).sum()),
    "filled": lambda x, w: (x.to_tensor(0.5) @ w, x.get_mask(), x.count(0)),
    "plain from masked": lambda x, w: (x @ w).mean().to_tensor(0.0) + w.sum(),
    "attention": lambda x, w: nn.functional.scaled_dot_product_attention(x[None], x[None] @ w, x[None]),
    "loss": lambda x, w: nn.functional.mse_loss(x @ w, torch.ones(4, 6)),
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
        return md.from_lengths(data, lengths).mean(1), md.from_nan(data).sum(), md.masked_tensor(data, data > 0)

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


def test_masks_may_change_without_recompiling() -> None:
    run, backend = compiled(lambda x: (x.exp() * 2).mean(-1))
    for i in range(6):
        x = masked(4, 6)
        if i == 3:
            x[0] = masked(6)
        same(run(x), (x.exp() * 2).mean(-1))
    assert backend.graphs == 1


def test_sharing_a_mask_or_not_makes_no_difference() -> None:
    run, backend = compiled(lambda x, y: (x + y).sum(-1))
    x = masked()
    for y in (x * 2, masked(), x * 3, masked()):
        same(run(x, y), (x + y).sum(-1))
    assert backend.graphs == 1


def test_each_kind_of_mask_is_compiled_once() -> None:
    run, backend = compiled(lambda x: x.exp().mean(-1))
    counts = []
    for i in range(9):
        mask = (None, torch.rand(4, 6) > 0.5, torch.rand(4, 1) > 0.5)[i % 3]
        x = masked(4, 6, mask=mask)
        same(run(x), x.exp().mean(-1))
        counts.append(backend.graphs)
    assert counts == [1, 2, 3, 3, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_may_change(dynamic: bool | None) -> None:
    run, backend = compiled(lambda x: (x.exp() * 2).mean(-1), dynamic=dynamic)
    for rows in range(3, 8):
        x = masked(rows, 6, requires_grad=True)
        same(results_and_gradients(run, [x]), results_and_gradients(lambda x: (x.exp() * 2).mean(-1), [x]))
    assert backend.graphs == (2 if dynamic is None else 1)


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


def test_autograd_caches_tell_masks_of_one_kind_from_another() -> None:
    """AOTAutograd's cache asks for a hash: equal for equal geometry, rules and library, whatever the values."""
    x = masked()
    assert x._stable_hash_for_caching() == masked()._stable_hash_for_caching()
    others = [
        masked(4, 6, mask=None),
        masked(4, 6, mask=torch.rand(4, 1) > 0.5),
        masked(6, 4),
        masked(requires_grad=True),
        x.double(),
        x.t(),
    ]
    hashes = {o._stable_hash_for_caching() for o in (x, *others)}
    assert len(hashes) == len(others) + 1
    with md.registry.overlay() as mine:
        mine.replace(aten.exp.default, lambda x: x)
        assert x._stable_hash_for_caching() not in hashes
    assert x._stable_hash_for_caching() in hashes


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


# -------------------------------------------------------------------------------------------------------- writes inside


def scaled_in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    y.mul_(w[0])
    y[0].add_(1)
    return y.sum(-1)


def assigned(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x.clone()
    before = y.exp()
    y[0] = 5.0
    y[:, 1] = w[0, :4]
    return y.sum(-1), y, before


def shared_with_an_input(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x * 1
    y[0] = 5.0
    return y.sum(-1), x * 2


@pytest.mark.parametrize("region", [scaled_in_place, assigned, shared_with_an_input])
def test_writes_to_intermediates(region: Callable[..., Any]) -> None:
    check(region, x_and_weight)


def scale_input(x: Tensor) -> Any:
    x.mul_(2)
    return x.sum(-1)


def assign_to_input(x: Tensor) -> Any:
    before = x.exp()
    x[0] = 1.0
    return x.sum(-1), before, x * 2


def write_to_input(x: Tensor) -> Any:
    x.copy_(torch.ones(4, 6))
    x[1:, 2].neg_()
    return x.sum(0)


@pytest.mark.parametrize(
    ("region", "backend"),
    [
        (scale_input, "aot_eager"),
        (assign_to_input, "aot_eager"),
        (write_to_input, "aot_eager"),
        (assign_to_input, "inductor"),
    ],
)
def test_writes_to_inputs(region: Callable[..., Any], backend: str) -> None:
    run = torch.compile(region, backend=backend, fullgraph=True)
    for _ in range(3):
        x = masked()
        y, shares, expected_shares = x.clone(), x.exp(), x.exp().clone()
        row = x[0]
        same(run(x), region(y))
        same((x, row), (y, y[0]))
        same(shares, expected_shares)  # it held the mask that x had
        x[1] = 3.0  # and still x is an ordinary tensor
        assert x[1].sum().item() == 18.0
        same(shares, expected_shares)


def test_that_a_graph_writes_to_a_mask_is_known_from_dynamo_alone() -> None:
    """What AOTAutograd finds in its cache, it does not trace again."""
    x, y = masked(), masked()
    torch.compile(lambda x, y: (x[0].fill_(1.0), y.sum())[1], backend="eager", fullgraph=True)(x, y)
    assert x._graph_writes is not None
    assert x._graph_writes.seen
    assert not (y._graph_writes and y._graph_writes.seen)


def test_writes_to_inputs_that_share_a_mask() -> None:
    def region(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x[0] = 5.0
        return x.sum(), y.sum()

    run, _ = compiled(region)
    for _ in range(2):
        x = masked()
        y, a, b = x * 3, x.clone(), x * 3
        same(run(x, y), region(a, b))
        same((x, y), (a, b))


def owned_by_nobody() -> tuple[Tensor, Callable[[Tensor], None]]:
    x = masked()
    return x, lambda x: x.__setitem__(0, md.masked_tensor(torch.ones(6), torch.zeros(6, dtype=torch.bool)))


def owned_by_its_family() -> tuple[Tensor, Callable[[Tensor], None]]:
    x, write = owned_by_nobody()
    write(x[:, 1:2].expand(4, 6).clone())
    x[1, 2] = 4.0  # the family has memory of its own from now on
    return x, write


def owned_by_the_caller() -> tuple[Tensor, Callable[[Tensor], None]]:
    data, mask = data_and_mask()
    return md.as_masked_tensor(data, mask), lambda x: mask.logical_not_()  # type: ignore[func-returns-value]


@pytest.mark.parametrize("make", [owned_by_nobody, owned_by_its_family, owned_by_the_caller])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_results_share_the_mask_of_an_input_and_keep_it_when_that_changes(
    make: Callable[[], tuple[Tensor, Callable[[Tensor], None]]], backend: str
) -> None:
    run = torch.compile(lambda x: x.exp(), backend=backend, fullgraph=True)
    for _ in range(2):
        x, write = make()
        mask = x.get_mask()
        shares = run(x)
        copied = make is owned_by_the_caller
        assert (shares._validity.data_ptr() == x._validity.data_ptr()) != copied
        write(x)
        assert not torch.equal(x.get_mask(), mask)
        assert torch.equal(shares.get_mask(), mask)


def test_views_as_inputs_and_as_outputs() -> None:
    def region(view: Tensor) -> Tensor:
        view.mul_(2)
        view[0] = 5.0
        return view.t()

    run, _ = compiled(region)
    x = masked(4, 6)
    y = x.clone()
    a, b = run(x[1:3]), region(y[1:3])
    same((a, x), (b, y))
    a.mul_(3)
    b.mul_(3)
    same(x, y)


def test_a_view_and_its_base_as_inputs_of_a_region_that_writes_are_refused() -> None:
    def region(x: Tensor, view: Tensor) -> Tensor:
        view[0] = 5.0
        return x.sum()

    run, _ = compiled(region)
    x = masked()
    with pytest.raises(Exception, match="aliased inputs that are mutated"):
        run(x, x[0])


def test_in_place_on_plain_tensors_is_an_update() -> None:
    def region(state: Tensor, g: Tensor) -> Tensor:
        state.addcmul_(g, g, value=0.5)
        return state.sqrt()

    run, _ = compiled(region)
    g, state = masked(), torch.ones(4, 6)
    expected = torch.where(g.get_mask(), 1 + 0.5 * g.to_tensor(0.0) ** 2, torch.ones(4, 6))
    run(state, g)
    assert_close(state, expected)


# ----------------------------------------------------------------------------------------- training: steps, checkpoints


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"foreach": True}),
    ],
)
def test_compiled_optimizer_steps(optimizer: Any, options: dict[str, Any]) -> None:
    start, weight = masked(), torch.randn(6, 6)
    results = []
    for compile_step in (False, True):
        parameter = start.detach().clone().requires_grad_(True)
        w = weight.clone().requires_grad_(True)
        steps = optimizer([parameter, w], lr=0.1, **options)
        step = torch.compile(steps.step, backend="aot_eager") if compile_step else steps.step
        for _ in range(3):
            steps.zero_grad()
            (parameter @ w).tanh().mean().backward()
            step()
        results.append((parameter.detach(), w.detach()))
    same(*results)
    assert_close(results[0][0].get_mask(), start.get_mask())


@pytest.mark.parametrize("how", ["eager", "reentrant", "compiled"])
def test_checkpoint(how: str) -> None:
    layer = nn.Linear(6, 6)

    def inner(x: Tensor) -> Tensor:
        return nn.functional.gelu(layer(x)).softmax(-1)

    def region(x: Tensor) -> Tensor:
        return checkpoint(inner, x, use_reentrant=how == "reentrant").mean()

    run = compiled(region)[0] if how == "compiled" else region
    x = masked(requires_grad=True)
    gradients = []
    for function in (run, lambda x: inner(x).mean()):
        layer.zero_grad()
        y = x.detach().clone().requires_grad_(True)
        function(y).backward()
        gradients.append((y.grad, layer.weight.grad, layer.bias.grad))
    same(*gradients)


def test_nested_compile_region() -> None:
    @torch.compiler.nested_compile_region
    def inner(x: Tensor) -> Tensor:
        return x.exp().mean(-1)

    check(lambda x, w: inner(x) + inner(x @ w), x_and_weight)


def test_a_user_s_autograd_function() -> None:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0].exp()

    check(lambda x, w: Exp.apply(x).mean(-1), x_and_weight)


@pytest.mark.parametrize(
    "control",
    [
        lambda x: torch.cond(x.count() > 3, lambda x: x.exp(), lambda x: x * 2, (x,)),
        lambda x: torch._higher_order_ops.scan(lambda c, r: (c + r, c * r), x[0], x),
    ],
)
def test_control_flow_operators_refuse_masked_tensors(control: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match="takes no masked tensors"):
        compiled(control)[0](masked())


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_compiled_autograd(inside: bool) -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (x.exp()[:, :6] @ w).softmax(-1).mean()

    start = x_and_weight()
    x, w = copies(start)
    loss(x, w).backward()
    y, v = copies(start)
    if inside:
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(lambda: loss(y, v).backward(), backend="aot_eager")()
    else:
        value = loss(y, v)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            value.backward()
    same((y.grad, v.grad), (x.grad, w.grad))


def test_autocast_in_a_region() -> None:
    def region(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y = nn.functional.linear(x, w)
            return y, y.float().softmax(-1)

    run, _ = compiled(region)
    x, w = masked(), torch.randn(6, 6)
    a, b = run(x, w), region(x, w)
    assert [t.dtype for t in a] == [t.dtype for t in b] == [torch.bfloat16, torch.float32]
    same(a, b)


def test_inference_mode() -> None:
    run, _ = compiled(lambda x, w: (x @ w).softmax(-1))
    x, w = masked(), torch.randn(6, 6)
    with torch.inference_mode():
        same(run(x, w), (x @ w).softmax(-1))
        y = x * 2
        y[0] = 1.0
        same(run(y, w), (y @ w).softmax(-1))


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


# ------------------------------------------------------------------------------------------------------ export, make_fx


class Classifier(nn.Module):
    """A module that takes data and mask: what an exported program can take."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, data: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = md.as_masked_tensor(data, mask)
        h = self.norm(self.hidden(x)).relu() + x
        return self.head(h).softmax(-1).mean(0).to_tensor(0.0), h.count(-1)


def data_and_mask(rows: int = 4) -> tuple[Tensor, Tensor]:
    mask = torch.rand(rows, 6) > 0.4
    return torch.where(mask, torch.randn(rows, 6), NAN), mask


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own LeafSpec, in export and its copies
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    net = Classifier().eval()
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(
        net, data_and_mask(), strict=strict, dynamic_shapes={"data": {0: batch}, "mask": {0: batch}}
    )
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    plain = program.run_decompositions()
    for form in (program, torch.export.load(stored), plain):
        for rows in (4, 3):
            arguments = data_and_mask(rows)
            same(form.module()(*arguments), net(*arguments))
    # Decomposed, a program is plain operators on plain tensors.
    assert not any(isinstance(node.meta.get("val"), md.MaskedTensor) for node in plain.graph.nodes)


class Mapped(nn.Module):
    """vmap inside: over parts with torch's, over masked tensors with ours."""

    def forward(self, data: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = md.as_masked_tensor(data, mask)
        first = torch.vmap(lambda d, m: md.as_masked_tensor(d, m).exp().mean().to_tensor(0.0))(data, mask)
        return first, md.functional.vmap(lambda r: (r * r).sum())(x).to_tensor(0.0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_export_of_vmap(strict: bool) -> None:
    program = torch.export.export(Mapped(), data_and_mask(), strict=strict)
    arguments = data_and_mask()
    same(program.module()(*arguments), Mapped()(*arguments))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_export_for_training() -> None:
    net = Classifier()
    arguments = data_and_mask()
    exported = torch.export.export(net, arguments).module()
    gradients = []
    for module in (net, exported):
        module(*arguments)[0].prod().backward()
        gradients.append([p.grad for p in module.parameters()])
    same(*gradients)


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str, pre_dispatch: bool) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(data: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        x = md.as_masked_tensor(data, mask)
        return (x.exp() * x).softmax(-1).mean(0).to_tensor(0.0), x.count(), x[0].sort().values.to_tensor(9.0)

    graph = make_fx(function, tracing_mode=mode, pre_dispatch=pre_dispatch)(*data_and_mask())
    for _ in range(2):
        arguments = data_and_mask()
        same(graph(*arguments), function(*arguments))


def test_a_value_read_in_a_graph_has_to_be_valid() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = torch.compile(lambda x, s: x * s.item(), backend="aot_eager", fullgraph=True)
        x, factor = torch.arange(3.0), torch.tensor(2.0)
        assert run(x, md.masked_tensor(factor, torch.tensor(True))).tolist() == [0, 2, 4]
        with pytest.raises(RuntimeError, match=r"asked for as a Python value, and it is invalid"):
            run(x, md.masked_tensor(factor, torch.tensor(False)))


def test_make_fx_of_a_gradient() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(data: Tensor, mask: Tensor) -> Tensor:
        return torch.autograd.grad(md.as_masked_tensor(data, mask).exp().var().to_tensor(0.0), data)[0]

    data, mask = data_and_mask()
    graph = make_fx(function)(data.requires_grad_(), mask)
    data, mask = data_and_mask()
    same(graph(data.requires_grad_(), mask), function(data, mask))


@pytest.mark.parametrize("function", [lambda x: x.exp(), lambda x: x.mean().to_tensor(0.0)])
def test_make_fx_refuses_to_bake_masked_inputs_in(function: Callable[..., Any]) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    with pytest.raises(md.MaskedSemanticsError, match="would record its data and mask as constants"):
        make_fx(function)(masked())
    w, x = torch.randn(6), masked()  # captured, it is a constant, as a plain tensor would be
    same(make_fx(lambda w: (x * w).sum().to_tensor(0.0))(w)(w + 1), (x * (w + 1)).sum().to_tensor(0.0))
