"""What models do in more than a line, as functions that the lines of padded programs call (padded_programs.py).

Each takes a batch (B, T, features), or a sample as a batch of one, and is plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _At:
    """``at[:, 1:-1]`` is the index that is written in the brackets."""

    def __getitem__(self, index: Any) -> Any:
        return index


at = _At()

# ----------------------------------------------------------------------------------------------------- loops over steps


def zeros(x: Tensor, size: int) -> Tensor:
    """A first state."""
    return torch.zeros(x.shape[0], size, dtype=x.dtype)


def states(cell: str, x: Tensor, of_input: Tensor, of_state: Tensor, backwards: bool = False) -> list[Tensor]:
    """The states of a recurrent cell of torch after each step, in the order of the steps."""
    size = of_state.shape[1]
    carried: Any = (zeros(x, size), zeros(x, size)) if cell == "lstm" else zeros(x, size)
    found = []
    for step in reversed(x.unbind(1)) if backwards else x.unbind(1):
        carried = getattr(torch, f"{cell}_cell")(step, carried, of_input, of_state)
        found.append(carried[0] if cell == "lstm" else carried)
    return found[::-1] if backwards else found


def two_layers(x: Tensor, of_input: Tensor, *of_states: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The states of two layers of cells after each step."""
    first, of_first, second = of_states
    below = above = zeros(x, first.shape[1])
    found = []
    for step in x.unbind(1):
        below = torch.rnn_tanh_cell(step, below, of_input, first)
        above = torch.rnn_tanh_cell(below, above, of_first, second)
        found.append((below, above))
    return found


def recurrence(x: Tensor, weight: Tensor) -> Tensor:
    """The states of a recurrence written by hand: a linear map of a step's features and the state."""
    state, found = zeros(x, weight.shape[0]), []
    for step in x.unbind(1):
        state = F.linear(torch.cat([step, state], -1), weight).tanh()
        found.append(state)
    return torch.stack(found, 1)


def decayed(x: Tensor) -> Tensor:
    """A filter: each step, and half of what was before."""
    state, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = 0.5 * state + x[:, t]
        found.append(state)
    return torch.stack(found, 1)


def held(x: Tensor, of_input: Tensor, of_state: Tensor) -> list[Tensor]:
    """The states of a recurrence that a missing step leaves alone."""
    state, found = zeros(x, of_state.shape[0]), []
    for step in x.unbind(1):
        new = (F.linear(step, of_input) + F.linear(state, of_state)).tanh()
        state = torch.where(mask_of(step).all(-1, keepdim=True), new, state)
        found.append(state)
    return found


def forward_algorithm(x: Tensor, transitions: Tensor) -> Tensor:
    """The scores of a chain (CRF): a step is a log-sum-exp over states, and a missing one leaves the score alone."""
    score = x[:, 0]
    for step in x.unbind(1)[1:]:
        new = (score[:, :, None] + transitions + step[:, None]).logsumexp(1)
        score = torch.where(mask_of(step).all(-1, keepdim=True), new, score)
    return score


def state_space(x: Tensor, write: bool) -> Tensor:
    """A scan whose state is a matrix, read by each step; the results are stacked, or written into a buffer."""
    state, found = torch.zeros(x.shape[0], x.shape[2], 1, dtype=x.dtype), []
    for t in range(x.shape[1]):
        state = 0.5 * state + x[:, t, :, None] * x[:, t, None]
        found.append((state @ x[:, t, :, None])[..., 0])
    return filled(torch.zeros_like(x), found) if write else torch.stack(found, 1)


def located(x: Tensor, conv: Tensor, features: Tensor) -> Tensor:
    """Attention that sees where it was before: the weights of two steps of a decoder, over positions."""
    weights = total = torch.zeros(x.shape[:2], dtype=x.dtype)
    found = []
    for _ in range(2):
        seen = torch.cat([weights[:, None], total[:, None]], 1)
        energies = F.conv1d(seen, conv, padding=1).sum(1) + (x * features).sum(-1).tanh()
        weights = energies.softmax(1)
        total = total + weights
        found.append((weights[:, None] @ x)[:, 0])
    return torch.stack(found, 1)


