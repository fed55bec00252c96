"""What tests of assumptions about torch need: the error that names the version of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def assumed(what: str) -> Iterator[None]:
    """Say which torch it is that no longer does `what`."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"torch {torch.__version__} no longer holds that {what}: {error}") from error
