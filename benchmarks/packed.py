"""R10: a transformer block on a padded batch of which 60 % of the tokens are valid.

The limit is the matrix products of the valid tokens alone: those of the linear layers, and of each sequence's
attention, into memory that is there already; forward and backward, each product and the two of its gradients. Beside
packed storage, inside a block as people write it: the same block by hand on rows, with a loop over sequences; on the
padded batch with a bool mask for the keys; and on a NestedTensor. Results, or the gradients of the weights, are
compared before anything is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masked_dispatch as md
from benchmarks.harness import Call, Goal, duration, measure, print_table, progress, timing
from benchmarks.peak import GIVING_BACK, peak_of_call, peak_of_process

BATCH, TIME, WIDTH, HEADS = 16, 512, 256, 4
PRODUCTS, BY_HAND = "products of the valid tokens", "rows by hand"
PACKED, WITH_BORDERS, PADDED, NESTED = "packed", "packed, from and to padded", "padded, bool mask", "NestedTensor"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """A pre-norm transformer block; `attend` takes and gives (B, H, T, D), or heads of whatever `heads` makes."""

    def __init__(self, attend: Attend = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.attend = attend
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for part in self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.proj(self.attend(q, k, v).transpose(-3, -2).flatten(-2))
        return x + self.mlp(self.ln2(x))


def lengths() -> list[int]:
    """Between 32 and 512 tokens, one sequence as long as the batch: 60 % of its tokens, 42 % of its pairs of tokens."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(32, TIME + 1, (BATCH,), generator=generator, device="cpu").tolist()
    return [TIME, *drawn[1:]]


