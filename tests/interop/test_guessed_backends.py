"""Libraries that guess from a type's module whose functions a tensor has use torch's for masked tensors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import masked_dispatch as md
from masked_dispatch.interop import outside_dispatch
from storages import STORAGES

NAN = float("nan")
W = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def x(storage: str) -> Any:
    mask = torch.tensor([[True, False, True], [True, True, True]])
    if storage == "packed":
        mask = mask[..., None]
    made = STORAGES[storage](md.masked_tensor(torch.where(mask, 2.0, NAN), mask))
    return made[..., 0] if storage == "packed" else made


# Calls of libraries that guess, with what torch gives.
CALLS: dict[str, tuple[str, Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "opt_einsum.contract": ("opt_einsum", lambda m, x: m.contract("ij,jk->ik", x, W), lambda x: x @ W),
    "opt_einsum.contract, second": (
        "opt_einsum",
        lambda m, x: m.contract("kj,ij->ki", W.t(), x),
        lambda x: W.t() @ x.t(),
    ),
    "opt_einsum.contract_expression": (
        "opt_einsum",
        lambda m, x: m.contract_expression("ij,jk->ik", (2, 3), (3, 2))(x, W),
        lambda x: x @ W,
    ),
    "autoray.do": ("autoray", lambda m, x: m.do("sum", x, 1), lambda x: x.sum(1)),
    "autoray.infer_backend": ("autoray", lambda m, x: m.do("exp", x, like=m.infer_backend(x)), lambda x: x.exp()),
    "einops.einsum": ("einops", lambda m, x: m.einsum(x, W, "i j, j k -> i k"), lambda x: x @ W),
    "einops.reduce": ("einops", lambda m, x: m.reduce(x, "i j -> i", "sum"), lambda x: x.sum(1)),
}


@pytest.mark.parametrize("storage", ["dense", "coo", "csr", "packed"])
@pytest.mark.parametrize("call", CALLS)
def test_a_library_that_guesses_takes_torch(call: str, storage: str) -> None:
    library, function, expected = CALLS[call]
    found = function(pytest.importorskip(library, reason=f"{library} isn't installed"), x(storage))
    assert isinstance(found, md.MaskedTensor)
    md.testing.assert_close(found.to_dense(), expected(x(storage)).to_dense())


@pytest.fixture
def unknown_library(tmp_path: Path, monkeypatch: Any) -> Iterator[Path]:
    """A library of opt_einsum's structure, which nobody has imported."""
    folder = tmp_path / "opt_einsum" / "backends"
    folder.mkdir(parents=True)
    for path in (folder.parent, folder):
        (path / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    known = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "opt_einsum"}
    for name in known:
        monkeypatch.delitem(sys.modules, name)
    finders = list(sys.meta_path)
    yield folder / "dispatch.py"
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "opt_einsum"]:
        del sys.modules[name]


def test_a_library_is_told_when_it_is_imported_and_not_before(unknown_library: Path) -> None:
    unknown_library.write_text('_aliases = {"torch": "opt_einsum.backends.torch"}\n')
    outside_dispatch.tell_when_imported()
    assert "opt_einsum" not in sys.modules
    module = importlib.import_module("opt_einsum.backends.dispatch")
    assert module._aliases["masked_dispatch"] == "opt_einsum.backends.torch"


def test_what_was_said_of_us_before_stays(unknown_library: Path) -> None:
    unknown_library.write_text('_aliases = {"torch": "a", "masked_dispatch": "b"}\n')
    module = importlib.import_module("opt_einsum.backends.dispatch")
    outside_dispatch.tell_when_imported()
    assert module._aliases["masked_dispatch"] == "b"


def test_a_release_without_the_table_is_left_alone(unknown_library: Path) -> None:
    unknown_library.write_text("")
    outside_dispatch.tell_when_imported()
    assert not hasattr(importlib.import_module("opt_einsum.backends.dispatch"), "_aliases")
