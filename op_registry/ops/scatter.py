"""Scatter."""
