"""Calls of the database come out as without explaining."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import masked_dispatch as md
from masked_dispatch.densification import Densification, collecting
from op_registry.conformance.masks import masking
from op_registry.conformance.sample import Sample
from op_registry.conformance.samples import chosen, database


@pytest.mark.filterwarnings("ignore")  # samples of deprecated and experimental operators say so
@pytest.mark.parametrize("sparsely", [False, True], ids=["dense", "csr"])
def test_every_call_of_the_database_comes_out_as_without_explaining(sparsely: bool) -> None:
    """Two samples of each entry: the same error or none, and densified where the call itself is."""
    compared = densified = 0
    for entry, operator in database().items():
        if not operator.dtypes:
            continue
        samples = [s for s in operator.samples(operator.preferred_dtype) if s.tensors]
        for sample in chosen(samples, 2):
            args, kwargs = masked_arguments(sample, sparsely)
            alone, heard = called(sample.fn, *masked_arguments(sample, sparsely))
            said = md.explain(sample.fn, *args, **kwargs)
            assert said.error.partition(":")[0] == alone, (entry, str(said))
            if not said.error:
                assert {f.op for f in said.densified} == {f.op for f in heard}, (entry, str(said))
            compared += 1
            densified += bool(said.densified)
            assert str(said)
    assert compared > 1000
    # Of dense operands, the calls with one of torch's own sparse tensors.
    assert densified > 100 if sparsely else densified == 2


def masked_arguments(sample: Sample, sparsely: bool) -> tuple[Any, Any]:
    half = masking("half", sample.tensors)
    assert half is not None
    masks = dict(zip(map(id, sample.tensors), half.full(sample.tensors), strict=True))

    def masked(tensor: torch.Tensor) -> Any:
        made = md.masked_tensor(tensor, masks[id(tensor)])
        return made.to_sparse_csr() if sparsely and tensor.ndim >= 2 else made

    return sample.with_tensors(masked)


def called(function: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[str, list[Densification]]:
    """The name of the error that a call raises, and what it stores densely."""
    with torch.no_grad(), collecting() as heard:
        try:
            function(*given, **named)
        except Exception as raised:
            return type(raised).__name__, heard
    return "", heard
