"""The caller: errors name the public function that it called, warnings the line that a call comes from."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import warnings
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch._ops import OpOverload

from masked_dispatch.compiler_internals import TracedFrame, frames_being_traced, never_compiled, under_compile
from masked_dispatch.engine_internals import (
    AOT_AUTOGRAD,
    AROUND_CALLS,
    NO_CALLER,
    frames_to_caller,
    is_the_callers,
)
from op_registry import errors
from op_registry.extents import slices
from op_registry.rule import Rule, packet_name

# --------------------------------------------------------------------------------------------------------------- errors

# Modules of torch whose functions people call. If several have a function, the first one names it.
_OF_TORCH: tuple[Any, ...] = (
    torch.nn.functional, torch, torch.fft, torch.linalg, torch.special, torch.sparse, torch.masked, torch.nn.utils,
    torch.nn.utils.rnn, torch.utils.data,
)  # fmt: skip
_OPERATOR = re.compile(r"(?:aten\.)?([\w:]*\w)(?:\.\w+)?(?=[: ])")
_FAMILY = re.compile(r"^_*(?:fft_|linalg_|sparse_|special_)?|_$")

_CALL_OTHERS = ("explain", "export")  # and the transforms of `functional`: what they call is what the caller called

# A function written in Python: where its code is, and the objects that it closes over (torch makes some functions by
# others). (A code object may have no hash, as Dynamo puts dicts among its constants.)
_Function = tuple[str, int, str, tuple[int, ...]]


@functools.lru_cache(maxsize=1)
def python_functions() -> dict[_Function, str]:
    """The paths of public functions written in Python: torch's, and this library's."""
    library = sys.modules["masked_dispatch"]
    own = [library, *[m for m in map(vars(library).get, library.__all__) if isinstance(m, ModuleType)]]
    own.remove(library.functional)
    found: dict[_Function, str] = {}
    for module in (*_OF_TORCH, *own):
        for name, function in vars(module).items():
            public = name in module.__all__ if module in own else not name.startswith("_")
            if not public or name in _CALL_OTHERS or not isinstance(function, FunctionType):
                continue
            if function.__module__ != "torch.overrides":  # (which torch's modules import)
                cells = tuple(id(cell.cell_contents) for cell in function.__closure__ or ())
                found.setdefault(_place_of(function.__code__, cells), f"{module.__name__}.{name}")
    return found


def in_function(frame: FrameType) -> str | None:
    """The path of the public function whose frame this is."""
    code = frame.f_code
    cells = tuple(id(frame.f_locals.get(name)) for name in code.co_freevars)
    return python_functions().get(_place_of(code, cells))


def _place_of(code: CodeType, cells: tuple[int, ...]) -> _Function:
    return code.co_filename, code.co_firstlineno, code.co_name, cells


@functools.lru_cache(maxsize=256)
def calling(op: OpOverload) -> str | None:
    """The path of the function or method with the name of an operator of torch; None if there is none.

    A function written in Python is not meant where a method has its name: it would be on the stack.
    """
    name = packet_name(op)
    if name == "index":
        return "x[index]"
    is_method = hasattr(torch.Tensor, name)
    for module in _OF_TORCH:
        short = name.removeprefix(f"{module.__name__.removeprefix('torch.')}_")
        function = getattr(module, short, None)
        if callable(function) and not isinstance(function, (type, *((FunctionType,) if is_method else ()))):
            return None if short.startswith("_") else f"{module.__name__}.{short}"
    return f"torch.Tensor.{name}" if is_method and not name.startswith("_") else None


@never_compiled
def named_by_function(message: str) -> str:
    """The message of an error that is being made, with the function that the caller called."""
    called, names = None, set()
    for _, frame in reversed(frames_to_caller()[:-1]):
        if frame is None:
            continue
        called = in_function(frame) if called is None else called
        op, rule = frame.f_locals.get("op"), frame.f_locals.get("rule")
        if isinstance(op, OpOverload):
            names.add(packet_name(op))
            called = calling(op) or "" if called is None else called
        if isinstance(rule, Rule):
            names.add(rule.name)
    if not called or called in message:
        return message
    own = called.rpartition(".")[2]
    first = _OPERATOR.match(message)
    if first is None or first[1] not in names:
        return message if re.search(rf"\b{re.escape(own)}\b", message) else f"{called}: {message}"
    same = _FAMILY.sub("", first[1]) == _FAMILY.sub("", own)
    return f"{called}{'' if same else f' ({first[0]})'}{message[first.end() :]}"


def install_names() -> None:
    """Called once, when the package is imported."""
    errors.name_by(named_by_function)


# ------------------------------------------------------------------------------------------------------------- warnings

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
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, name, seen)


def _calls_for_itself(module: str) -> bool:
    """Whether code of this library calls for its own sake: all but the parts of it that run between a call of an
    operator and its kernel.
    """
    package, _, rest = module.partition(".")
    return package in _SERVING and rest.partition(".")[0] not in _SERVING[package]


_SERVING = {
    "masked_dispatch": {
        "autograd", "callers", "compiler_internals", "dispatch", "engine_internals", "policies", "replacements",
        "scopes", "seeing", "tensor", "torch_internals",
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


def install_warnings() -> None:
    """Called once, when the package is imported."""
    slices.listeners.append(_batch_end)
    slices.emptied.append(_emptied)