def by_sequence(sizes: list[int]) -> Attend:
    """Attention of rows (H, rows, D) by hand, one sequence after another."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(t.transpose(0, 1).split(sizes) for t in (q, k, v)), strict=True)
        attended = [F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in part)) for part in parts]
        return torch.cat([t[0].transpose(0, 1) for t in attended]).transpose(0, 1)

    return attend


class Products:
    """The limit: nothing but the matrix products of the valid tokens."""

    def __init__(self, sizes: list[int]) -> None:
        tokens, depth = sum(sizes), WIDTH // HEADS
        self.linear = []
        for n, m in ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)):
            x, w, y = torch.randn(tokens, n), torch.randn(m, n), torch.randn(tokens, m)
            self.linear.append((x, w, y, torch.empty_like(x), torch.empty_like(w), torch.empty_like(y)))
        self.attention = []
        for n in sizes:
            q, o, p = torch.randn(HEADS, n, depth), torch.empty(HEADS, n, depth), torch.randn(HEADS, n, n)
            self.attention.append((q, o, p, torch.empty_like(p)))

    def forward(self) -> None:
        for x, w, _, _, _, y in self.linear:
            torch.mm(x, w.mT, out=y)
        for q, o, p, scores in self.attention:
            torch.bmm(q, q.mT, out=scores)
            torch.bmm(p, q, out=o)

    def forward_backward(self) -> None:
        self.forward()
        for x, w, y, dx, dw, _ in self.linear:
            torch.mm(y, w, out=dx)
            torch.mm(y.mT, x, out=dw)
        for q, o, p, scores in self.attention:
            torch.bmm(q, q.mT, out=scores)
            torch.bmm(p.mT, q, out=o)
            torch.bmm(p, q, out=o)
            torch.bmm(p.mT, q, out=o)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def valid_tokens() -> Tensor:
    """(BATCH, TIME): where a sequence has a token."""
    return torch.arange(TIME) < torch.tensor(lengths())[:, None]


def rows_of(result: Any) -> list[Tensor]:
    """What a candidate gives, as plain tensors: the rows of valid tokens, or the gradients of the weights."""
    if isinstance(result, list):
        return result
    if md.is_masked_tensor(result):
        return [result.to_tensor(0)[valid_tokens().to(result.device)]]
    if result.is_nested:
        return [result.values()]
    return [result[valid_tokens().to(result.device)] if result.ndim == 3 else result]


def check(calls: dict[str, Call], rounding: float = 1e-3) -> None:
    """Every candidate gives what the rows by hand give."""
    expected = rows_of(calls[BY_HAND]())
    for name in calls.keys() - {PRODUCTS, BY_HAND}:
        for found, right in zip(rows_of(calls[name]()), expected, strict=True):
            # Gradients sum over thousands of tokens, in another order each.
            nearly = rounding / 10 * float(right.abs().max())
            torch.testing.assert_close(
                found, right, rtol=rounding, atol=nearly, msg=lambda m, name=name: f"{name}: {m}"
            )


def candidates(
    backward: bool, device: str = "cpu", dtype: torch.dtype = torch.float32, compiled: bool = False
) -> dict[str, Call]:
    """Each way to compute the block, by name. A call gives the result, or the gradients of the weights.

    compiled  whether the packed and the padded block are compiled, each at its first call
    """
    sizes = lengths()
    torch.manual_seed(0)
    block = Block().to(device, dtype)
    x = torch.randn(BATCH, TIME, WIDTH, device=device, dtype=dtype)
    there = valid_tokens().to(device)
    rows = x[there]

    def with_weights(attend: Attend) -> Block:
        other = Block(attend).to(device, dtype)
        other.load_state_dict(block.state_dict())
        return other

    def step(module: Block, given: Tensor, gradient: Tensor, compiled: bool = False) -> Call:
        run = torch.compile(module) if compiled else module

        def forward() -> Tensor:
            with torch.no_grad():
                return run(given)

        def forward_backward() -> list[Tensor]:
            module.zero_grad(set_to_none=True)
            run(given).backward(gradient)
            return gradients(module)

        return forward_backward if backward else forward

    masked = md.masked_tensor(x, there[..., None])
    packed = masked.to_packed()
    nested = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, *sizes]).cumsum(0).to(device))
    keys = there[:, None, None, :]

    def on_padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keys)

    def from_and_to_padded() -> Tensor | list[Tensor]:
        if not backward:
            with torch.no_grad():
                return block(masked.to_packed()).to_dense()
        block.zero_grad(set_to_none=True)
        block(masked.to_packed()).to_dense().backward(masked)
        return gradients(block)

    def attend_nested(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # torch wants nested heads to have been contiguous before they were transposed.
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)

    calls: dict[str, Call] = {}
    if device == "cpu":  # many small products; elsewhere the rate of a large one is the limit
        products = Products(sizes)
        calls[PRODUCTS] = products.forward_backward if backward else products.forward
    return calls | {
        PACKED: step(block, packed, packed.detach(), compiled),
        WITH_BORDERS: from_and_to_padded,
        BY_HAND: step(with_weights(by_sequence(sizes)), rows, rows),
        PADDED: step(with_weights(on_padded), x, torch.where(there[..., None], x, 0), compiled),
        NESTED: step(with_weights(attend_nested), nested, nested),
    }


def peak_of(name: str, backward: bool) -> float:
    """What a second run allocates at most, in MiB, in a process of its own."""
    return peak_of_process("benchmarks.packed", name, "backward" if backward else "forward", allocator=GIVING_BACK)


def measure_peak(name: str, direction: str) -> float:
    """The same, in this process."""
    torch.set_num_threads(1)
    call = candidates(direction == "backward")[name]
    call()
    return peak_of_call(call)


def run(rounds: int = 9) -> list[Goal]:
    """Measure and print; what was promised."""
    goals = []
    for name, backward in zip(progress(("forward", "forward and backward"), "packed"), (False, True), strict=True):
        calls = candidates(backward)
        check(calls)
        measured = measure(calls, rounds=rounds, warm_up=1)
        limit = measured[PRODUCTS]
        timings = {candidate: timing(seconds, limit) for candidate, seconds in measured.items()}
        peaks = {c: f"{peak_of(c, backward):.0f}" for c in timings if c != PRODUCTS} if sys.platform == "linux" else {}
        table = [
            (candidate, duration(t.seconds), str(t), f"{t.low:.2f}–{t.high:.2f}", peaks.get(candidate, "–"))
            for candidate, t in timings.items()
        ]
        share = sum(lengths()) / (BATCH * TIME)
        print_table(
            f"transformer block, {name}: {BATCH} sequences of up to {TIME} tokens, {share:.0%} valid, width {WIDTH}",
            ("", "time", "× products", "quartiles", "peak MiB"),
            table,
        )
        ours = timings[PACKED].ratio
        goals += [
            Goal(f"packed block, {name}, × products of the valid tokens", ours, 1.12),
            Goal(f"packed block, {name}, times as fast as padded", timings[PADDED].ratio / ours, 1.85, at_least=True),
            Goal(f"packed block, {name}, times as fast as nested", timings[NESTED].ratio / ours, 2.8, at_least=True),
        ]
    return goals


if __name__ == "__main__":
    print(measure_peak(*sys.argv[1:]))
