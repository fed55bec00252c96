"""What a scope decides: whether sparse operands may be stored densely, and whether an assignment may drop a mask."""

from __future__ import annotations

import contextlib
import contextvars
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal, NamedTuple

from torch import Tensor

from masked_dispatch import scopes
from masked_dispatch.callers import frames_of_call, named_by_function, warn_at
from masked_dispatch.compiler_internals import arithmetic_written_as_a_copy
from masked_dispatch.densification import Densification, bytes_needed, report, storage_of
from masked_dispatch.engine_internals import NO_CALLER, current_node, frames_to_caller
from op_registry.errors import MaskedSemanticsError

# --------------------------------------------------------------- sparse operands of an operator that has no sparse form

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


def densifying() -> Policy:
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
    policy = densifying()
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
    policy = densifying()
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


# ------------------------------------------------------------ assignments of something partly invalid to a plain tensor

Mode = Literal["silent", "warn", "refuse"]

_mode: contextvars.ContextVar[Mode] = contextvars.ContextVar("masked_dispatch.updates", default="warn")
scopes.add_kind(_mode, "warn")


class MaskDroppedWarning(UserWarning):
    """An assignment to a plain tensor has skipped invalid elements, or one to a padded tensor has skipped valid ones:
    see :func:`masked_dispatch.updates`.
    """


def updating() -> Mode:
    """The mode in force."""
    return _mode.get()


@contextlib.contextmanager
def updates(mode: Mode) -> Iterator[None]:
    """Set whether, inside the block, assigning a partly invalid masked tensor to a plain tensor warns or is refused.

    Such an assignment writes the valid elements and skips the others, so that the plain tensor keeps its old values
    there, without a mask to mark them. Assignments are ``plain.copy_(x)``, ``plain[i] = x``, ``out=plain``,
    ``index_put_``, ``index_copy_``, ``put_``, ``scatter_``, ``masked_scatter_``, ``fill_`` and ``bernoulli_``.
    Arithmetic in place (``plain.add_(x)``) does not warn, and neither do the writes of torch's optimizers and of this
    library itself. An assignment to a tensor that knows which of its positions are there counts too, where a partly
    invalid source is valid and the tensor has no position.

    mode  "warn" (the default): a :class:`MaskDroppedWarning`, by Python's `warnings`, once for a line of the caller's.
          "silent": nothing. "refuse": MaskedSemanticsError, before anything is written.

    On devices other than the CPU, and in a graph, a stored mask counts as partly invalid, because checking it would
    have to wait for the device. Compiled code warns while it is traced, at the line that calls the compiled function.
    The mode also holds in the backward of the calls made in the block.

    Raises ValueError for any other `mode`.
    """
    if mode not in ("silent", "warn", "refuse"):
        raise ValueError(f"updates takes 'silent', 'warn' or 'refuse', not {mode!r}")
    scopes.remember()
    with _in_force(mode):
        yield


@contextlib.contextmanager
def _in_force(mode: Mode) -> Iterator[None]:
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def already_asked() -> contextlib.AbstractContextManager[None]:
    """For the parts of a call about which `dropped` has been asked as a whole."""
    return _in_force("silent")


# Called with the number of elements that an assignment skips, None if nobody has counted.
listeners: list[Callable[[int | None], None]] = []


def dropped(call: str, skipped: str, kind: tuple[str, str] | None = None, count: int | None = None) -> None:
    """Warn or raise, as the mode says, that `call` is about to skip elements, unless nobody's code assigns.

    skipped  of what, with shapes: for the error. The warning doesn't vary with them, or it would come more than once.
    kind     TO_PLAIN (None), TO_PADDED or STATES
    count    how many, if somebody has counted
    """
    what, instead = kind or TO_PLAIN
    found = frames_of_call()
    if found is None:
        return
    between, caller = found
    if any(name.startswith("torch.optim.") for name, _ in between):  # torch's optimizers write for themselves
        return
    if arithmetic_written_as_a_copy(frame for _, frame in between if isinstance(frame, FrameType)):
        return
    for tell in listeners:
        tell(count)
    if updating() == "refuse":
        raise MaskedSemanticsError(f"{call}: {skipped}. {instead} This was refused by {_MODES}('refuse').")
    message = f"{call}: {what}. {instead} {_TO_SET}"
    warn_at(caller, message, MaskDroppedWarning)


_MODES = "masked_dispatch.updates"
# What is skipped, and what to do instead.
TO_PLAIN = (
    "the assignment to a plain tensor skips invalid elements",
    "The plain tensor keeps its old values there, and nothing marks them. Assign to a masked buffer "
    "(x.new_empty(shape), which is invalid until written to), fill first (x.to_tensor(fill)), or use a container's "
    "own conversion (masked_dispatch.interop.to_tensordict).",
)
TO_PADDED = (
    "the assignment to a padded tensor skips valid elements where it has no positions",
    "An assignment never makes a position be there. Assign to x.without_extent(), say what is there again with "
    "masked_dispatch.padded, or write x.mask_like(target).",
)
STATES = (
    "the assignment to a part of a plain tensor writes the states that samples carry past their end",
    "The plain tensor does not know at which steps a sample is there. Stack the states, torch.stack(states, 1), or "
    "assign to a masked buffer (x.new_zeros(shape)), which are there at the steps that each sample has.",
)
_TO_SET = f"{_MODES}('silent') allows it, {_MODES}('refuse') raises."
