"""Logical writes to leaves in compiled regions: not recorded, as outside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from logical_writes import LOGICAL, check_write_to_leaf, masked, plain


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("made", [plain, masked])
@pytest.mark.parametrize("name", LOGICAL)
def test_a_compiled_logical_write_to_a_leaf_is_not_recorded(
    name: str, made: Callable[[Tensor], Tensor], backend: str
) -> None:
    check_write_to_leaf(name, made, lambda write: torch.compile(write, backend=backend, fullgraph=True))
