"""Every optimizer of torch.optim, with each of its options, on masked tensors, with gradients stored in every way."""

from __future__ import annotations

import pytest

from stock_optimizers import ON_MASKED, ON_PLAIN, STORAGE, check_masked_parameter, check_plain_parameter


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("name", ON_PLAIN)
def test_plain_parameters_with_masked_gradients(name: str, storage: str) -> None:
    check_plain_parameter(name, storage)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("name", ON_MASKED)
def test_masked_parameters(name: str, storage: str) -> None:
    check_masked_parameter(name, storage)
