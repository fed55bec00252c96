"""Calls of the database come out as without explaining."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import masked_dispatch as md
from masked_dispatch.densification import Densification, on_densify
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
            error, stored_densely = called(sample.fn, *masked_arguments(sample, sparsely))
            explanation = md.explain(sample.fn, *args, **kwargs)
            assert explanation.error.partition(":")[0] == error, (entry, str(explanation))
            if not explanation.error:
                assert {d.op for d in explanation.densified} == stored_densely, (entry, str(explanation))
            compared += 1
            densified += bool(explanation.densified)
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


def called(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, set[str]]:
    """The name of the error that a call raises, and the operators that store something densely."""
    reported: list[Densification] = []
    on_densify.append(reported.append)
    error = ""
    try:
        with torch.no_grad():
            function(*args, **kwargs)
    except Exception as raised:
        error = type(raised).__name__
    finally:
        on_densify.remove(reported.append)
    return error, {densification.op for densification in reported}