def mask_of(x: Any) -> Tensor:
    """Which elements are valid: all of a plain tensor."""
    try:  # (Dynamo answers hasattr as for a plain tensor)
        return x.get_mask()  # type: ignore[no-any-return]
    except AttributeError:
        return torch.ones(x.shape, dtype=torch.bool)


# --------------------------------------------------------------------------------------------------------------- writes


def filled(buffer: Tensor, steps: Sequence[Tensor]) -> Tensor:
    """A buffer, after each of its steps is written."""
    for t, step in enumerate(steps):
        buffer[:, t] = step
    return buffer


def written(x: Tensor, index: Any, value: Any) -> Tensor:
    """A copy, after an assignment."""
    x = x.clone()
    x[index] = value
    return x


def scaled(x: Tensor, index: Any) -> Tensor:
    """A copy, after a write through a view."""
    x = x.clone()
    x[index].mul_(0.5)
    return x


def chosen(x: Tensor, where: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A copy in which the elements that a mask chooses are taken out, worked on, and put back."""
    x = x.clone()
    x[where] = function(x[where])
    return x


# ----------------------------------------------------------------------------------------------- tokens that are joined


def attended(x: Tensor, first: Tensor, last: Tensor | None = None) -> Tensor:
    """Self-attention of steps with tokens joined before them, and behind them."""
    tokens = [t.expand(x.shape[0], -1, -1) for t in (first, last) if t is not None]
    joined = torch.cat([tokens[0], x, *tokens[1:]], 1)
    return joined + F.scaled_dot_product_attention(joined, joined, joined)


# ---------------------------------------------------------------------------------------------- positions beside others


def differences(x: Tensor) -> Tensor:
    """A table (T, T) of the distances of two positions."""
    positions = torch.arange(x.shape[1])
    return positions[:, None] - positions


def graph_convolution(x: Tensor) -> Tensor:
    """Neighbours' features, weighed by similarities; each node is its own neighbour."""
    adjacency, nodes = (x @ x.mT).sigmoid().clone(), torch.arange(x.shape[1])
    adjacency[:, nodes, nodes] = 1
    degree = adjacency.sum(-1).clamp(min=1).pow(-0.5)
    return (degree[:, :, None] * adjacency * degree[:, None]) @ x


def additive_attention(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Scores made by broadcasting two linear maps, without those of neighbours that are unlike."""
    scores = F.leaky_relu((x * source).sum(-1)[:, None] + (x * target).sum(-1)[:, :, None])
    return scores.masked_fill(x @ x.mT < 0, -1e9).softmax(2) @ x


def attentive_statistics(x: Tensor) -> Tensor:
    """Mean and deviation of channels (B, C, T) over positions, weighed by attention."""
    weights = x.softmax(2)
    mean = (weights * x).sum(2, keepdim=True)
    variance = (weights * (x - mean) ** 2).sum(2, keepdim=True)
    return torch.cat([mean, variance.clamp(min=1e-4).sqrt()], 1)[..., 0]


def slots(x: Tensor, weight: Tensor) -> Tensor:
    """Slot attention: a softmax over slots, normalised over positions."""
    attention = F.linear(x, weight).softmax(-1) + 0.1
    return (attention / attention.sum(1, keepdim=True)).mT @ x


def skewed(scores: Tensor) -> Tensor:
    """Relative shift: scores (B, T, T) by distance become scores by position."""
    count, size = scores.shape[:2]
    if scores.shape[2] != size:
        raise ValueError("scores of as many keys as queries are shifted")
    joined = torch.cat([torch.zeros(count, size, 1, dtype=scores.dtype), scores], -1)
    return joined.view(count, -1, size)[:, 1:].view_as(scores)


def sparsemax(x: Tensor) -> Tensor:
    """The projection of the last dimension on the simplex: values sorted, summed up, and taken where support ends."""
    ordered = x.sort(-1, descending=True)[0]
    sums = ordered.cumsum(-1) - 1
    support = (ordered * torch.arange(1, x.shape[-1] + 1) > sums).sum(-1, keepdim=True)
    return (x - sums.gather(-1, support - 1) / support).clamp(min=0)
