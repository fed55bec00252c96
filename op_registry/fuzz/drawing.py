"""Random choices for a step: its operands, from the program's values so far, and the numbers in its code."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

from torch import Tensor

NUMBERS = ("0.5", "2.0", "-1.5", "0.0", "1.0", "3")
# Index expressions, by the least number of dimensions that they need.
INDEX_EXPRESSIONS = (
    (1, "0"), (1, "-1"), (1, "1:"), (1, ":1"), (1, "::2"), (1, "..., 0"), (1, "..., 1:"), (0, "..."), (0, "None"),
    (2, ":, 0"), (2, "1:, :-1"), (2, "0, 1:"), (2, ":, None"), (2, "0, 0"), (1, "[0, -1]"), (2, ":, [1, 0]"),
    (2, "[0, 1], [1, 0]"), (3, "..., 0, :"), (3, ":, 0, ::2"), (2, "[[0], [1]], [0, 1]"), (2, "0:0"),
)  # fmt: skip


def operand(kind: str, values: Mapping[str, Tensor], like: Tensor | None, rng: random.Random) -> str | None:
    """The name of a value of the kind, or None; it prefers recent values, and values that broadcast to `like`."""
    of_the_kind = [name for name, value in values.items() if _is_of_kind(kind, value)]
    fitting = [name for name in of_the_kind if like is None or _broadcasts(values[name], like)]
    if fitting and rng.random() < 0.8:
        of_the_kind = fitting
    if not of_the_kind:
        return None
    recent = of_the_kind[-4:] if rng.random() < 0.5 else of_the_kind
    return rng.choice(recent)


def _is_of_kind(kind: str, value: Tensor) -> bool:
    if kind == "f":
        return value.is_floating_point()
    if kind == "b":
        return value.dtype.is_signed is False and value.element_size() == 1
    if kind == "i":
        return not (value.is_floating_point() or value.is_complex())
    return True


def _broadcasts(value: Tensor, to: Tensor) -> bool:
    pairs = zip(reversed(value.shape), reversed(to.shape), strict=False)
    return value.ndim <= to.ndim and all(a in (1, b) for a, b in pairs)


def filled_in(code: str, first: Tensor, rng: random.Random) -> str:
    """The code with a random choice for every name in braces."""
    dims = list(range(first.ndim))
    d = rng.choice(dims) if dims else 0
    drawn = {
        "d": str(d - rng.choice((0, first.ndim))),
        "e": str(rng.choice(dims) if dims else 0),
        "dims": str(sorted(rng.sample(dims, rng.randint(1, first.ndim)))) if dims else "[]",
        "i": str(_index(first, d, rng)),
        "j": str(_index(first, d, rng)),
        "at": rng.choice([text for least, text in INDEX_EXPRESSIONS if least <= first.ndim]),
        "shape": str(_shape(first.shape, rng)),
        "order": str(rng.sample(dims, len(dims))),
        "n": str(rng.randint(1, 2)),
        "flag": str(rng.random() < 0.5),
    }
    return re.sub(r"\{([a-z]+)\}", lambda found: rng.choice(NUMBERS) if found[1] == "f" else drawn[found[1]], code)


def _index(first: Tensor, dim: int, rng: random.Random) -> int:
    size = first.shape[dim] if first.ndim else 1
    return rng.randrange(size) if size else 0


def _shape(shape: Sequence[int], rng: random.Random) -> list[int]:
    """Another shape with the same number of elements."""
    shape = list(shape)
    choices = [[-1], [*shape, 1], [1, *shape]]
    if len(shape) >= 2:
        choices += [[-1, *shape[2:]], [*shape[:-2], -1], [shape[1], shape[0], *shape[2:]]]
    if shape and shape[-1] % 2 == 0:
        choices.append([*shape[:-1], shape[-1] // 2, 2])
    return rng.choice(choices)
