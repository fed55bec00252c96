"""Warnings at the line of the caller's that a call comes from; that an end of a batch is no end of its samples."""

from __future__ import annotations

import itertools
import warnings
from types import FrameType

from masked_dispatch.compiler_internals import TracedFrame, frames_being_traced, under_compile
from masked_dispatch.engine_internals import (
    AOT_AUTOGRAD,
    AROUND_CALLS,
    NO_CALLER,
    frames_to_caller,
    is_the_callers,
)
from op_registry.extents import slices

Frame = tuple[str, FrameType | TracedFrame | None]


class BatchEndWarning(UserWarning):
    """``x[:, -1]`` and its like show the end of a padded batch, which is not the end of its shorter samples.

    It comes once for a line of the caller's, by Python's `warnings`. :func:`masked_dispatch.last` and
    :func:`masked_dispatch.first` give the ends of the samples.
    """


class EmptiedSampleWarning(UserWarning):
    """A window is longer than some samples of a padded batch, which have no position left: nothing follows for them.

    It comes once for a line of the caller's, by Python's `warnings`. Of one such sample alone, torch raises an error.
    """


def frames_of_call() -> tuple[list[Frame], Frame] | None:
    """The frames between the caller's code and this function, and the caller's; of a graph, those of the traced code.

    None where nobody's code asked: this library calls for its own sake, or torch's compiler repeats a traced call.
    """
    frames: list[Frame] = [*frames_to_caller()]
    *between, caller = frames
    if any(name.startswith(AOT_AUTOGRAD) for name, _ in between) and under_compile():
        return None  # Dynamo, which traced it before, was told
    traced: list[Frame] = [(frame.f_globals.get("__name__", ""), frame) for frame in frames_being_traced()]
    if traced:
        within = list(itertools.takewhile(lambda frame: not is_the_callers(frame[0]), traced))
        between, caller = [*between, *within], traced[min(len(within), len(traced) - 1)]
    if any(_calls_for_itself(name) for name, _ in between):
        return None
    return between, caller


def warn_at(caller: Frame, message: str, category: type[Warning]) -> None:
    """Warn at a line of the caller's. Python shows equal messages once for a line."""
    name, frame = caller
    if frame is None:
        warnings.warn_explicit(message, category, NO_CALLER, 0, __name__)
        return
    seen = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, name, seen, frame.f_globals)


def _calls_for_itself(module: str) -> bool:
    """Whether code of this library calls for its own sake: all but the parts of it that run between a call of an
    operator and its kernel.
    """
    package, _, rest = module.partition(".")
    return package in _SERVING and rest.partition(".")[0] not in _SERVING[package]


_SERVING = {
    "masked_dispatch": {
        "autograd", "caller_warnings", "compiler_internals", "dispatch", "engine_internals", "replacements", "scopes",
        "seeing", "tensor", "torch_internals", "update_policy",
    },
    "op_registry": {
        "authoring", "autocast", "bound", "extents", "laws", "ops", "records", "registry", "resolve", "rule", "schema",
        "sparse", "windows",
    },
}  # fmt: skip


def _batch_end(message: str) -> None:
    found = frames_of_call()
    if found is None or any(is_torchs_own(name) for name, _ in found[0]):
        return
    warn_at(found[1], message, BatchEndWarning)


def _emptied(message: str) -> None:
    found = frames_of_call()
    if found is not None:
        warn_at(found[1], message, EmptiedSampleWarning)


def is_torchs_own(module: str) -> bool:
    """Whether code of this module of torch calls for its own sake: all but what stands around every call."""
    return module.startswith("torch.") and not module.startswith(AROUND_CALLS)


def install() -> None:
    """Called once, when the package is imported."""
    slices.listeners.append(_batch_end)
    slices.emptied.append(_emptied)
