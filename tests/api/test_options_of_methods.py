"""Options that torch's methods lack are found in this library's functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sixteen_elements import F, T, sample


@pytest.mark.parametrize("option, layout", [({"skipna": False}, "dense"), ({"min_count": 0}, "csr")])
def test_options_of_this_library_s_functions_are_found(option: dict[str, Any], layout: str) -> None:
    (name, value) = next(iter(option.items()))
    for method in ("sum", "mean", "std", "amax", "nansum"):
        instead = rf"use masked_dispatch.{method}\(x, …, {name}={value}\)"
        message = rf"^x.{method}\(\) is torch's method and has no {name}; {instead}"
        with pytest.raises(TypeError, match=message):
            getattr(sample(layout), method)(1, **option)
    with pytest.raises(TypeError, match=r"^x.cumsum\(\) is torch's method and has no skipna"):
        sample(layout).cumsum(1, skipna=False)
    assert sample(layout).sum(1, keepdim=True).shape == (4, 1)
    rows = torch.compile(lambda x: x.sum(1), backend="aot_eager", fullgraph=True)(sample())
    assert rows.get_mask().tolist() == [T, T, F, T]
