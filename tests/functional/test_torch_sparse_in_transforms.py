"""The doors to torch.sparse inside transforms: as `.to_dense()` of torch's own tensor, where torch has derivatives."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from repository import ROOT

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]
V = torch.tensor([1.0, 2.0])
AT, CROW = torch.tensor([[0, 2]]), torch.tensor([0, 1, 2])

MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "coalesced": lambda v: torch.sparse_coo_tensor(AT, v, (4,)).coalesce(),
    "in order": lambda v: torch.sparse_coo_tensor(AT, v, (4,)),
    "duplicates": lambda v: torch.sparse_coo_tensor(torch.tensor([[1, 1]]), v, (4,)),
    "hybrid": lambda v: torch.sparse_coo_tensor(torch.tensor([[1]]), v[None], (4, 2)),
    "csr": lambda v: torch.sparse_csr_tensor(CROW, torch.tensor([0, 1]), v, (2, 3)),
    "csc": lambda v: torch.sparse_csc_tensor(CROW, torch.tensor([0, 1]), v, (3, 2)),
    "bsr": lambda v: torch.sparse_bsr_tensor(torch.tensor([0, 1]), torch.tensor([0]), v.view(1, 1, 2), (1, 2)),
}
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda f: md.functional.grad(f)(V),
    "vjp": lambda f: md.functional.vjp(f, V)[1](torch.tensor(1.0))[0],
    "jvp": lambda f: md.functional.jvp(f, (V,), (torch.ones(2),))[1],
    "vmap": lambda f: md.functional.vmap(f)(V.expand(3, 2)),
    "jacrev": lambda f: md.functional.jacrev(f)(V),
    "jacfwd": lambda f: md.functional.jacfwd(f)(V),
}
DOORS: dict[str, Callable[[Tensor], Tensor]] = {
    "in": lambda s: md.as_masked_tensor(s).pow(3).sum().to_tensor(0.0),
    "in and out": lambda s: md.as_masked_tensor(s).to_torch_sparse().to_dense().pow(3).sum(),
    "matmul": lambda s: (md.as_masked_tensor(s).to_dense().to_tensor(0.0)).pow(3).sum(),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("maker", MAKERS)
def test_as_torchs_own_dense_tensor(maker: str, transform: str, door: str) -> None:
    make, run = MAKERS[maker], TRANSFORMS[transform]
    try:
        wanted = run(lambda v: make(v).to_dense().pow(3).sum())
    except (NotImplementedError, RuntimeError):
        with pytest.raises((NotImplementedError, RuntimeError)):
            run(lambda v: DOORS[door](make(v)))
        return
    torch.testing.assert_close(run(lambda v: DOORS[door](make(v))), wanted)


def test_torch_differentiates_coo_in_reverse_mode_alone() -> None:
    """What the test above compares with: should torch come to take more, the doors have to."""

    def runs(maker: str, transform: str) -> bool:
        try:
            TRANSFORMS[transform](lambda v: MAKERS[maker](v).to_dense().pow(3).sum())
        except (NotImplementedError, RuntimeError):
            return False
        return True

    found = {(maker, transform) for maker in MAKERS for transform in TRANSFORMS if runs(maker, transform)}
    assert found == {(m, t) for m in ("coalesced", "in order", "duplicates", "hybrid") for t in ("grad", "vjp")}


@pytest.mark.parametrize("stored", [False, True], ids=["dense", "coo"])
@pytest.mark.parametrize("transform", ["grad", "vjp"])
def test_out_of_a_masked_argument(transform: str, stored: bool) -> None:
    x: Tensor = md.masked_tensor(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [True, True]]))
    x = x.to_sparse() if stored else x

    def loss(x: Any) -> Tensor:
        return x.to_torch_sparse().to_dense().pow(2).sum()

    f = md.functional
    gradient = f.grad(loss)(x) if transform == "grad" else f.vjp(loss, x)[1](torch.tensor(1.0))[0]
    md.testing.assert_close(gradient, 2 * x)


# Each autograd function of the two packages, and why it can stand in a call inside a transform.
_NOT_THERE = "records and tensors are not connected by it there: under_transform"
_AT_ONCE = "computed_at_once: elsewhere torch's own operators"
_RANKS = "it is a collective, which no transform takes"
FUNCTIONS = {
    "Wrap": _NOT_THERE,
    "Unwrap": _NOT_THERE,
    "Beside": _NOT_THERE,
    "SparseWrap": _NOT_THERE,
    "SparseUnwrap": _NOT_THERE,
    "FromTorchSparse": "above",
    "ToTorchSparse": "above",
    "WithPlainGradient": "torch.masked, whose tensor is made behind it, refuses transforms by functions of its own",
    "SumOverRanks": _RANKS,
    "Replicated": _RANKS,
    "OfSparse": _RANKS,
    "Broadcast": _RANKS,
    "Fill": _AT_ONCE,
    "_Spmm": _AT_ONCE,
    "_Sddmm": _AT_ONCE,
    "_Sum": _AT_ONCE,
    "Lookup": _AT_ONCE,
}


def test_every_function_of_the_project_is_its_own_and_known_here() -> None:
    own, others = set(), set()
    for package in ("masked_dispatch", "op_registry"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
                if {"OwnFunction", "Boundary"} & {*bases} and node.name != "Boundary":
                    own.add(node.name)  # type: ignore[attr-defined]
                elif "torch.autograd.Function" in bases:
                    others.add(f"{path.parent.name}/{path.name}")
    assert own == FUNCTIONS.keys()
    # The base, and functions of others as checks and mutants call them.
    allowed = {"records/fill.py", "assumptions/dispatch.py", "assumptions/engine.py"}
    assert others == {*allowed, "conformance/mutant_ways.py"}
