"""Progress bars by tqdm, on standard error; none if tqdm is not installed or standard error is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

# A bar appears if the work takes longer, in seconds.
DELAY = 2.0


class Bar:
    """A progress bar, for work that is not a loop over its items.

    total  number of steps
    unit   what a step is called
    done   number of steps that were done before
    """

    def __init__(self, total: int, unit: str, done: int = 0) -> None:
        self._bar: Any = None
        if not sys.stderr.isatty():
            return
        try:
            from tqdm import tqdm  # type: ignore[import-untyped]
        except ImportError:
            return
        self._bar = tqdm(total=total, initial=done, unit=unit, smoothing=0, delay=DELAY, leave=False, file=sys.stderr)

    def advance(self, note: str = "") -> None:
        """One more step is done; `note` is shown behind the bar."""
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update()

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def progress(items: Iterable[T], total: int, unit: str) -> Iterator[T]:
    """Iterate over the `total` items with a progress bar."""
    with Bar(total, unit) as bar:
        for item in items:
            yield item
            bar.advance()
