"""Two operators of examples/third_party, each given a rule that is wrong on purpose; run by test_third_party.py."""

from __future__ import annotations

from typing import Any

from third_party import rules

from op_registry import registry
from op_registry.authoring import Bound, Dense, Rule, Sparse, on_call
from op_registry.sparse.contraction import BY_EQUATION
from op_registry.testing import instantiate


def broken(right: Rule, run: Any) -> Rule:
    """`run` in place of the right rule's, with the right rule's oracle and samples."""
    rule = registry.replace(right.ops[0], run)
    for facet in ("oracles", "sample_makers"):
        getattr(rule, facet).extend(getattr(right, facet))
    return rule


def noisy_or(p: Dense, dim: int, keepdim: bool = False) -> Dense:
    """Its identity is wrong: what is missing has happened."""
    return Dense(rules.ops.noisy_or(p.filled(1), dim, keepdim), p.any_valid(dim, keepdim))


def row_dot(x: Dense, vector: Dense) -> Dense:
    """Right; its lowering is not."""
    return rules.row_dot.run(rules.ops.row_dot.default, x, vector)


def row_dot_of_stored(c: Bound) -> Any:
    """It takes the vector's elements in the order in which x's are stored."""
    vector = c.vector
    shifted = Dense(vector.data.roll(1), None if vector.validity is None else vector.full_validity.roll(1))
    return BY_EQUATION.run(Bound(rules.row_dot, c.op, {**c.named, "vector": shifted}))


BROKEN = [broken(getattr(rules, f.__name__), f) for f in (noisy_or, row_dot)]
BROKEN[-1].lowering(Sparse)(on_call(row_dot_of_stored))

test_laws = instantiate(BROKEN)
