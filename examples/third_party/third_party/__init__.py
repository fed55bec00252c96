"""Operators of another library, and what they mean on masked tensors. Importing it registers both."""

from third_party.rules import RULES

__all__ = ["RULES"]
