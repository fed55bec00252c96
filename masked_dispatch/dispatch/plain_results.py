"""Refuse a rule's result that would lose the mask, right after the rule runs."""

from __future__ import annotations

from torch import Tensor

from op_registry.rule import Rule


def refuse_plain(value: object, rule: Rule, result: int) -> None:
    """TypeError for a plain tensor, unless it has no elements or the rule declares that result as plain."""
    if isinstance(value, Tensor) and not rule.is_plain(result) and not _known_to_be_empty(value):
        raise TypeError(
            f"the rule of {rule.name} [{rule.where}] returned a plain tensor of shape {tuple(value.shape)}, which "
            "would lose the mask; a rule returns Dense(data, validity). A rule may return plain results (a count, "
            "indices) if its category is QUERY or if it declares them: masked_rule(..., plain=(1,))."
        )


def _known_to_be_empty(value: Tensor) -> bool:
    """Whether a tensor has no elements. This does not compare symbolic sizes, which would add a guard."""
    return any(type(size) is int and size == 0 for size in value.shape)
