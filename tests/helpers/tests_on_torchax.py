"""Masked tensors on XLA by torchax, in an environment that has the extra `xla`, and in a process of its own.

Run by tests/slow/torchax/test_torchax.py, or by itself: ``python -m pytest tests/helpers/tests_on_torchax.py``.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch
import torchax
import torchax.tensor
from torch import Tensor, nn
from torchax.interop import jax_jit, jax_value_and_grad

import masked_dispatch as md
from op_registry.conformance.reference_device import compilations

md.torchax.enable()

# What jax and torchax warn of, for plain tensors too: 64 bits become 32, and memory of jax is shared with torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
]

MASK = torch.tensor([[True, False, True, True], [False, False, True, True], [False, False, False, False]])


@pytest.fixture(autouse=True)
def in_environment() -> Iterator[None]:
    torch.manual_seed(0)
    with torchax.default_env():
        yield


def on_cpu(mask: Tensor = MASK, **options: Any) -> Any:
    data = torch.arange(1.0, 13.0).reshape(3, 4) / 4
    return md.masked_tensor(data.masked_fill(~mask, torch.nan), mask, **options)


def on_jax(mask: Tensor = MASK) -> Any:
    return on_cpu(mask).to("jax")


def same(mine: Any, theirs: Any) -> None:
    """Whether values and mask are those of a masked tensor on the CPU."""
    assert mine.device.type == "jax"
    md.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- moving


def test_enable_again_changes_nothing() -> None:
    mode = torchax.tensor.XLADispatchMode.__torch_dispatch__
    md.torchax.enable()
    assert torchax.tensor.XLADispatchMode.__torch_dispatch__ is mode


@pytest.mark.parametrize("to", [("jax",), (torch.device("jax"),), ("jax", torch.float16), (torch.float16,)])
def test_moving_there_and_back(to: tuple[Any, ...]) -> None:
    there = on_jax() if to == (torch.float16,) else on_cpu()
    moved = there.to(*to)
    assert moved.device == torch.device("jax:0")
    assert moved.dtype is (torch.float16 if torch.float16 in to else torch.float32)
    for back in (moved.cpu(), moved.to("cpu")):
        assert back.device.type == "cpu"
        md.testing.assert_close(back, on_cpu().to(moved.dtype))


def test_what_was_moved_is_memory_of_its_own() -> None:
    x = on_jax()
    x.cpu().zero_()
    x.to("cpu").zero_()
    x[0, 2:].numpy()[:] = 9
    same(x, on_cpu())


def test_moving_a_tensor_without_a_mask_and_a_module() -> None:
    plain = md.as_masked_tensor(torch.ones(3)).to("jax")
    assert plain.cpu().get_mask().all()
    layer = nn.Linear(4, 2).requires_grad_(False)
    layer.bias = nn.Parameter(md.masked_tensor(torch.ones(2), torch.tensor([True, False])), requires_grad=False)
    expected = layer(on_cpu())
    same(layer.to("jax")(on_jax()), expected)


def test_made_of_torchax_tensors_it_is_on_their_device() -> None:
    data, mask = on_cpu().get_data().to("jax"), MASK.to("jax")
    for made in (md.masked_tensor(data, mask), md.as_masked_tensor(data, mask)):
        assert (made.device, made.is_meta) == (torch.device("jax:0"), False)
        same(made, on_cpu())
    with pytest.raises(
        RuntimeError, match=r"data is on jax:0 and the mask on cpu; move one of them: mask.to\('jax:0'\)"
    ):
        md.masked_tensor(data, MASK)


def test_tensors_on_the_cpu_stay_with_torch() -> None:
    """torchax would make constants of jax, in its environment; it does so where a plain tensor is selected from."""
    assert on_cpu().softmax(-1)[0].get_mask().equal(MASK[0])
    with pytest.raises(AssertionError, match="Expect a Tensor or a View"):
        torch.where(MASK, torch.ones(3, 4), 0.0)


# --------------------------------------------------------------------------------------------------------- computing

CALLS: dict[str, Callable[..., Any]] = {
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: (x * x).mean(1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: (x * x).log_softmax(0),
    "log": lambda x: x.log().sum(),
    "norm": lambda x: x.norm(dim=1),
    "layer_norm": lambda x: nn.functional.layer_norm(x, (4,)),
    "views": lambda x: x[0:2].transpose(0, 1)[:, 1].unsqueeze(0).expand(3, 4),
    "matmul": lambda x: x @ x.T,
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1).values,
    "cat": lambda x: torch.cat([x, x[:1]], 0),
    "where": lambda x: torch.where(x > 1, x, x * x),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "max": lambda x: x.amax(0),
    "skipna": lambda x: md.mean(x, 1, skipna=False),
}


def with_gradient(call: Callable[..., Any]) -> Callable[..., Any]:
    """The result, and the gradient by the tensor of the sum of all squares, each result used twice."""

    def both(x: Any) -> Any:
        x = x.detach().requires_grad_()
        result = call(x)
        loss = (result * result).sum().to_tensor(0.0)
        return result.detach(), torch.autograd.grad(loss, x)[0]

    return both


@pytest.mark.parametrize("name", CALLS)
def test_values_masks_and_gradients_are_those_of_the_cpu_by_one_compilation(name: str) -> None:
    """In a compiled function, whose masks change; garbage lies under them."""
    both = with_gradient(CALLS[name])
    compiled = jax_jit(both)
    moving = [on_cpu(torch.rand(3, 4) > share) for share in (0.1, 0.5, 0.8, 1.0)]
    compiled(on_jax())
    there = [x.to("jax") for x in moving]
    with compilations() as counted:
        results = [compiled(x) for x in there]
    assert counted.number == 0
    for (result, gradient), x in zip(results, moving, strict=True):
        expected, expected_gradient = both(x)
        same(result, expected)
        same(gradient, expected_gradient)
        assert gradient.cpu().get_mask().equal(x.get_mask())


@pytest.mark.parametrize("name", ["mean", "views", "softmax", "attention"])
def test_eager_values_and_gradients_are_those_of_the_cpu(name: str) -> None:
    both = with_gradient(CALLS[name])
    for mine, theirs in zip(both(on_jax()), both(on_cpu()), strict=True):
        same(mine, theirs)


def test_the_gradient_of_plain_data_is_zero_where_invalid_and_nowhere_else() -> None:
    data, mask = on_cpu().get_data().to("jax").requires_grad_(), MASK.to("jax")
    md.as_masked_tensor(data, mask).mean().to_tensor(0.0).backward()
    gradient = torchax.default_env().j2t_copy(data.grad.jax())
    assert gradient.equal(MASK / MASK.sum())


def test_gradients_accumulate_and_reach_plain_parameters() -> None:
    gradients = []
    for device in ("jax", "cpu"):
        torch.manual_seed(0)
        layer = nn.Linear(4, 2).to(device)
        x = md.as_masked_tensor(on_cpu().get_data().to(device), MASK.to(device))
        for _ in range(2):
            layer(x).square().mean().to_tensor(0.0).backward()
        gradients.append(layer.weight.grad.cpu())
    torch.testing.assert_close(*gradients)
    assert (gradients[0].abs().amin(0) > 0).equal(MASK.any(0))


@pytest.mark.parametrize("name", ["mean of rows", "log", "softmax", "layer_norm", "attention", "norm"])
def test_jax_differentiates_functions_of_data_and_mask(name: str) -> None:
    """Derivatives of jax pass the rules' operators, and torch's autograd takes no part."""

    def loss(data: Tensor, mask: Tensor) -> Tensor:
        result = CALLS[name](md.as_masked_tensor(data, mask) * 1.5)
        return (result * result).sum().to_tensor(0.0)

    data = on_cpu().get_data()
    with torchax.disable_temporarily():
        leaf = data.clone().requires_grad_()
        expected = loss(leaf, MASK)
        expected.backward()
    for differentiated in (
        jax_value_and_grad(loss),
        jax_jit(jax_value_and_grad(loss)),
        jax_value_and_grad(jax_jit(loss)),
    ):
        value, gradient = differentiated(data.to("jax"), MASK.to("jax"))
        torch.testing.assert_close(value.cpu(), expected.detach())
        torch.testing.assert_close(gradient.cpu(), leaf.grad, rtol=1e-4, atol=1e-5)
    assert leaf.grad[MASK].abs().max() > 0
    assert leaf.grad[~MASK].eq(0).all()


def test_jax_differentiates_by_no_mask() -> None:
    """A masked tensor as an argument would have to have a derivative by its mask."""
    with pytest.raises(TypeError, match=r"grad requires real- or complex-valued inputs.* but got int8"):
        jax_value_and_grad(lambda x: x.mean().to_tensor(0.0))(on_jax())


def test_jax_differentiates_where_torch_records_too() -> None:
    """A parameter of torch's in the function, which makes autograd record, does not cut off jax's derivative."""
    weight = nn.Parameter(torch.full((4,), 2.0).to("jax"))

    def loss(data: Tensor) -> Tensor:
        return (md.as_masked_tensor(data, MASK.to("jax")) * weight).sum().to_tensor(0.0)

    _, gradient = jax_value_and_grad(loss)(on_cpu().get_data().to("jax"))
    assert gradient.cpu().equal(2.0 * MASK)


def test_jax_does_not_differentiate_what_is_detached() -> None:
    def loss(data: Tensor) -> Tensor:
        x = md.as_masked_tensor(data, MASK.to("jax"))
        return (x.detach() * x).sum().to_tensor(0.0)

    _, gradient = jax_value_and_grad(loss)(on_cpu().get_data().to("jax"))
    assert gradient.cpu().equal(on_cpu().to_tensor(0.0))


# ------------------------------------------------------------------------------------- arguments and results of jax.jit


def test_masked_tensors_are_arguments_and_results() -> None:
    def function(batch: dict[str, Any]) -> Any:
        assert md.is_masked_tensor(batch["x"])
        return {"mean": batch["x"].mean(0), "pair": (batch["x"] * batch["scale"], batch["scale"])}

    found = jax_jit(function)({"x": on_jax(), "scale": torch.tensor(2.0).to("jax")})
    same(found["mean"], on_cpu().mean(0))
    same(found["pair"][0], on_cpu() * 2)
    assert not md.is_masked_tensor(found["pair"][1])


def test_another_kind_of_mask_compiles_again_and_another_mask_does_not() -> None:
    compiled = jax_jit(lambda x: x.mean(1))
    kinds = [on_jax(), md.as_masked_tensor(on_jax().to_tensor(0)), on_jax(MASK[:1].expand(3, 4))]
    counts = []
    for x in (*kinds, *kinds):
        with compilations() as counted:
            result = compiled(x)
        counts.append(counted.number)
        same(result, x.cpu().mean(1))
    assert counts == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("x", [on_cpu(), on_cpu().to_sparse_csr()], ids=["on the CPU", "sparse"])
def test_others_are_refused_as_arguments(x: Any) -> None:
    with pytest.raises(
        md.MaskedSemanticsError,
        match=r"a function of jax got a masked tensor of shape \(3, 4\) on cpu, stored as torch.s\w+: it takes densely "
        r"stored ones, made of torchax tensors. Pass x.to_dense\(\).to\('jax'\).",
    ):
        jax_jit(lambda x: x.mean())(x)


def test_compilations_that_depend_on_the_mask_are_counted() -> None:
    """The control: the counter counts where the number of valid elements is a shape."""
    data = torch.ones(64).to("jax")
    with compilations() as counted:
        for valid in (3, 14):
            mask = torch.arange(64).to("jax") < valid
            torch.masked_select(data, mask).mean()
    assert counted.number >= 4


# ---------------------------------------------------------------------------------------------- values, text, refusals


def test_values_are_read() -> None:
    x = on_jax()
    assert (x[0, 0].item(), float(x[0, 2]), bool(x[0, 0] < 1)) == (0.25, 0.75, True)
    assert x[0, 2:].tolist() == list(x[0, 2:].numpy()) == [0.75, 1.0]
    with pytest.raises(md.InvalidValueError, match="it is invalid"):
        x[0, 1].item()
    assert torch.linalg.inv(md.masked_tensor(2 * torch.eye(2), torch.ones(2, 2).bool()).to("jax")).cpu()[0, 0] == 0.5


def test_text_has_values_where_there_are_any() -> None:
    assert repr(on_jax()[0, :2]) == "masked_tensor([0.2500,     --], valid=1/2, True=valid, device='jax:0')"
    texts = []
    jax_jit(lambda x: texts.append(repr(x)) or x)(on_jax())
    assert texts == ["masked_tensor(..., size=(3, 4), mask=..., device='jax:0')"]


def test_copies_are_apart() -> None:
    x = on_jax()
    copied = copy.deepcopy(x)
    x.zero_()
    same(copied, on_cpu())


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "files": (
        lambda x: torch.save(x, io.BytesIO()),
        r"of shape \(3, 4\) on jax:0 cannot be saved: save x.cpu\(\), and move it to jax after loading.",
    ),
    "sparse": (
        lambda x: x.to_sparse(),
        r"masked tensors on jax:0 \(here of shape \(3, 4\)\) are only stored densely: the number of elements in sparse "
        r"or packed storage depends on the mask, and each number would need another compilation. Keep x as it is, or "
        r"store it on the CPU, x.cpu\(\).to_layout\(layout\).",
    ),
    "packed": (lambda x: x.to_packed(), "are only stored densely"),
    "torch.func": (
        md.functional.grad(lambda x: x.mean()),
        r"the transforms of masked_dispatch.functional take no masked tensors on jax:0 \(shape \(3, 4\)\). Use those "
        r"of the library that the device belongs to, on functions of data and mask",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_way_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(md.MaskedSemanticsError, match=text):
        call(on_jax())


def test_operands_on_two_devices_are_refused_by_torchax() -> None:
    for other in (on_cpu(), torch.ones(3, 4)):
        with pytest.raises(AssertionError, match=r"mixed math between XLATensor and torch\.Tensor"):
            on_jax() + other


def test_outside_of_the_environment_torchax_says_what_to_write() -> None:
    x = on_jax()
    with torchax.disable_temporarily(), pytest.raises(AssertionError, match="within the torchax environment"):
        x + 1


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam], ids=lambda kind: kind.__name__)
def test_an_optimizer_of_torch_steps(kind: Any) -> None:
    ends = {}
    for device in ("jax", "cpu"):
        x = nn.Parameter(on_cpu().to(device))
        optimizer = kind([x], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (x * x).sum().to_tensor(0.0).backward()
            optimizer.step()
        ends[device] = x.detach()
    same(ends["jax"], ends["cpu"])


def test_the_counter_needs_no_device() -> None:
    with compilations() as counted:
        jax.jit(lambda x: x * 12345.678)(jax.numpy.ones(3))
    assert counted.number >= 1


def padded(missing: bool) -> Any:
    x = md.from_lengths(torch.arange(12.0).reshape(2, 3, 2), torch.tensor([3, 1]))
    return x.mask_with(torch.tensor([[True], [False], [True]])) if missing else x


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("run", [jax_jit, lambda function: function])
def test_an_extent_goes_to_jax_through_functions_and_back(run: Callable[..., Any], missing: bool) -> None:
    x = padded(missing)
    for function in (lambda x: x * 2 + 1, lambda x: x.softmax(1), lambda x: torch.cat([x, x], 2), lambda x: x.sum(2)):
        found, expected = run(function)(x.to("jax")), function(x)
        same(found, expected)
        assert found.cpu()._extent.known == expected._extent.known
        assert found.cpu()._extent.is_mask == expected._extent.is_mask
        assert found.cpu().extent.tolist() == expected.extent.tolist()


def test_a_write_brings_the_extent_of_what_is_written() -> None:
    target = md.masked_tensor(torch.zeros(2, 3, 2)).to("jax")
    target.copy_(padded(missing=True).to("jax"))
    assert target.cpu().extent.tolist() == padded(missing=True).extent.tolist()


# ------------------------------------------------------------------------------------------------------------- writing


def adding(x: Any) -> Any:
    x.add_(1).mul_(x)
    return x


def filling(x: Any) -> Any:
    x.masked_fill_(x > 2, 0.5).clamp_(min=0.75)
    x[0].detach()
    return x.zero_()


def assigning_a_row(x: Any) -> Any:
    x[1] = 7.0
    return x


def assigning_masked(x: Any) -> Any:
    x[:2, 1:3] = x[1:, :2] * 2
    return x


def assigning_by_tensors(x: Any) -> Any:
    x[torch.tensor([0, 2]).to(x.device), 1] = torch.tensor([5.0, 6.0]).to(x.device)
    x[x > 2] = -1.0
    return x


def assigning_leading_ones(x: Any) -> Any:
    x[..., 0] = torch.ones(1, 1, 3).to(x.device)
    x[None, 2, :] = x[None, 2, :] + 1
    return x


def writing_to_what_is_detached(x: Any) -> Any:
    x.detach().mul_(2)
    x.data.add_(1)
    return x


def writing_out(x: Any) -> Any:
    torch.mul(x, 3, out=x)
    return torch.add(x, x, out=md.masked_tensor(torch.zeros(3, 4), MASK).to(x.device))


WRITES = [
    adding,
    filling,
    assigning_a_row,
    assigning_masked,
    assigning_by_tensors,
    assigning_leading_ones,
    writing_to_what_is_detached,
    writing_out,
]


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_writes_to_a_tensor_do_what_they_do_on_the_cpu(write: Callable[[Any], Any]) -> None:
    same(write(on_jax()), write(on_cpu()))
    if write is not assigning_by_tensors:
        same(jax_jit(write)(on_jax()), write(on_cpu()))


def test_the_gradient_passes_an_assignment() -> None:
    def gradient(x: Any, row: Any) -> Any:
        x, row = x.detach().requires_grad_(), row.detach().requires_grad_()
        y = x * 2
        y[1] = row
        return torch.autograd.grad((y * y).sum().to_tensor(0.0), (x, row))

    for mine, theirs in zip(gradient(on_jax(), on_jax()[0]), gradient(on_cpu(), on_cpu()[0]), strict=True):
        same(mine, theirs)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "[]": lambda x: x[0],
    "transpose": lambda x: x.T,
    "view": lambda x: x.view(-1),
    "expand": lambda x: x[:1].expand(3, 4),
    "split": lambda x: x.split(2)[0],
    "a view of a view": lambda x: x[1:][0],
    "detach of a view": lambda x: x[0].detach(),
}
LOST = (
    r"a write to a view of shape \([\d, ]+\) of a masked tensor on jax:0: jax arrays have no views; this view is a "
    r"copy, and its base would not change. Assign to the base, x\[index\] = value \(x\[index\] = x\[index\] \+ 1 for "
    r"x\[index\] \+= 1\), or use the operator that returns a tensor."
)
STALE = (
    r"a view of shape \([\d, ]+\) of a masked tensor on jax:0 is read after its base was written to: jax arrays have "
    r"no views, and this view is a copy of the old values. Take the view after the write, or take a copy, "
    r"view.clone\(\), before it."
)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_write_through_a_view_is_refused(name: str, compiled: bool) -> None:
    def write(x: Any) -> Any:
        VIEWS[name](x).mul_(5)
        return x

    x = on_jax()
    with pytest.raises(md.MaskedSemanticsError, match=LOST):
        (jax_jit(write) if compiled else write)(x)
    same(x, on_cpu())


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_not_read_after_a_write_to_its_base(name: str) -> None:
    x = on_jax()
    view, copied = VIEWS[name](x), VIEWS[name](x).clone()
    x.add_(1)
    with pytest.raises(md.MaskedSemanticsError, match=STALE):
        view + 1
    same(copied, VIEWS[name](on_cpu()))
    same(VIEWS[name](x), VIEWS[name](on_cpu() + 1))


def test_backward_notices_that_what_it_needs_was_overwritten() -> None:
    x, y = on_jax().requires_grad_(), on_jax()
    exponential = x.exp()
    loss = exponential.sum().to_tensor(0.0)
    exponential.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    product = (x * y).sum().to_tensor(0.0)  # needs a filled copy of y
    y.add_(1)
    product.backward()
    same(x.grad, on_cpu())


def test_plain_tensors_are_updated_where_valid() -> None:
    for device in ("jax", "cpu"):
        table = torch.zeros(3, 4).to(device)
        table.add_(on_cpu().to(device))
        assert table.cpu().equal(on_cpu().to_tensor(0.0))
