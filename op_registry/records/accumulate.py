"""accumulate: the sum of the valid contributions, valid where there is at least one.

Law: elementwise arithmetic needs both operands; accumulation skips an invalid element. Gradients merged from different
batches, duplicate indices or workers, and the sums of the autograd engine all mean this.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.records.dense import Dense
from op_registry.records.dtypes import accumulation_dtype
from op_registry.records.validity import unite


def accumulate(records: Sequence[Dense]) -> Dense:
    """The sum of one or more records, in the dtype and shape that torch.add gives them; bool is "or".

    Half-precision contributions are summed in float32 and rounded once.
    """
    dtype = dtype_of_sum([record.data for record in records])
    validities = [record.validity for record in records]
    # Contributions under one mask are all valid at the same elements, so nothing needs a fill.
    together = all(validity is validities[0] for validity in validities)
    terms = [(record.data if together else record.filled(0)).to(accumulation_dtype(dtype)) for record in records]
    total = functools.reduce(torch.add, terms) if len(terms) > 1 else terms[0].clone()
    return Dense(total.to(dtype), functools.reduce(unite, validities))


def dtype_of_sum(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of a sum that adds the tensors in turn: type promotion gives 0-d tensors a lower priority."""
    total = tensors[0].new_empty([1] * (tensors[0].ndim > 0), device="meta")
    for tensor in tensors[1:]:
        dimensions = max(total.ndim, int(tensor.ndim > 0))
        total = total.new_empty([1] * dimensions, dtype=torch.result_type(total, tensor))
    return total.dtype
