"""An AttributeError for a name of pandas or numpy.ma says the word used here, and the word is there."""

from __future__ import annotations

import inspect
import re
from itertools import cycle

import pytest
import torch
import torch.overrides

import masked_dispatch as md
from masked_dispatch.api.known_words import WORDS

X = md.masked_tensor([1.0, 2.0], [True, False])
STORED = {"dense": X, "sparse": X.to_sparse()}


@pytest.mark.parametrize("name, storage", zip(WORDS, cycle(STORED), strict=False))
def test_the_word_used_here_is_said_and_exists(name: str, storage: str) -> None:
    x = STORED[storage]
    assert not hasattr(torch.Tensor, name)
    with pytest.raises(AttributeError, match=f"has no attribute {name!r}; here it is written {re.escape(WORDS[name])}"):
        getattr(x, name)
    assert not hasattr(x, name)
    for path in re.findall(r"masked_dispatch\.[\w.]+", WORDS[name]):
        value = md
        for part in path.split(".")[1:]:
            value = getattr(value, part)
    for method in re.findall(r"\bx\.(\w+)\(", WORDS[name]):
        assert hasattr(x, method)


MODULES = (torch, torch.nn.functional, torch.fft, torch.linalg, torch.special, torch.nn.utils.rnn)
OF_TORCH = sorted(
    {
        (module, name)
        for module in MODULES
        for name in dir(module)
        if not name.startswith("_") and inspect.isroutine(getattr(module, name)) and not hasattr(md, name)
    },
    key=lambda case: (case[0].__name__, case[1]),
)


def test_the_functions_of_torch_are_named() -> None:
    """Every public function of the modules of torch that people call, but where a word of this library comes first."""
    assert len(OF_TORCH) > 800
    for _, name in OF_TORCH:
        with pytest.raises(AttributeError) as caught:
            getattr(md, name)
        message = str(caught.value).removeprefix(f"module 'masked_dispatch' has no attribute {name!r}; ")
        if name in WORDS or "masked_dispatch." in message:
            assert message.startswith("here it is written "), message
            continue
        first = next(m for m in MODULES if callable(getattr(m, name, None)))
        path = f"{first.__name__}.{name}"
        takes_tensors = getattr(first, name) in torch.overrides.get_testing_overrides()
        assert message == (f"{path} takes masked tensors" if takes_tensors else f"here it is written {path}")


def test_lengths_of_a_padded_batch() -> None:
    with pytest.raises(
        md.MaskedSemanticsError, match=r"stored densely: .* are masked_dispatch\.interop\.to_lengths\(x\)"
    ):
        X.lengths()


def test_other_names_are_python_s_own_error() -> None:
    with pytest.raises(AttributeError, match=r"^'MaskedTensor' object has no attribute 'nix'$"):
        X.nix  # noqa: B018
    assert getattr(X, "nix", None) is None
