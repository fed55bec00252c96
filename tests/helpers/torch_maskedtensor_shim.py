"""Runs PyTorch's own test/test_maskedtensor.py, which its wheels don't contain, against this library.

    python tests/helpers/torch_maskedtensor_shim.py CHECKOUT [--dense-masks]

CHECKOUT is a source tree of pytorch; prints a table as JSON. With --dense-masks a mask of a sparse layout is passed as
``mask.to_dense()``, which is what the error says that refuses one.

The file imports its masked tensors from torch.masked and torch.masked.maskedtensor; the shim puts this library's in
their place before it is loaded, in this process alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.masked import maskedtensor
from torch.masked.maskedtensor import core, creation

import masked_dispatch as md

FILE = Path("test") / "test_maskedtensor.py"

# Every name by which PyTorch's tests reach a masked tensor; the lists of operators that they try stay PyTorch's own.
NAMES: dict[str, Any] = {
    "masked_tensor": md.masked_tensor,
    "as_masked_tensor": md.as_masked_tensor,
    "MaskedTensor": md.MaskedTensor,
    "is_masked_tensor": md.is_masked_tensor,
}


def with_dense_mask(construct: Callable[..., md.MaskedTensor]) -> Callable[..., md.MaskedTensor]:
    """A constructor that gets a sparse mask as a dense one."""

    @functools.wraps(construct)
    def constructed(data: Any, mask: Any = None, *args: Any, **kwargs: Any) -> md.MaskedTensor:
        sparse = isinstance(mask, torch.Tensor) and mask.layout is not torch.strided
        return construct(data, mask.to_dense() if sparse else mask, *args, **kwargs)

    return constructed


@contextlib.contextmanager
def in_place_of_torchs(dense_masks: bool) -> Iterator[None]:
    """torch.masked's masked tensors are this library's."""
    constructors = ("masked_tensor", "as_masked_tensor") if dense_masks else ()
    names = NAMES | {name: with_dense_mask(NAMES[name]) for name in constructors}
    with contextlib.ExitStack() as stack:
        for module in (torch.masked, maskedtensor, core, creation):
            for name, value in names.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        # The tests call this one, which the prototype allows; the error that says what to call instead has its tests.
        stack.enter_context(mock.patch.object(torch.masked, "MaskedTensor", names["masked_tensor"]))
        yield


def loaded(path: Path) -> ModuleType:
    """The test file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class Outcomes(unittest.TestResult):
    """Each test by name: "pass", "skip" or the last line of its error."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, str] = {}

    def _note(self, test: Any, outcome: str) -> None:
        self.of[test.id().partition(".")[2]] = outcome

    def addSuccess(self, test: Any) -> None:
        self._note(test, "pass")

    def addSkip(self, test: Any, reason: str) -> None:
        self._note(test, "skip")

    def addFailure(self, test: Any, error: Any) -> None:
        self._note(test, f"{error[0].__name__}: {(str(error[1]).splitlines() or [''])[0]}")

    addError = addFailure


def run(checkout: Path, dense_masks: bool = False) -> dict[str, str]:
    """Every test of the file, run against this library."""
    outcomes = Outcomes()
    with in_place_of_torchs(dense_masks), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        sys.argv = sys.argv[:1]  # PyTorch's test utilities read the command line
        unittest.defaultTestLoader.loadTestsFromModule(loaded(checkout / FILE)).run(outcomes)
    return outcomes.of


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), "--dense-masks" in sys.argv[2:]), indent=1))
