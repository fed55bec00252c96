"""einsum of factors with dimensions of size 1, by which torch's own steps tell dimensions apart."""

from __future__ import annotations

import random

import pytest
import torch

import masked_dispatch as md

EQUATIONS = [
    "btd,bsd->bts",
    "bij,bjk->bik",
    "bhtd,bhsd->bhts",
    "abc,abc->c",
    "ab,cd->abcd",
    "ab,ab->",
    "ab,bc,ca->",
    "bi,bj,ij->b",
    "ij,jk,kl->il",
    "...ij,...jk->...ik",
    "b...d,bd->b...",
    "ii->i",
    "ii",
    "iij,jk->ik",
    "aab,bba->a",
    "abc->cb",
    "ij,kj",
    "i,i->i",
]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_values_and_masks_of_dimensions_of_size_one(equation: str) -> None:
    draw = random.Random(equation)
    torch.manual_seed(0)
    for _ in range(12):
        sizes = {a: draw.choice([1, 1, 2, 3]) for a in sorted(set(equation) - set(".,->"))}
        dots = [draw.choice([1, 2]) for _ in range(draw.choice([0, 1, 2]))]
        factors = []
        for term in equation.partition("->")[0].split(","):
            more = [draw.choice([1, n]) for n in dots][draw.randint(0, len(dots)) :]
            before, _, after = term.partition("...")
            shape = [*(sizes[a] for a in before), *(more if "..." in term else []), *(sizes[a] for a in after)]
            factors.append(torch.randn(shape, dtype=torch.float64))
        masks = [torch.rand(f.shape) > 0.3 for f in factors]
        found = torch.einsum(equation, *map(md.masked_tensor, factors, masks))
        filled = torch.einsum(equation, *[torch.where(m, f, 0) for f, m in zip(factors, masks, strict=True)])
        assert found.get_mask().equal(torch.einsum(equation, *[m.double() for m in masks]) > 0)
        torch.testing.assert_close(found.to_tensor(0), torch.where(found.get_mask(), filled, 0))


@pytest.mark.parametrize("equation", ["ij,jk->il", "ij,jk,kl->il", "ijk,jk->i", "ij,jk->ii", "ij,j", "i?,j->i"])
def test_errors_are_those_of_torch(equation: str) -> None:
    x = torch.ones(1, 2)
    with pytest.raises(RuntimeError) as torchs:
        torch.einsum(equation, x, torch.ones(3, 1))
    with pytest.raises(RuntimeError) as ours:
        torch.einsum(equation, md.as_masked_tensor(x, x > 0), torch.ones(3, 1))
    assert str(ours.value) == str(torchs.value)


def test_one_position_is_there_in_samples_that_have_it() -> None:
    one = md.from_lengths(torch.ones(3, 1, 4), torch.tensor([1, 0, 1]))
    others = md.from_lengths(torch.ones(3, 5, 4), torch.tensor([5, 2, 3]))
    scores = torch.einsum("btd,bsd->bts", one, others)
    assert scores.amax(2).extent.tolist() == [[True], [False], [True]]
    assert scores.sum(2).to_tensor(-1).tolist() == [[20], [-1], [12]]
