"""Compiled graphs in torch's caches on disk: found again by other processes, by the rules and the library alone that
made them, and for operands of the same geometry."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from compiled_regions import masked, upper_left
from storages import STORAGES

pytestmark = pytest.mark.usefixtures("fresh_compiler")
aten = torch.ops.aten


def test_rules_that_no_file_has_are_never_taken_for_each_other() -> None:
    def typed(body: str) -> Callable[..., Tensor]:
        names: dict[str, Callable[..., Tensor]] = {}
        exec(compile(f"rule = lambda x: {body}", "<stdin>", "exec"), names)
        return names["rule"]

    versions = []
    for body in ("x * 2", "x * 3"):
        with md.registry.overlay() as mine:
            mine.replace(aten.exp.default, typed(body))
            versions.append(md.registry.version)
    assert len(set(versions)) == 2


@pytest.mark.parametrize("storage", STORAGES)
def test_graphs_are_told_apart_by_the_sizes_of_what_is_stored(storage: str) -> None:
    keys = {STORAGES[storage](upper_left(*sizes))._stable_hash_for_caching() for sizes in ((4, 6), (4, 8), (6, 6))}
    assert len(keys) == 3


@pytest.mark.parametrize("later", [torch.Tensor.conj, lambda z: z.conj().imag], ids=["conjugated", "negated"])
def test_graphs_are_told_apart_by_what_torch_does_later(later: Callable[[Tensor], Tensor]) -> None:
    """Of conjugates and their imaginary parts torch keeps the data, and a note of what is to be done to it."""
    data, mask = later(torch.randn(3, dtype=torch.complex64)), torch.tensor([True, False, True])
    done = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype).copy_(data)
    noted, resolved = md.as_masked_tensor(data, mask), md.as_masked_tensor(done, mask)
    assert noted._stable_hash_for_caching() != resolved._stable_hash_for_caching()


def test_autograd_caches_tell_masks_of_one_kind_from_another() -> None:
    """AOTAutograd's cache asks for a hash: equal for equal geometry, rules and library, whatever the values."""
    x = masked()
    assert x._stable_hash_for_caching() == masked()._stable_hash_for_caching()
    others = [
        masked(4, 6, mask=None),
        masked(4, 6, mask=torch.rand(4, 1) > 0.5),
        masked(6, 4),
        masked(requires_grad=True),
        x.double(),
        x.t(),
    ]
    hashes = {o._stable_hash_for_caching() for o in (x, *others)}
    assert len(hashes) == len(others) + 1
    with md.registry.overlay() as mine:
        mine.replace(aten.exp.default, lambda x: x)
        assert x._stable_hash_for_caching() not in hashes
    assert x._stable_hash_for_caching() in hashes
