"""Views of inputs that are not contiguous, inside transforms: what torch copies there is copied, and nothing raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch import MaskedSemanticsError

Function = Callable[[Tensor], Tensor]

DATA = torch.arange(1.0, 13).view(3, 4) / 8
INPUTS: dict[str, Callable[[], md.MaskedTensor]] = {
    "holes": lambda: md.masked_tensor(DATA, DATA.mul(8).remainder(3) != 1),
    "a mask of rows": lambda: md.masked_tensor(DATA, torch.tensor([[True], [False], [True]])),
    "a transposed mask": lambda: md.masked_tensor(DATA, (DATA.mul(8).remainder(5) != 1).T.contiguous().T),
    "padding": lambda: md.from_lengths(DATA, torch.tensor([4, 1, 2])),
}
ARRANGED: dict[str, Function] = {
    "as it is": lambda p: p,
    "transposed": lambda p: p.mT,
    "transposed to a copy": lambda p: p.mT.contiguous(),
    "every second column": lambda p: p[:, ::2],
    "expanded": lambda p: p.expand(2, 3, 4),
    "flipped": lambda p: p.flip(0).mT,
    "permuted": lambda p: p.unflatten(1, (2, 2)).permute(2, 0, 1),
}
VIEWED: dict[str, Function] = {
    "reshape": lambda t: t.reshape(-1),
    "reshape to two": lambda t: t.reshape(2, -1),
    "flatten": lambda t: t.flatten(),
    "view": lambda t: t.view(-1),
    "view of a copy": lambda t: t.contiguous().view(-1),
    "view of a clone": lambda t: t.clone(memory_format=torch.contiguous_format).view(2, -1),
    "unflatten": lambda t: t.unflatten(-1, (-1, 1)).flatten(),
    "doubled and back": lambda t: t.mT.mul(2).mT.view(-1),
    "movedim": lambda t: t.movedim(0, -1).reshape(-1),
    "transpose": lambda t: t.mT.contiguous().view(-1),
    "diagonal": lambda t: t.diagonal(dim1=-2, dim2=-1).reshape(-1),
    "expand": lambda t: t.unsqueeze(0).expand(2, *t.shape).reshape(-1),
}
ONES = torch.ones(3, 4)
TRANSFORMS: dict[str, Callable[[Any, Function, Tensor], Tensor]] = {
    "jvp": lambda func, f, x: func.jvp(f, (x,), (ONES,))[1],
    "jacfwd": lambda func, f, x: func.jacfwd(f)(x),
    "jacrev": lambda func, f, x: func.jacrev(f)(x),
    "hessian": lambda func, f, x: func.hessian(lambda p: f(p).sum())(x),
    "vmap": lambda func, f, x: func.vmap(lambda c: f(x * c))(torch.tensor([1.0, 2.0])),
    "jvp of grad": lambda func, f, x: func.jvp(func.grad(lambda p: f(p).sum()), (x,), (ONES,))[1],
}


def zeros_instead(x: Tensor) -> Tensor:
    return x.to_tensor(0.0) if md.is_masked_tensor(x) else x


# Any two of the three meet.
MEETING = [
    (arranged, viewed, list(TRANSFORMS)[(i + j) % len(TRANSFORMS)])
    for i, arranged in enumerate(ARRANGED)
    for j, viewed in enumerate(VIEWED)
]


@pytest.mark.parametrize(("arranged", "viewed", "transform"), MEETING)
def test_as_torchs_own_of_what_is_valid(arranged: str, viewed: str, transform: str) -> None:
    apply, view = TRANSFORMS[transform], lambda t: VIEWED[viewed](ARRANGED[arranged](t))
    try:
        view(DATA)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            apply(md.functional, view, INPUTS["holes"]())
        return
    for kind, make in INPUTS.items():
        x = make()
        try:
            view(x)
        except MaskedSemanticsError:  # it depends on how the batch is padded, and raises without a transform as well
            assert kind == "padding"
            continue
        mask = view(x).get_mask()
        found = apply(md.functional, lambda p: view(p).sin(), x)
        wanted = apply(torch.func, lambda p, m=mask: torch.where(m, view(p).sin(), 0), x.to_tensor(0.0).contiguous())
        torch.testing.assert_close(zeros_instead(found), wanted, msg=lambda text, k=kind: f"{k}: {text}")
