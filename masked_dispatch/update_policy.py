"""The policy for assignments that drop a mask: of something partly invalid to a plain tensor."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Literal

from masked_dispatch import scopes
from masked_dispatch.caller_warnings import frames_of_call, warn_at
from masked_dispatch.compiler_internals import arithmetic_written_as_a_copy
from op_registry.errors import MaskedSemanticsError

Mode = Literal["silent", "warn", "refuse"]

_mode: contextvars.ContextVar[Mode] = contextvars.ContextVar("masked_dispatch.updates", default="warn")
scopes.add_kind(_mode, "warn")


class MaskDroppedWarning(UserWarning):
    """An assignment to a plain tensor has skipped invalid elements, or one to a padded tensor has skipped valid ones:
    see :func:`masked_dispatch.updates`.
    """


def current() -> Mode:
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
    if current() == "refuse":
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
