"""The policy for storing sparse operands densely for an operator that has no sparse form."""

from __future__ import annotations

import contextlib
import contextvars
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from masked_dispatch import scopes
from masked_dispatch.called_functions import named_by_function
from masked_dispatch.densification import Densification, bytes_needed, report, storage_of
from masked_dispatch.engine_internals import NO_CALLER, current_node, frames_to_caller
from op_registry.errors import MaskedSemanticsError

When = Literal["never", "warn", "auto", "always"]
_LIMITED = ("auto", "warn")


class DensificationWarning(UserWarning):
    """Inside ``densify("warn")``: a call stores sparse operands densely, or only reads a small part of a dense one."""


_TO_STAY_SPARSE = (
    "Keep it sparse by an operator or a storage that has a sparse form for it (masked_dispatch.explain names the "
    "reason), store it densely yourself by x.to_dense(), or leave it to masked_dispatch.densify('auto')."
)


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
           in a block. It also warns of a dense operand, such as a product of matrices, of which the operator uses only
           the elements that a sparse operand stores. "never": the operator is refused.
           "always": the operands are stored densely, however large.
    limit  in bytes, for "auto" and "warn"

    Compiled code warns while it is traced, at the line that calls the compiled function; backward warns at the line
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
            densification = Densification(operation, tuple(map(storage_of, tensors)), needed, why)
            _warn_once(policy, operation, f"{densification}. {_TO_STAY_SPARSE}")
        return
    layouts = ", ".join(storage_of(t) for t in tensors)
    by_hand = "Store them densely by x.to_dense(), or allow it"
    if needed > DEFAULT.limit:
        by_hand = "A part of the tensor, x[...], needs less memory. If you have the memory, allow it"
    raise MaskedSemanticsError(
        f"{operation} has no sparse form for this call: {why}. Its operands are stored sparsely ({layouts}) and would "
        f"take {needed:,} bytes densely, which the current policy does not allow (densify({policy.when!r}"
        f"{f', limit={policy.limit:,}' if policy.when in _LIMITED else ''})). {instead}{by_hand} "
        "inside `with masked_dispatch.densify('always'):`."
    )


def warn_of_dense_operands(operation: str, sparse: Sequence[Any], dense: Sequence[Tensor]) -> None:
    """Warn, if the policy is "warn", of a call that reads less than half of an operand that the caller made dense.

    sparse  the masked tensors stored sparsely; dense: the other tensors of an elementwise call or a loss
    """
    policy = current()
    if policy.when != "warn" or current_node() is not None:  # backward repeats what forward was told of
        return
    for x in sparse:
        for y in dense:
            # What is traced may not know how many elements are stored.
            if y.shape == x.shape and isinstance(x.nnz, int) and x.nnz < y.numel() / 2:
                size = math.prod(y.shape) * y.dtype.itemsize
                _warn_once(
                    policy,
                    operation,
                    f"{operation} reads a dense operand of shape {tuple(y.shape)}, {size:,} bytes, only where the "
                    f"other one, of {storage_of(x)}, has elements. If it is a product of matrices, a @ b, "
                    "torch.sparse.sampled_addmm(x, a, b, beta=0) computes it at the elements of x alone.",
                )


def _warn_once(policy: Policy, operation: str, message: str) -> None:
    """Warn at the caller's line, unless the same operator has been warned about there in the block."""
    name, frame = frames_to_caller()[-1]
    site = Site(NO_CALLER, 0, __name__) if frame is None else Site(frame.f_code.co_filename, frame.f_lineno, name)
    if (site, operation) in policy.warned.seen:
        return
    policy.warned.seen.add((site, operation))
    message = named_by_function(message)
    warnings.warn_explicit(message, DensificationWarning, site.file, site.line, site.module)
