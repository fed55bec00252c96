"""An AttributeError for a name of pandas or numpy.ma says the word used here, and the word is there."""

from __future__ import annotations

import re

import pytest
import torch

import masked_dispatch as md
from masked_dispatch.api.known_words import WORDS

X = md.masked_tensor([1.0, 2.0], [True, False])


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("x", [X, X.to_sparse()], ids=["dense", "sparse"])
def test_the_word_used_here_is_said(name: str, x: md.MaskedTensor) -> None:
    assert not hasattr(torch.Tensor, name)
    with pytest.raises(AttributeError, match=f"has no attribute {name!r}; here it is written {re.escape(WORDS[name])}"):
        getattr(x, name)
    assert not hasattr(x, name)


@pytest.mark.parametrize("words", WORDS.values())
def test_the_words_exist(words: str) -> None:
    for path in re.findall(r"masked_dispatch\.[\w.]+", words):
        found = md
        for part in path.split(".")[1:]:
            found = getattr(found, part)
    for method in re.findall(r"\bx\.(\w+)\(", words):
        assert hasattr(X, method)


def test_other_names_are_python_s_own_error() -> None:
    with pytest.raises(AttributeError, match=r"^'MaskedTensor' object has no attribute 'nix'$"):
        X.nix  # noqa: B018
    assert getattr(X, "nix", None) is None
