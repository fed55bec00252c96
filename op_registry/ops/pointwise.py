"""Pointwise."""
