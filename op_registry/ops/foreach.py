"""Foreach."""
