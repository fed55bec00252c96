"""Subjects that misbehave, for the tests of the runner."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from op_registry.conformance.record_subject import Records


class Crashes(Records):
    """Takes its process down when it meets a sine."""

    name = "crashes"

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if getattr(fn, "__name__", "") == "sin":
            os._exit(139)
        return super().call(fn, *args, **kwargs)


class Hangs(Records):
    """Does not come back from a sine."""

    name = "hangs"

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if getattr(fn, "__name__", "") == "sin":
            time.sleep(60)
        return super().call(fn, *args, **kwargs)


crashes = Crashes()
hangs = Hangs()
