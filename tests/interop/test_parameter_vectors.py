"""torch.nn.utils.vector_to_parameters and masked tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import convert_parameters, parameters_to_vector

import masked_dispatch as md

FUNCTIONS: list[Any] = [nn.utils.vector_to_parameters, convert_parameters.vector_to_parameters]


def masked(*shape: int) -> md.MaskedTensor:
    return md.masked_tensor(torch.ones(shape), torch.arange(torch.Size(shape).numel()).reshape(shape) % 2 == 0)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_masked_vector_is_no_data_of_plain_parameters(function: Any) -> None:
    first, second = nn.Parameter(masked(2)), nn.Parameter(torch.zeros(3))
    before = first.to_tensor(9).tolist()
    with pytest.raises(
        md.MaskedSemanticsError,
        match=r"^vector_to_parameters of a masked vector of shape \(5,\): parameter 1, of shape \(3,\), is plain, and "
        r".* vec\.to_tensor\(fill\); or make the parameters masked first",
    ):
        function(masked(5), iter([first, second]))
    assert first.to_tensor(9).tolist() == before
    assert second.tolist() == [0, 0, 0]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_masked_parameters_and_plain_ones_take_vectors_as_before(function: Any) -> None:
    parameters: list[Tensor] = [nn.Parameter(masked(2, 2) * 0), nn.Parameter(masked(3) * 0)]
    vector = parameters_to_vector([masked(2, 2), masked(3)])
    function(vector, parameters)
    md.testing.assert_close(parameters_to_vector(parameters).detach(), vector)
    plain = nn.Linear(2, 1)
    function(torch.ones(3), plain.parameters())
    assert plain.weight.tolist() == [[1, 1]]
