"""When sparse operands may be stored densely for an operator that has no sparse form."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from masked_dispatch.densification import bytes_needed, report, storage_of
from op_registry.errors import MaskedSemanticsError

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


def check_allowed(what: str, tensors: Sequence[Any], why: str) -> None:
    """Refuse to store `tensors` densely where the policy in force does, else report that it happens."""
    in_force = current()
    needed = bytes_needed(tensors)
    if in_force.when == "always" or (in_force.when == "auto" and needed <= in_force.limit):
        report(what, tensors, why)
        return
    layouts = ", ".join(storage_of(t) for t in tensors)
    raise MaskedSemanticsError(
        f"{what} has no sparse form for this call: {why}. Its operands are stored sparsely ({layouts}) and would take "
        f"{needed:,} bytes densely, which the policy in force does not allow (densify({in_force.when!r}"
        f"{f', limit={in_force.limit:,}' if in_force.when == 'auto' else ''})). Store them densely by x.to_dense(), or "
        "let it happen inside `with masked_dispatch.densify('always'):`."
    )
