"""The policy for storing sparse operands densely for an operator that has no sparse form."""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from masked_dispatch import scopes
from masked_dispatch.densification import Densification, bytes_needed, report, storage_of
from masked_dispatch.engine_internals import NO_CALLER, frames_to_caller
from op_registry.errors import MaskedSemanticsError

When = Literal["never", "warn", "auto", "always"]
_LIMITED = ("auto", "warn")


class DensificationWarning(UserWarning):
    """Sparsely stored operands are stored densely for a call, inside ``densify("warn")``."""


class Site(NamedTuple):
    """A line of the caller's code."""

    file: str
    line: int
    module: str


class Sites:
    """What has been warned about, line by line; one for each ``densify("warn")`` block, wherever its policy goes."""

    def __init__(self) -> None:
        self.seen: set[tuple[Site, str]] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Sites:
        return self

    def __reduce__(self) -> Any:
        return Sites, ()


@dataclass(frozen=True)
class Policy:
    """`when`, and for "auto" and "warn" the limit in bytes for the dense operands of one call together."""

    when: When = "auto"
    limit: int = 2**30
    warned: Sites = field(default_factory=Sites, compare=False, repr=False)


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
           "warn": as "auto", with a :class:`DensificationWarning` for each line and operator of the caller's code, once
           in a block. "never": the operator is refused. "always": they are stored densely, however large.
    limit  in bytes, for "auto" and "warn"

    What is compiled warns while it is traced, at the line that calls the compiled function; backward warns at the line
    that starts it.

    Raises ValueError for any other `when`.
    """
    if when not in ("never", "warn", "auto", "always"):
        raise ValueError(f"densify takes 'never', 'warn', 'auto' or 'always', not {when!r}")
    scopes.remember()
    token = _policy.set(Policy(when, limit))
    try:
        yield
    finally:
        _policy.reset(token)


def check_allowed(operation: str, tensors: Sequence[Tensor], why: str, instead: str = "") -> None:
    """Raise if the current policy does not allow storing `tensors` densely for `operation`; otherwise report it.

    instead  a sentence about what needs no dense storage, for the error
    """
    policy = current()
    needed = bytes_needed(tensors)
    if policy.when == "always" or (policy.when in _LIMITED and needed <= policy.limit):
        report(operation, tensors, why)
        if policy.when == "warn":
            _warn_once(policy, Densification(operation, tuple(map(storage_of, tensors)), needed, why))
        return
    layouts = ", ".join(storage_of(t) for t in tensors)
    by_hand = "Store them densely by x.to_dense(), or allow it"
    if needed > DEFAULT.limit:
        by_hand = "To take a part first, x[…], needs less. Whoever has the memory allows it"
    raise MaskedSemanticsError(
        f"{operation} has no sparse form for this call: {why}. Its operands are stored sparsely ({layouts}) and would "
        f"take {needed:,} bytes densely, which the current policy does not allow (densify({policy.when!r}"
        f"{f', limit={policy.limit:,}' if policy.when in _LIMITED else ''})). {instead}{by_hand} "
        "inside `with masked_dispatch.densify('always'):`."
    )


def _warn_once(policy: Policy, densification: Densification) -> None:
    """Warn about a densification, unless the same operator has been warned about at this line in the block."""
    name, frame = frames_to_caller()[-1]
    site = Site(NO_CALLER, 0, __name__) if frame is None else Site(frame.f_code.co_filename, frame.f_lineno, name)
    if (site, densification.op) in policy.warned.seen:
        return
    policy.warned.seen.add((site, densification.op))
    message = (
        f"{densification}. Keep it sparse by an operator or a storage that has a sparse form for it "
        "(masked_dispatch.explain names the reason), store it densely yourself by x.to_dense(), or leave it to "
        "masked_dispatch.densify('auto')."
    )
    warnings.warn_explicit(message, DensificationWarning, site.file, site.line, site.module)
