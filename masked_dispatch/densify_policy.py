"""The policy for storing sparse operands densely for an operator that has no sparse form."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from masked_dispatch import scopes
from masked_dispatch.densification import bytes_needed, report, storage_of
from op_registry.errors import MaskedSemanticsError

When = Literal["auto", "never", "always"]


@dataclass(frozen=True)
class Policy:
    """`when`, and for "auto" the limit in bytes for the dense operands of one call together."""

    when: When = "auto"
    limit: int = 2**30


DEFAULT = Policy()
_policy = contextvars.ContextVar("masked_dispatch.densify", default=DEFAULT)
scopes.add_kind(_policy, DEFAULT)


def current() -> Policy:
    """The current policy."""
    return _policy.get()


@contextlib.contextmanager
def densify(when: When, *, limit: int = 2**30) -> Iterator[None]:
    """Set, inside the block, what happens to sparsely stored operands of an operator that has no sparse form.

    when   "auto" (the default): they are stored densely if that takes at most `limit` bytes together.
           "never": the operator is refused. "always": they are stored densely, however large.
    limit  in bytes, for "auto"

    Raises ValueError for any other `when`.
    """
    if when not in ("auto", "never", "always"):
        raise ValueError(f"densify takes 'auto', 'never' or 'always', not {when!r}")
    scopes.remember()
    token = _policy.set(Policy(when, limit))
    try:
        yield
    finally:
        _policy.reset(token)


def check_allowed(operation: str, tensors: Sequence[Tensor], why: str) -> None:
    """Raise if the current policy does not allow storing `tensors` densely for `operation`; otherwise report it."""
    policy = current()
    needed = bytes_needed(tensors)
    if policy.when == "always" or (policy.when == "auto" and needed <= policy.limit):
        report(operation, tensors, why)
        return
    layouts = ", ".join(storage_of(t) for t in tensors)
    raise MaskedSemanticsError(
        f"{operation} has no sparse form for this call: {why}. Its operands are stored sparsely ({layouts}) and would "
        f"take {needed:,} bytes densely, which the current policy does not allow (densify({policy.when!r}"
        f"{f', limit={policy.limit:,}' if policy.when == 'auto' else ''})). Store them densely by x.to_dense(), or "
        "allow it inside `with masked_dispatch.densify('always'):`."
    )
