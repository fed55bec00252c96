"""Dynamo records functions that have rules inside them as single calls, so that these rules find their caller."""

from __future__ import annotations

from types import ModuleType

from masked_dispatch.compiler_internals import dynamo_is_loaded, keep_whole
from op_registry.laws.inside import rules_inside_functions


def keep_functions_whole(version: str) -> None:
    """Tell Dynamo about these functions, once per version of the registry, when a masked tensor enters its trace.

    Dynamo keeps most functions of torch.nn.functional whole anyway, but not lp_pool3d or functions of other libraries.
    """
    if dynamo_is_loaded() and version not in _told:
        _told.add(version)
        keep_whole({rule.function for rule in rules_inside_functions() if not isinstance(rule.function, ModuleType)})


# The versions of the registry whose functions Dynamo has been told about.
_told: set[str] = set()
