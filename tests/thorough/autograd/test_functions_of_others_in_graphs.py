"""As tests/autograd/test_functions_of_others.py: compiled, and whether all functions of torch's are there."""

from __future__ import annotations

import pytest
import torch

import masked_dispatch as md
from functions_of_others import (
    CALLED,
    CASES,
    NOT_CALLED,
    SPARSE,
    WITH_TANGENTS,
    Function,
    functions_of_torch,
    gradients,
    has_tangents,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
    # Dynamo asks a tensor that is no leaf for its `.grad`, after a graph break.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
]


def test_every_function_of_torch_is_called_or_has_its_reason() -> None:
    found = functions_of_torch()
    assert found - CALLED.keys() - NOT_CALLED.keys() == set(), "torch has new autograd functions"
    assert (CALLED.keys() | NOT_CALLED.keys()) - found == set(), "torch has no longer these autograd functions"
    assert not CALLED.keys() & NOT_CALLED.keys()


def test_what_has_tangents_in_torch_is_asked_for_them() -> None:
    found = {name for name, case in CASES.items() if name != "makes masked" and has_tangents(case.call)}
    assert found == WITH_TANGENTS


@pytest.mark.parametrize(
    ("call", "operators", "storage"),
    [
        pytest.param(case.call, case.operators, storage, id=f"{name.rpartition('.py ')[2]}-{storage}")
        for name, case in CASES.items()
        for storage in case.storages
        # AOTAutograd of torch 2.13 miscounts what a graph after a break saves (dynamic_saved_tensors_idxs).
        if not (name == "shared" and storage in SPARSE)
    ],
)
def test_gradients_compiled(call: Function, operators: Function, storage: torch.layout) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager")
    for found, wanted in zip(gradients(compiled, storage), gradients(operators, storage), strict=True):
        assert type(found) is type(wanted)
        if found is not None:
            md.testing.assert_close(found, wanted)
    torch._dynamo.reset()


# The others Dynamo does not trace whole for plain tensors either: it refuses vjp and jvp.
@pytest.mark.parametrize("name", ["step by step", "plain for a leaf", "two results in a graph", "nested", "shared"])
def test_functions_by_hand_are_in_one_graph(name: str) -> None:
    case = CASES[name]
    for storage in set(case.storages) - set(SPARSE):
        torch._dynamo.reset()
        of_x, _ = gradients(torch.compile(case.call, backend="aot_eager", fullgraph=True), storage)
        md.testing.assert_close(of_x, gradients(case.operators, storage)[0])


def test_torch_sparse_gradients_break_the_graph() -> None:
    case = CASES["plain for a leaf"]
    with pytest.raises(RuntimeError, match=r"as a torch\.sparse tensor, which torch does not compile"):
        gradients(torch.compile(case.call, backend="aot_eager", fullgraph=True), torch.sparse_csr)
