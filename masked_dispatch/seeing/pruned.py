"""Outputs that are invalid in every sample because all of their weights are, though they have a bias.

A contraction sums over what is valid, and adds the bias to the sum: where no weight is valid there is no sum, and the
bias is lost. That is right for weights that nobody knows, and rarely what a mask means that prunes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from masked_dispatch.autograd.dense import wrap_record
from masked_dispatch.seeing.event import Event, Found, Notes, Taken, there_of, valid_of
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.records.dense import Dense

_WEIGHT, _BIAS = "weight", "bias"
_CELLS = "params"  # weights and biases of recurrent layers, in one list
_PRODUCTS, _SUMS = {"mm", "bmm", "matmul", "einsum"}, {"add", "sub", "rsub"}


class PrunedOutputs:
    """Asks the rule: with valid data the output would still be invalid, and with valid weights it would not.

    It is called with the calls at every line, also torch's own. A product is remembered, which may get its bias by a
    sum: ``x @ w + b``. There, rows are samples, as everywhere in an audit.
    """

    def __init__(self) -> None:
        self._notes = Notes()

    def __call__(self, event: Event) -> Iterator[Found]:
        result = event.result
        if result is None or not result.ndim or not result.numel():
            return
        if event.name in _SUMS:
            yield Found("pruned output", self._given_a_bias(event, result))
        elif event.name in _PRODUCTS:
            for taken in event.masked:
                if 0 not in (own := _dims_in_result(event, taken)):
                    pruned = _pruned(event, [taken], [d for d in range(result.ndim) if d not in own])
                    if bool(pruned.any()):
                        self._notes.set(result, pruned)
        elif biases := [taken for taken in event.operands if _is_bias(taken, event)]:
            own = set().union(*(_dims_in_result(event, taken) for taken in biases)) or {result.ndim - 1}
            samples = [d for d in range(result.ndim) if d not in own]
            weights = [t for t in event.masked if t not in biases and _is_weight(t, event, samples)]
            if weights and not event.writes:
                yield Found("pruned output", int(_pruned(event, weights, samples).sum()))

    def _given_a_bias(self, event: Event, result: Tensor) -> int:
        """How many pruned outputs of a product a call adds something to that is the same for all samples."""
        for taken in event.operands:
            pruned: Tensor | None = self._notes.get(taken.tensor)
            others = [other for other in event.operands if other is not taken]
            if pruned is None or not others or pruned.ndim != result.ndim:
                continue
            shape = [1] * (result.ndim - others[0].tensor.ndim) + list(others[0].tensor.shape)
            if all(size == 1 or size == own for size, own in zip(shape, pruned.shape, strict=True)):
                return int((pruned & others[0].valid).sum())
        return 0


def _is_bias(taken: Taken, event: Event) -> bool:
    added = event.labels.added if event.labels is not None else ()
    return taken.name == _BIAS or taken.name in added or (taken.name == _CELLS and taken.tensor.ndim == 1)


def _is_weight(taken: Taken, event: Event, samples: Sequence[int]) -> bool:
    """Whether an operand is the weights: by its name, or as a factor that has no samples of a product with a bias."""
    if event.category == "contraction" and event.labels is not None:
        return bool(samples) and not _dims_in_result(event, taken) & set(samples)
    return taken.name == _WEIGHT or (taken.name == _CELLS and taken.tensor.ndim > 1)


def _dims_in_result(event: Event, taken: Taken) -> set[int]:
    """The dimensions of the first result along which an operand has several elements, or one for the only one."""
    shape, ndim = taken.tensor.shape, event.results[0].ndim
    own = [d for d, size in enumerate(shape) if size > 1 or len(shape) < ndim]
    return {d for dim in own if (d := event.dim_in_result(taken, dim, 0)) is not None}


def _pruned(event: Event, weights: Sequence[Taken], samples: Sequence[int]) -> Tensor:
    """Which outputs are invalid in all samples because of these operands; of size 1 along the samples."""
    result = event.results[0]

    def some(elements: Tensor) -> Tensor:
        return elements.any(tuple(samples), keepdim=True) if samples else elements

    pruned = some(there_of(result)) & ~some(valid_of(result))
    for others_are_valid in (True, False) if bool(pruned.any()) else ():
        chosen = [taken for taken in event.masked if (taken in weights) is not others_are_valid]
        valid = _valid_if(event, chosen)
        if valid is None or valid.shape != result.shape:
            return torch.zeros_like(pruned)
        pruned = pruned & (some(valid) ^ others_are_valid)
    return pruned


def _valid_if(event: Event, known: Collection[Taken]) -> Tensor | None:
    """The mask of the first result of the call, if these operands were valid everywhere; None if that is refused."""
    valid = {id(taken.tensor) for taken in known}

    def given(tensor: Tensor) -> Tensor | None:
        if id(tensor) not in valid or not isinstance(tensor, MaskedTensor):
            return None
        return wrap_record(Dense(torch.ones_like(tensor._data), None))

    result = event.again(given)
    return None if result is None else valid_of(result)
