"""What each aten operator means on masked tensors: rules keyed by overload, categories, and their conformance tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from op_registry import ops
from op_registry.categories import (
    ACCUMULATION,
    CONTRACTION,
    ELEMENTWISE,
    INDEXING,
    LOSS,
    MOVEMENT,
    NORMALIZATION,
    QUERY,
    REDUCTION,
    SCAN,
    SORTING,
    contraction,
    elementwise,
    masked_rule,
    movement,
    opaque,
    reduction,
    refused,
    scan,
)
from op_registry.errors import InvalidValueError, MaskedSemanticsError
from op_registry.lowering import first_of
from op_registry.records import Dense
from op_registry.registry import registry
from op_registry.resolve import Meaning, resolve
from op_registry.rule import Category, Gap, Rule
from op_registry.sparse import NotLowered, Sparse

if TYPE_CHECKING:
    from op_registry.conformance import Verdict

__all__ = [
    "ACCUMULATION",
    "CONTRACTION",
    "ELEMENTWISE",
    "INDEXING",
    "LOSS",
    "MOVEMENT",
    "NORMALIZATION",
    "QUERY",
    "REDUCTION",
    "SCAN",
    "SORTING",
    "Category",
    "Dense",
    "Gap",
    "InvalidValueError",
    "MaskedSemanticsError",
    "Meaning",
    "NotLowered",
    "Rule",
    "Sparse",
    "check",
    "contraction",
    "elementwise",
    "first_of",
    "masked_rule",
    "movement",
    "opaque",
    "ops",
    "reduction",
    "refused",
    "registry",
    "resolve",
    "scan",
]

registry.close_book()


def check(op: Any, **options: Any) -> Verdict:
    """Run the laws on an operator, torch's or your own: a verdict for each law, and a line that repeats a failure.

    The options are those of :func:`op_registry.conformance.check`, which is imported only when asked for.
    """
    from op_registry.conformance import check as run_laws

    return run_laws(op, **options)
