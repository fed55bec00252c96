"""What each aten operator means on masked tensors: rules keyed by overload, categories, and their conformance tests."""

from op_registry import ops
from op_registry.categories import (
    contraction,
    elementwise,
    masked_rule,
    movement,
    opaque,
    reduction,
    scan,
)
from op_registry.errors import InvalidValueError, MaskedSemanticsError
from op_registry.records import Dense
from op_registry.registry import registry
from op_registry.resolve import Meaning, resolve
from op_registry.rule import Category, Gap, Rule

__all__ = [
    "Category",
    "Dense",
    "Gap",
    "InvalidValueError",
    "MaskedSemanticsError",
    "Meaning",
    "Rule",
    "contraction",
    "elementwise",
    "masked_rule",
    "movement",
    "opaque",
    "ops",
    "reduction",
    "registry",
    "resolve",
    "scan",
]
