"""The Work that an asynchronous collective returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from masked_dispatch.distributed_internals import work_that_calls


def work_for(finish: Callable[[], None]) -> Any:
    """Return a Work whose first `wait()` calls `finish`; every `wait()` raises the error of that call, if any."""
    lock = threading.Lock()
    outcome: list[Exception | None] = []

    def wait(timeout: timedelta) -> bool:
        with lock:
            if not outcome:
                outcome.append(_outcome(finish))
        error = outcome[0]
        if error is not None:
            raise error
        return True

    return work_that_calls(wait)


def _outcome(finish: Callable[[], None]) -> Exception | None:
    try:
        finish()
    except Exception as error:
        return error
    return None
