"""Factories."""
