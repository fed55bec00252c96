"""When sparse operands may be stored densely for an operator that has no sparse form."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

When = Literal["auto", "never", "always"]


@dataclass(frozen=True)
class Policy:
    """`when`, and for "auto" how many bytes the dense operands of one call may take together."""

    when: When = "auto"
    limit: int = 2**30


DEFAULT = Policy()
_policy = contextvars.ContextVar("masked_dispatch.densify", default=DEFAULT)


def current() -> Policy:
    """The policy in force."""
    return _policy.get()


@contextlib.contextmanager
def densify(when: When, *, limit: int = 2**30) -> Iterator[None]:
    """What happens, inside the block, to sparsely stored operands of an operator that has no sparse form.

    when   "auto" (the default everywhere): they are stored densely if that takes at most `limit` bytes together.
           "never": the operator is refused. "always": they are stored densely, however large.
    limit  in bytes, for "auto"

    Raises ValueError for another word.
    """
    if when not in ("auto", "never", "always"):
        raise ValueError(f"densify takes 'auto', 'never' or 'always', not {when!r}")
    token = _policy.set(Policy(when, limit))
    try:
        yield
    finally:
        _policy.reset(token)
