"""Refuse matrices with invalid elements in torch.lobpcg, torch.svd_lowrank and torch.pca_lowrank.

These functions multiply the matrix by random or trial vectors. Such a product is valid wherever a row of the matrix has
a valid element, so their individual operators would count invalid elements as zeros, or not, depending on the mask.
Dispatch does not see them, as they are Python functions; but each first asks `has_torch_function` whether another
library overrides it, and then calls `handle_torch_function`. This library replaces both, only in the two modules of
these functions. If every element is valid, torch's function runs on the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch import _lobpcg as lobpcg_module
from torch import _lowrank as low_rank_module

from masked_dispatch.interop.crossing import as_masked
from masked_dispatch.replacements.replacing import replace
from masked_dispatch.tensor.checks import is_given_masked
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry import MaskedSemanticsError
from op_registry.laws.categories import known_all_valid
from op_registry.records.dense import Dense, map_tensors


def is_of_masked(arguments: Iterable[object]) -> bool:
    """Return whether torch's has_torch_function gets a masked argument."""
    return is_given_masked(*arguments)


def is_overridden(original: Callable[..., bool], arguments: Iterable[object]) -> bool:
    """Replace torch's has_torch_function, which ignores masked tensors."""
    return True


def run_overridden(
    original: Callable[..., Any], function: Callable[..., Any], relevant: Iterable[object], *args: Any, **kwargs: Any
) -> Any:
    """Replace torch's handle_torch_function: refuse invalid elements, otherwise call torch's function on the data."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, MaskedTensor) and not is_all_valid(argument):
            raise MaskedSemanticsError(
                f"torch.{function.__name__} has no meaning on a partly valid matrix (shape {tuple(argument.shape)}): "
                "it multiplies the matrix by vectors, and would count invalid elements as zeros. Choose the values "
                "of invalid elements first, x.to_tensor(value), or leave out the rows that have some, "
                "x[x.get_mask().all(-1)]."
            )
    data = [plain(a) for a in args]
    return map_tensors(as_masked, function(*data, **{name: plain(a) for name, a in kwargs.items()}), Tensor)


def is_all_valid(tensor: MaskedTensor) -> bool:
    """Return whether every element is valid; False if a graph stores a mask, whose values are unknown."""
    if tensor.storage_layout is not torch.strided:
        return not tensor.is_meta and int(tensor.count()) == tensor.numel()
    return known_all_valid(Dense(tensor._data, tensor._validity))


def plain(value: object) -> object:
    """Return the data of a fully valid masked tensor; return other values unchanged."""
    return value.get_data() if isinstance(value, MaskedTensor) else value


def install() -> None:
    """The package calls this once, on import."""
    modules: tuple[Any, ...] = (lobpcg_module, low_rank_module)
    for module in modules:
        replace(module, "has_torch_function", is_overridden, is_of_masked)
        replace(module, "handle_torch_function", run_overridden, is_given_masked)
