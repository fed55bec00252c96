"""An AttributeError for a name of pandas or numpy.ma says the word used here, and the word is there."""

from __future__ import annotations

import re
from itertools import cycle

import pytest
import torch

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
        found = md
        for part in path.split(".")[1:]:
            found = getattr(found, part)
    for method in re.findall(r"\bx\.(\w+)\(", WORDS[name]):
        assert hasattr(x, method)


def test_other_names_are_python_s_own_error() -> None:
    with pytest.raises(AttributeError, match=r"^'MaskedTensor' object has no attribute 'nix'$"):
        X.nix  # noqa: B018
    assert getattr(X, "nix", None) is None
