"""How models of other libraries are asked: small, with random weights, unmodified, and told nothing of padding.

At most five are of one library. A library that is not installed is not asked, and the page says so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from padded_batches import Model, Of

MODELS: list[Model] = []
PAIR = ("steps", "more steps")
GRAPH = ("steps", "graph")
IMAGE = ("image",)
WAVE = ("wave",)


def ask(
    path: str,
    *arguments: Any,
    as_: str = "",
    run: Callable[..., Any] | None = None,
    inputs: tuple[str, ...] = ("steps",),
    least: int = 1,
    times: int = 1,
    exact: bool = True,
    **options: Any,
) -> None:
    """Ask the class at `package.module:name`, made with `arguments` and `options`, under the name `as_`.

    run   what is done with the module and the inputs, if not module(*inputs)
    """

    def build() -> nn.Module:
        made = load(path)(*arguments, **options)
        return made if run is None else Of(lambda of, *each: run(of.made, *each), made=made)

    ask_as(path.split(".")[0].split(":")[0], as_ or path.partition(":")[2], build, inputs, least, times, exact)


def ask_as(library: str, name: str, build: Callable[[], nn.Module], *how: Any) -> None:
    MODELS.append(Model(name, build, *how, library=library))


def load(path: str) -> Any:
    """What is at `package.module:name`."""
    without_compiled_operators()
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def without_compiled_operators() -> None:
    """Let torchvision and torchaudio be imported beside any build of torch: what is asked of them is plain Python.

    The index has them compiled for one build of torch, another than the one for CPUs.
    """
    if importlib.util.find_spec("torchvision") is not None:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    compiled: Any = ModuleType("torchaudio._extension")
    compiled._IS_TORCHAUDIO_EXT_AVAILABLE = False
    compiled.fail_if_no_align = lambda function: function
    sys.modules.setdefault(compiled.__name__, compiled)


def channels_first(module: nn.Module, x: Tensor) -> Tensor:
    """What a module that takes channels before positions makes of steps."""
    return module(x.transpose(1, 2))


def one_channel(module: nn.Module, x: Tensor) -> Tensor:
    """What a module that takes channels makes of waves, or of one picture of features."""
    return module(x[:, None])


def first(module: nn.Module, *inputs: Tensor) -> Tensor:
    """The first result of several."""
    return module(*inputs)[0]
