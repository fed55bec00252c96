"""Steps of programs under P9: lines that are the same for a batch and for a sample, whatever their sizes are.

Each kind gives the line for a value with these axes, the axes of its result, and shapes of weights: {w0}, {w1} … in the
line. Axes are letters (samples differ in size), numbers (features), and tuples for what a line made of a letter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

Axis = Any
Axes = tuple[Axis, ...]


class Line(NamedTuple):
    """A line: its code, the axes of its result, and the shapes of its weights. {0} and {1} are its operands."""

    code: str
    axes: Axes
    weights: tuple[tuple[int, ...], ...] = ()


# A kind of line for operands with these axes (the second one's, or None); None where it does not fit.
Kind = Callable[[random.Random, Axes], Line | None]
Pair = Callable[[random.Random, Axes, Axes], Line | None]
WIDTHS = (2, 3, 4)
REDUCTIONS = ("sum({d}{k})", "mean({d}{k})", "amax({d}{k})", "var({d}, correction=0{k})", "logsumexp({d}{k})")


def ragged(axes: Axes) -> list[int]:
    """Dimensions in which samples differ."""
    return [d for d, axis in enumerate(axes) if d and not isinstance(axis, int)]


def features(axes: Axes) -> list[int]:
    return [d for d, axis in enumerate(axes) if d and isinstance(axis, int)]


def is_steps(axes: Axes) -> bool:
    """(B, T, features)."""
    return len(axes) == 3 and not isinstance(axes[1], int) and isinstance(axes[2], int)


def is_channels_first(axes: Axes) -> bool:
    """(B, features, T)."""
    return len(axes) == 3 and isinstance(axes[1], int) and not isinstance(axes[2], int)


def is_image(axes: Axes) -> bool:
    return len(axes) == 4 and isinstance(axes[1], int) and not any(isinstance(a, int) for a in axes[2:])


def put(axes: Axes, dim: int, axis: Axis) -> Axes:
    return (*axes[:dim], axis, *axes[dim + 1 :])


def elementwise(rng: random.Random, axes: Axes) -> Line:
    code = rng.choice(("{0}.tanh()", "{0} * {0} * 0.3 + 1", "torch.where({0} > 0, {0}, 0.1 * {0})", "F.gelu({0})"))
    return Line(code, axes)


def reduced_and_back(rng: random.Random, axes: Axes) -> Line | None:
    if not ragged(axes):
        return None
    reduction = rng.choice(REDUCTIONS).format(d=rng.choice(ragged(axes)), k=", keepdim=True")
    return Line(f"{{0}} + {{0}}.{reduction}", axes)


def reduced(rng: random.Random, axes: Axes) -> Line | None:
    if len(axes) < 3:
        return None
    dims = rng.sample(range(1, len(axes)), rng.randint(1, min(2, len(axes) - 2)))
    code = rng.choice(REDUCTIONS).format(d=tuple(dims), k="")
    return Line(f"{{0}}.{code}", tuple(a for d, a in enumerate(axes) if d not in dims))


def joined_mean(rng: random.Random, axes: Axes) -> Line | None:
    if not is_steps(axes) or axes[2] > 8:
        return None
    return Line("torch.cat([{0}, {0}.mean(1, keepdim=True).expand_as({0})], -1)", put(axes, 2, 2 * axes[2]))


def joined_number(rng: random.Random, axes: Axes) -> Line | None:
    """A plain part: along features, or at an end of the positions."""
    d = rng.randrange(1, len(axes))
    if isinstance(axes[d], int) and axes[d] > 8:
        return None
    ones = f"torch.full([1 if i == {d} else n for i, n in enumerate({{0}}.shape)], 0.7, dtype=torch.float64)"
    parts = rng.choice((f"{{0}}, {ones}", f"{ones}, {{0}}"))
    axis = axes[d] + 1 if isinstance(axes[d], int) else ("one more", parts[0], axes[d])
    return Line(f"torch.cat([{parts}], {d})", put(axes, d, axis))


def permuted(rng: random.Random, axes: Axes) -> Line | None:
    if len(axes) < 3:
        return None
    order = [0, *rng.sample(range(1, len(axes)), len(axes) - 1)]
    return Line(f"{{0}}.permute({order})", tuple(axes[d] for d in order))


def merged_linear(rng: random.Random, axes: Axes) -> Line | None:
    if not is_steps(axes):
        return None
    return Line("F.linear({0}.flatten(0, 1), {w0}).unflatten(0, {0}.shape[:2])", put(axes, 2, 4), ((4, axes[2]),))


def heads(rng: random.Random, axes: Axes) -> Line | None:
    if not is_steps(axes) or axes[2] % 2:
        return None
    split = f"{{0}}.unflatten(2, (2, {axes[2] // 2})).transpose(1, 2).flatten(0, 1).softmax(1)"
    return Line(f"{split}.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)", axes)


def merged(rng: random.Random, axes: Axes) -> Line | None:
    dims = [d for d in range(1, len(axes) - 1) if d in ragged(axes) or d + 1 in ragged(axes)]
    if not dims:
        return None
    d = rng.choice(dims)
    return Line(f"{{0}}.flatten({d}, {d + 1})", (*axes[:d], ("merged", axes[d], axes[d + 1]), *axes[d + 2 :]))


def along(rng: random.Random, axes: Axes) -> Line | None:
    if len(axes) < 2:
        return None
    # (without what is left open: the order of equal elements, and rounding errors that are divided by a norm of none)
    sort, normalize = "{0}.sort(dim={d}, stable=True)[0]", "F.normalize({0}, dim={d}, eps=1e-3)"
    code = rng.choice(("{0}.softmax({d})", "{0}.cumsum({d})", sort, normalize))
    return Line(code.replace("{d}", str(rng.randrange(1, len(axes)))), axes)


def linear(rng: random.Random, axes: Axes) -> Line | None:
    if len(axes) < 2 or not isinstance(axes[-1], int):
        return None
    width = rng.choice(WIDTHS)
    return Line("F.linear({0}, {w0}, {w1})", put(axes, len(axes) - 1, width), ((width, axes[-1]), (width,)))


def normalised(rng: random.Random, axes: Axes) -> Line | None:
    if len(axes) < 2 or not isinstance(axes[-1], int):
        return None
    # (An element that equals the mean is 0 but for rounding errors, whose sign a later step might ask for.)
    return Line(f"F.layer_norm({{0}}, ({axes[-1]},)) + 0.01", axes)


def gram(rng: random.Random, axes: Axes) -> Line | None:
    return Line("{0}.transpose(1, 2) @ {0}", (axes[0], axes[2], axes[2])) if is_steps(axes) else None


def pairs(rng: random.Random, axes: Axes) -> Line | None:
    if not is_steps(axes) or axes[2] > 6:
        return None
    n = "{0}.shape[1]"
    both = f"[{{0}}[:, :, None].expand(-1, -1, {n}, -1), {{0}}[:, None].expand(-1, {n}, -1, -1)]"
    return Line(f"torch.cat({both}, -1)", (axes[0], axes[1], axes[1], 2 * axes[2]))


def convolved(rng: random.Random, axes: Axes) -> Line | None:
    if not (is_channels_first(axes) or is_image(axes)):
        return None
    n = len(axes) - 2
    kernel, stride, width = rng.choice((1, 2, 3)), rng.choice((1, 1, 2)), rng.choice(WIDTHS)
    padding = rng.randint(0, kernel // 2)
    made = tuple(("window", kernel, stride, padding, a) for a in axes[2:])
    if rng.random() < 0.25:
        code = f"F.conv_transpose{n}d({{0}}, {{w0}}, stride={stride}, padding={padding})"
        return Line(code, (axes[0], width, *(("spread", m) for m in made)), ((axes[1], width, *(kernel,) * n),))
    code = f"F.conv{n}d({{0}}, {{w0}}, {{w1}}, stride={stride}, padding={padding})"
    return Line(code, (axes[0], width, *made), ((width, axes[1], *(kernel,) * n), (width,)))


def pooled(rng: random.Random, axes: Axes) -> Line | None:
    if not (is_channels_first(axes) or is_image(axes)):
        return None
    n, kernel, stride = len(axes) - 2, rng.choice((2, 3)), rng.choice((1, 2, 3))
    padding, ceil = rng.randint(0, kernel // 2), rng.random() < 0.5
    kind = rng.choice((f"max_pool{n}d({{0}}", f"avg_pool{n}d({{0}}"))
    counted = f", count_include_pad={rng.random() < 0.5}" if kind.startswith("avg") else ""
    made = tuple(("pool", kernel, stride, padding, ceil, a) for a in axes[2:])
    return Line(f"F.{kind}, {kernel}, {stride}, {padding}, ceil_mode={ceil}{counted})", (*axes[:2], *made))


def padded(rng: random.Random, axes: Axes) -> Line | None:
    if isinstance(axes[-1], int):
        return None
    a, b = rng.randint(-1, 2), rng.randint(-1, 2)
    return Line(f"F.pad({{0}}, ({a}, {b}), value=0.3)", put(axes, len(axes) - 1, ("pad", a, b, axes[-1])))


def interpolated(rng: random.Random, axes: Axes) -> Line | None:
    if not is_channels_first(axes):
        return None
    mode = rng.choice(("nearest", "linear"))
    return Line(f"F.interpolate({{0}}, scale_factor=2.0, mode={mode!r})", put(axes, 2, ("twice", axes[2])))


def cut(rng: random.Random, axes: Axes) -> Line | None:
    if not ragged(axes):
        return None
    d, k = rng.choice(ragged(axes)), rng.randint(1, 2)
    # (A stop that happens to be a join's border gives the part back, which is not the sample's own first positions.)
    from_the_end = (f"{k}:", f":-{k}", f"{k}:-1")
    bounds = rng.choice(from_the_end if _is_joined(axes[d]) else (*from_the_end, f":{k}", "::2"))
    return Line(f"{{0}}[{':, ' * d}{bounds}]", put(axes, d, ("cut", bounds, axes[d])))


def _is_joined(axis: Axis) -> bool:
    return isinstance(axis, tuple) and (axis[0] in ("joined", "one more") or any(map(_is_joined, axis)))


def differences(rng: random.Random, axes: Axes) -> Line | None:
    if not ragged(axes):
        return None
    d = rng.choice(ragged(axes))
    lead = ":, " * d
    return Line(f"{{0}}[{lead}1:] - {{0}}[{lead}:-1]", put(axes, d, ("cut", "1:", axes[d])))


def turned(rng: random.Random, axes: Axes) -> Line | None:
    if not ragged(axes):
        return None
    d = rng.choice(ragged(axes))
    return Line(rng.choice((f"{{0}} + {{0}}.flip({d})", f"{{0}}.roll(1, {d})")), axes)


def gated(rng: random.Random, axes: Axes) -> Line | None:
    if not is_channels_first(axes):
        return None
    return Line("{0} * F.linear({0}.mean(2), {w0}).sigmoid().unsqueeze(2)", axes, ((axes[1], axes[1]),))


def unfolded(rng: random.Random, axes: Axes) -> Line | None:
    if not ragged(axes) or len(axes) > 3:
        return None
    d = rng.choice(ragged(axes))
    return Line(f"{{0}}.unfold({d}, 2, 1)", (*put(axes, d, ("cut", "1:", axes[d])), 2))


KINDS: tuple[Kind, ...] = (
    elementwise, elementwise, reduced_and_back, reduced_and_back, reduced, joined_mean, joined_number, joined_number,
    permuted, permuted, merged_linear, heads, merged, along, along, linear, normalised, gram, pairs, convolved,
    convolved, pooled, padded, interpolated, cut, cut, differences, turned, gated, unfolded,
)  # fmt: skip


def two(rng: random.Random, axes: Axes, other: Axes) -> Line | None:
    """Lines with another value of the same axes."""
    if axes != other:
        return None
    d = rng.randrange(1, len(axes))
    stacked = (axes[0], 2, *axes[1:])
    lines = [Line("{0} + {1}", axes), Line("{0} * {1}", axes), Line("torch.where({0} > 0, {1}, {0})", axes)]
    lines.append(Line("torch.stack([{0}, {1}], 1)", stacked))
    longer = axes[d] * 2 if isinstance(axes[d], int) else ("joined", axes[d], axes[d])
    lines.append(Line(f"torch.cat([{{0}}, {{1}}], {d})", put(axes, d, longer)))
    return rng.choice(lines)


def attending(rng: random.Random, axes: Axes, other: Axes) -> Line | None:
    if not (is_steps(axes) and is_steps(other) and axes[2] == other[2]):
        return None
    scores = "{0} @ {1}.transpose(1, 2)"
    attended = Line(f"({scores}).softmax(-1) @ {{1}}", axes)
    fused = Line("F.scaled_dot_product_attention({0}, {1}, {1})", axes)
    return rng.choice((attended, fused, Line(scores, (axes[0], axes[1], other[1]))))


def joined_steps(rng: random.Random, axes: Axes, other: Axes) -> Line | None:
    if not (is_steps(axes) and is_steps(other) and axes[2] == other[2]):
        return None
    return Line("torch.cat([{0}, {1}], 1)", put(axes, 1, ("joined", axes[1], other[1])))


PAIRS: tuple[Pair, ...] = (two, two, attending, joined_steps)
