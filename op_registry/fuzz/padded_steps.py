"""Steps of programs under P9: lines that are the same for a batch and for a sample, whatever their sizes are.

{0} and {1} are a line's operands, and {w:2,3} is a weight of shape (2, 3). Other names in braces are drawn:

{d}                a dimension after the batch
{r}, {before}      a dimension in which samples differ, and what an index has before it
{i}, {j}           a dimension after the batch, and the next
{dims}             one or two dimensions after the batch, but not all of them
{order}            all dimensions, those after the batch in random order
{k}                1 or 2
{a}, {b}           how much is added at each end, or cut off if it is negative
{K}, {S}, {P}      kernel, stride and padding of a window
{ceil}, {counted}  True or False
{C}, {F}, {O}      the sizes of dimension 1 and of the last dimension, and a new number of features
{ones}             a plain tensor like the first operand, of size 1 along {d}

If torch refuses a line for its operands' sizes, another one is drawn, so a line need not fit every operand.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

# Groups of lines: how often a group is drawn, a pattern of the dimensions after the batch that its operand has (r if
# samples differ in it, f for features), and its lines.
LINES = """
2 .* {0}.tanh() | {0} * {0} * 0.3 + 1 | torch.where({0} > 0, {0}, 0.1 * {0}) | F.gelu({0})
2 .*r.* {0} + {0}.sum({r}, keepdim=True) | {0} + {0}.mean({r}, keepdim=True) | {0} + {0}.amax({r}, keepdim=True)
    | {0} + {0}.var({r}, correction=0, keepdim=True) | {0} + {0}.logsumexp({r}, keepdim=True)
1 ..+ {0}.sum({dims}) | {0}.mean({dims}) | {0}.amax({dims}) | {0}.var({dims}, correction=0) | {0}.logsumexp({dims})
1 rf torch.cat([{0}, {0}.mean(1, keepdim=True).expand_as({0})], -1)
2 .+ torch.cat([{0}, {ones}], {d}) | torch.cat([{ones}, {0}], {d})
2 ..+ {0}.permute({order})
1 rf F.linear({0}.flatten(0, 1), {w:4,F}).unflatten(0, {0}.shape[:2])
1 rf {0}.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1).softmax(1).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)
1 ..+ {0}.flatten({i}, {j})
2 .+ {0}.softmax({d}) | {0}.cumsum({d}) | {0}.sort(dim={d}, stable=True)[0] | F.normalize({0}, dim={d}, eps=1e-3)
1 .*f F.linear({0}, {w:O,F}, {w:O})
1 .*f F.layer_norm({0}, ({F},)) + 0.01
1 rf {0}.transpose(1, 2) @ {0}
1 rf torch.cat([{0}[:, :, None].expand(-1, -1, {0}.shape[1], -1), {0}[:, None].expand(-1, {0}.shape[1], -1, -1)], -1)
2 fr F.conv1d({0}, {w:O,C,K}, {w:O}, stride={S}, padding={P})
    | F.conv_transpose1d({0}, {w:C,O,K}, stride={S}, padding={P})
2 frr F.conv2d({0}, {w:O,C,K,K}, {w:O}, stride={S}, padding={P})
    | F.conv_transpose2d({0}, {w:C,O,K,K}, stride={S}, padding={P})
1 fr F.max_pool1d({0}, {K}, {S}, {P}, ceil_mode={ceil}) | F.avg_pool1d({0}, {K}, {S}, {P}, {ceil}, {counted})
1 frr F.max_pool2d({0}, {K}, {S}, {P}, ceil_mode={ceil}) | F.avg_pool2d({0}, {K}, {S}, {P}, {ceil}, {counted})
1 .*r F.pad({0}, ({a}, {b}), value=0.3)
1 fr F.interpolate({0}, scale_factor=2.0, mode="nearest") | F.interpolate({0}, scale_factor=2.0, mode="linear")
2 .*r.* {0}[{before}{k}:] | {0}[{before}:-{k}] | {0}[{before}{k}:-1] | {0}[{before}:{k}] | {0}[{before}::2]
1 .*r.* {0}[{before}1:] - {0}[{before}:-1]
1 .*r.* {0} + {0}.flip({r}) | {0}.roll(1, {r})
1 fr {0} * F.linear({0}.mean(2), {w:C,C}).sigmoid().unsqueeze(2)
1 r|.r|r. {0}.unfold({r}, 2, 1)
"""
# Lines with another value, behind the dimensions of both.
PAIRS = r"""
2 (.*),\1 {0} + {1} | {0} * {1} | torch.where({0} > 0, {1}, {0}) | torch.stack([{0}, {1}], 1)
    | torch.cat([{0}, {1}], {d})
1 rf,rf ({0} @ {1}.transpose(1, 2)).softmax(-1) @ {1} | F.scaled_dot_product_attention({0}, {1}, {1})
    | {0} @ {1}.transpose(1, 2)
1 rf,rf torch.cat([{0}, {1}], 1)
"""
ONES = "torch.full([1 if i == {d} else n for i, n in enumerate({{0}}.shape)], 0.7, dtype=torch.float64)"


def _groups(lines: str) -> list[tuple[int, re.Pattern[str], list[str]]]:
    split = [group.split(maxsplit=2) for group in re.split(r"\n(?=\d)", lines.strip())]
    return [(int(weight), re.compile(fits), re.split(r"\s+\|\s+", codes)) for weight, fits, codes in split]


GROUPS = {1: _groups(LINES), 2: _groups(PAIRS)}


def drawn(kinds: Sequence[str], shape: Sequence[int], rng: random.Random) -> tuple[str, list[tuple[int, ...]]] | None:
    """A line for operands with these kinds of dimensions, and the shapes of its weights; None if none fits.

    shape  of the first operand
    """
    fitting = [(weight, lines) for weight, fits, lines in GROUPS[len(kinds)] if fits.fullmatch(",".join(kinds))]
    if not fitting:
        return None
    (lines,) = rng.choices([lines for _, lines in fitting], [weight for weight, _ in fitting])
    numbers = _numbers(kinds[0], shape, rng)
    weights: list[tuple[int, ...]] = []

    def put(found: re.Match[str]) -> str:
        name, _, sizes = found[1].partition(":")
        if name != "w":
            return str(numbers[name])
        weights.append(tuple(int(numbers.get(size, size)) for size in sizes.split(",")))
        return f"{{{len(kinds) + len(weights) - 1}}}"

    return re.sub(r"\{([a-zA-Z][^}]*)\}", put, rng.choice(lines)), weights


def _numbers(kinds: str, shape: Sequence[int], rng: random.Random) -> dict[str, Any]:
    dims = range(1, len(shape))
    d, i, kernel = rng.choice(dims), rng.choice(dims[:-1] or dims), rng.randint(1, 3)
    r = rng.choice([dim for dim in dims if kinds[dim - 1] == "r"] or dims)
    some, order = rng.sample(dims, rng.randint(1, min(2, len(dims) - 1) or 1)), rng.sample(dims, len(dims))
    return {
        "d": d, "r": r, "before": ":, " * r, "i": i, "j": i + 1, "dims": some, "order": [0, *order],
        "k": rng.randint(1, 2), "a": rng.randint(-1, 2), "b": rng.randint(-1, 2),
        "K": kernel, "S": rng.choice((1, 1, 2, 3)), "P": rng.randint(0, kernel // 2),
        "ceil": rng.random() < 0.5, "counted": rng.random() < 0.5,
        "C": shape[1], "F": shape[-1], "O": rng.choice((2, 3, 4)), "ones": ONES.format(d=d),
    }  # fmt: skip
