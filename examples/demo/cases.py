"""3. Three cases that people asked for before this library existed."""

from __future__ import annotations

import torch
from torch import Tensor

import masked_dispatch as md
import op_registry
from examples.demo.console import say, table
from examples.demo.training import Compilation, reset_compiler


def masked_mean() -> None:
    """A mean over the valid elements: a gradient of exactly zero elsewhere, one graph for every mask."""
    reset_compiler()

    @torch.compile(fullgraph=True)
    def mean(x: Tensor, mask: Tensor) -> Tensor:
        return md.as_masked_tensor(x, mask).mean()

    generator = torch.Generator().manual_seed(0)
    largest_outside, largest_error, masks = 0.0, 0.0, 20
    for _ in range(masks):
        mask = torch.rand(64, 64, generator=generator) < torch.rand((), generator=generator)
        x = torch.where(mask, torch.randn(64, 64, generator=generator), float("nan")).requires_grad_()
        loss = mean(x, mask)
        loss.backward()
        expected = torch.where(mask, 1 / mask.sum(), 0.0)
        largest_outside = max(largest_outside, float(x.grad[~mask].abs().max()))
        largest_error = max(largest_error, float((x.grad - expected).abs().max()))
        torch.testing.assert_close(loss.to_tensor(0.0), x.detach()[mask].mean())
    counted = Compilation.since_reset()
    table(
        ("masked mean, compiled, NaN outside the mask", ""),
        [
            ["masks tried", masks],
            ["largest gradient where invalid", largest_outside],
            ["largest distance of the gradient from 1 / count", largest_error],
            ["graphs", counted.graphs],
            ["graph breaks", counted.breaks],
            ["recompiles", counted.recompiles],
        ],
    )
    assert largest_outside == 0


def adagrad(p: Tensor, g: Tensor, state: Tensor, lr: float) -> None:
    """Adagrad, written once. With a masked gradient, rows without one keep their weight and state."""
    state.addcmul_(g, g)
    std = state.sqrt().add_(1e-10)
    p.addcdiv_(g, std, value=-lr)


def adagrad_by_hand(p: Tensor, g: Tensor, state: Tensor, lr: float) -> None:
    """The same for torch's sparse gradients, as torch.optim had to write it (PyTorch issue 1369)."""
    g = g.coalesce()
    rows, values = g.indices(), g.values()

    def sparse(v: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(rows, v, g.shape, is_coalesced=True)

    state.add_(sparse(values.pow(2)))
    std = state.sparse_mask(g).values().sqrt_().add_(1e-10)
    p.add_(sparse(values / std), alpha=-lr)


def masked_rows(g: Tensor) -> Tensor:
    """torch's sparse gradient of an embedding as a masked tensor: the rows that were looked up are valid."""
    g = g.coalesce()
    touched = torch.zeros(g.shape[0], 1, dtype=torch.bool)
    touched[g.indices()[0]] = True
    dense = torch.full(g.shape, float("nan"))
    dense[g.indices()[0]] = g.values()
    return md.as_masked_tensor(dense, touched)


@torch.sparse.check_sparse_tensor_invariants()
def adagrad_once() -> None:
    """20 steps on an embedding, a few rows looked up in each: written once, by hand, and torch's own."""
    generator = torch.Generator().manual_seed(0)
    rows, width, lr, steps = 1000, 16, 0.1, 20
    start = torch.randn(rows, width, generator=generator)

    def gradients() -> list[Tensor]:
        """Sparse gradients in which rows occur several times."""
        found = []
        for _ in range(steps):
            looked_up = torch.randint(rows, (1, 100), generator=generator)
            values = torch.randn(100, width, generator=generator)
            found.append(torch.sparse_coo_tensor(looked_up, values, (rows, width)))
        return found

    sparse_gradients = gradients()
    once, by_hand, torchs = start.clone(), start.clone(), torch.nn.Parameter(start.clone())
    state, state_by_hand = torch.zeros(rows, width), torch.zeros(rows, width)
    optimizer = torch.optim.Adagrad([torchs], lr=lr)
    for g in sparse_gradients:
        adagrad(once, masked_rows(g), state, lr)
        adagrad_by_hand(by_hand, g, state_by_hand, lr)
        torchs.grad = g
        optimizer.step()
    dense = start.clone()
    adagrad(dense, sparse_gradients[0].to_dense(), torch.zeros(rows, width), lr)  # the same code, a plain gradient

    untouched = torch.ones(rows, dtype=torch.bool)
    for g in sparse_gradients:
        untouched[g.coalesce().indices()[0]] = False
    table(
        ("Adagrad, written once, masked gradients with NaN where absent", ""),
        [
            ["steps", steps],
            ["rows that no step looked up", int(untouched.sum())],
            ["of these, changed", int((once != start)[untouched].any(1).sum())],
            ["largest difference from the sparse one, by hand", float((once - by_hand).abs().max())],
            ["largest difference of the states", float((state - state_by_hand).abs().max())],
            ["largest difference from torch.optim.Adagrad", float((once - torchs.detach()).abs().max())],
            ["a plain gradient through the same code: rows changed", int((dense != start).any(1).sum())],
        ],
    )


def own_operator() -> None:
    """An operator that torch does not know gets a masked meaning in one line, and is checked law by law."""

    @torch.library.custom_op("demo::squashed", mutates_args=())
    def squashed(x: Tensor) -> Tensor:
        return x / (1 + x.abs())

    squashed.register_fake(torch.empty_like)
    squashed.register_autograd(
        lambda ctx, g: g / (1 + ctx.saved_tensors[0].abs()) ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )

    operator = torch.ops.demo.squashed.default
    x = md.from_nan(torch.tensor([1.0, float("nan"), -3.0]))
    try:
        operator(x)
    except md.MaskedSemanticsError as error:
        say(f"before: {str(error).splitlines()[0]}")
    rule = op_registry.authoring.elementwise(operator)
    say(f"after:  {operator(x)}")
    say(f"rule:   {rule}")
    verdict = op_registry.check(operator)
    say(str(verdict))
    assert verdict, "a law is broken"


def show() -> None:
    masked_mean()
    adagrad_once()
    own_operator()
