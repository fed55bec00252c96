"""Plumbing."""
