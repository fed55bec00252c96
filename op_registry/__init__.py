"""What each aten operator means on masked tensors: rules by overload, the laws they follow, and tests of those laws.

registry         the rules in force; overlays replace them for a while
windows          what windows mean: missing values or padding
resolve          what an operator means, and by which rule
check            run the laws on an operator, torch's or your own
authoring        the vocabulary that rules are written in
testing          tests of a rule, for pytest
"""

from op_registry import ops, testing
from op_registry.conformance import check
from op_registry.errors import InvalidValueError, MaskedSemanticsError
from op_registry.registry import registry
from op_registry.resolve import Meaning, resolve

__all__ = ["InvalidValueError", "MaskedSemanticsError", "Meaning", "check", "ops", "registry", "resolve", "testing"]

registry.close_book()
