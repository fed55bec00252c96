"""torch.cond, scan and while_loop with masked operands: we pass each operand as one or two plain tensors.

We rebuild masked tensors from these for branches and steps, and split their masked results again. We copy the results,
because these operators refuse results that are operands or parts of operands. The mask of floating-point data travels
in the same tensor as the data: autograd needs a derivative of every result. So the booleans of an extent are numbers of
the data's dtype, in tensors of their own; what is known of them has to be the same in all branches and steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.autograd.dense import unwrap, wrap_record
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry import MaskedSemanticsError
from op_registry.extents.factors import factors_of
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent, Factor, extent_of
from op_registry.records.fill import fill_where_invalid
from op_registry.records.validity import as_int8

PLAIN, ONE, TWO = 0, 1, 2


class Parts:
    """How we pass several values: plain values unchanged, masked ones as one or two plain tensors and their extents."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.kinds = [_kind(value) for value in values]
        self.extents = [_extent_of_any(value) for value in values]

    def apart(self, values: Sequence[Any]) -> list[Any]:
        """The plain values that stand for `values`."""
        plain: list[Any] = []
        for number, (value, kind, extent) in enumerate(zip(values, self.kinds, self.extents, strict=True)):
            plain += [value] if kind == PLAIN else _apart(value, kind)
            plain += _booleans(value, extent, number)
        return plain

    def together(self, plain: Sequence[Any]) -> list[Any]:
        """The opposite of `apart`."""
        rest, values = list(plain), []
        for kind, extent in zip(self.kinds, self.extents, strict=True):
            value, validity = rest.pop(0), None
            if kind == ONE:
                value, validity = value.select(-1, 0), value.select(-1, 1) != 0
            elif kind == TWO:
                validity = rest.pop(0)
            if extent is not None:
                factors = [Factor(along, as_int8(rest.pop(0) != 0)) for along in extent.known]
                extent = extent_of(factors, extent.is_mask)
            values.append(value if kind == PLAIN else wrap_record(Dense(value, validity, extent)))
        return values

    def count(self) -> int:
        """The number of plain values."""
        factors = sum(len(extent.factors) for extent in self.extents if extent is not None)
        return sum(max(kind, 1) for kind in self.kinds) + factors

    def with_start(self, values: Sequence[Any]) -> Parts:
        """The same parts for values with which a loop starts: a mask that may be none there is no extent's."""
        for number, (extent, value) in enumerate(zip(self.extents, values, strict=True)):
            started = value._extent if isinstance(value, MaskedTensor) else None
            if extent is not None and not (started is not None and started.is_mask):
                self.extents[number] = replace(extent, is_mask=False)
        return self


def _extent_of_any(value: Any) -> Extent | None:
    """The extent of a value, whose samples may be empty in another branch or step."""
    extent = value._extent if isinstance(value, MaskedTensor) else None
    if extent is None:
        return None
    factors = tuple(replace(f, along=along) for f, along in zip(extent.factors, extent.places, strict=True))
    return Extent(factors, extent.is_mask)


def _booleans(value: Any, extent: Extent | None, number: int) -> list[Tensor]:
    """The booleans of a value of which this is known, as numbers; everywhere true for one without an extent."""
    found = value._extent if isinstance(value, MaskedTensor) else None
    if found is None:
        known = () if extent is None else extent.known
        return [
            torch.ones([1 if a is None else s for a, s in zip(along, value.shape, strict=True)], dtype=_number(value))
            for along in known
        ]
    if extent is None or found.places != extent.places:
        raise MaskedSemanticsError(
            f"value {number} of shape {tuple(value.shape)} knows of other padding in one branch, or one step, than in "
            "another. Give it the same in all, masked_dispatch.padded(y, dim=...) or masked_dispatch.align; or treat "
            "padding as missing values, y.without_extent()"
        )
    return [f.there.to(_number(value), copy=True) for f in factors_of(unwrap(value))]


def _number(value: Tensor) -> torch.dtype:
    return value.dtype if value.is_floating_point() else torch.int8


def _kind(value: object) -> int:
    if not isinstance(value, MaskedTensor):
        return PLAIN
    return ONE if value.is_floating_point() else TWO


def _apart(value: Tensor, kind: int) -> list[Tensor]:
    """The data and full validity of a masked tensor, or of a plain one, which is valid everywhere."""
    record = unwrap(value._stored_densely()) if isinstance(value, MaskedTensor) else Dense(value, None)
    filled = fill_where_invalid(record.data, record.validity, 0)
    validity = torch.ones_like(filled, dtype=torch.int8)
    if record.full_validity is not None:
        validity = validity & record.full_validity
    if kind == ONE:
        return [torch.stack((filled, validity.to(filled.dtype)), -1)]
    return [filled.clone(), validity]


class Results:
    """Splits the results of branches or steps in the same way each time."""

    def __init__(self, parts: Parts | None = None) -> None:
        self._parts = parts

    def apart(self, values: object) -> tuple[Any, ...]:
        """Plain values, in the order of the results."""
        values = list(values) if isinstance(values, (tuple, list)) else [values]
        found = Parts(values)
        if self._parts is None:
            self._parts = found
        for number, (wanted, kind) in enumerate(zip(self._parts.kinds, found.kinds, strict=True)):
            extent, known = found.extents[number], self._parts.extents[number]
            if known is not None and not (extent is not None and extent.is_mask):
                self._parts.extents[number] = replace(known, is_mask=False)
            if kind != PLAIN and wanted == PLAIN:
                raise MaskedSemanticsError(
                    f"result {number} is masked in one branch, or one step, and plain in another: make it masked in "
                    "both, masked_dispatch.as_masked_tensor(y), or plain in both, y.to_tensor(fill)"
                )
        return tuple(self._parts.apart(values))

    def together(self, plain: Sequence[Any]) -> tuple[Any, ...]:
        """The results for the caller."""
        assert self._parts is not None
        return tuple(self._parts.together(plain))


def run_cond(
    cond: Callable[..., Any],
    pred: object,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any],
) -> Any:
    """torch.cond with masked operands."""
    if isinstance(pred, MaskedTensor):
        raise MaskedSemanticsError(
            "torch.cond was given a masked predicate, which may be invalid: choose what an invalid one counts as, "
            "pred.to_tensor(False) or pred.to_tensor(True)"
        )
    parts, results = Parts(operands), Results()

    def on_parts(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *plain: results.apart(branch(*parts.together(plain)))

    found = cond(pred, on_parts(true_fn), on_parts(false_fn), tuple(parts.apart(operands)))
    return results.together(found)


def run_scan(
    scan: Callable[..., Any],
    combine_fn: Callable[..., Any],
    init: Sequence[Any],
    xs: Sequence[Any],
    additional: Sequence[Any],
) -> list[Any]:
    """scan with masked operands; a carry is masked from the start if it is masked after a step."""
    for value in (*init, *xs, *additional):
        if isinstance(value, MaskedTensor):
            value._check_no_extent("torch's scan")
    first = list(combine_fn(*init, *(x.select(0, 0) for x in xs), *additional))[: len(init)]
    carried, sliced, constant = Parts(first), Parts(xs), Parts(additional)
    results = Results()

    def step(*plain: Any) -> list[Any]:
        after_init, after_xs = carried.count(), carried.count() + sliced.count()
        arguments = [
            *carried.together(plain[:after_init]),
            *sliced.together(plain[after_init:after_xs]),
            *constant.together(plain[after_xs:]),
        ]
        return list(results.apart(combine_fn(*arguments)))

    found = scan(step, carried.apart(init), sliced.apart(xs), tuple(constant.apart(additional)))
    return list(results.together(found))


def run_while_loop(
    while_loop: Callable[..., Any],
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried: Sequence[Any],
    more: Sequence[Any],
) -> Any:
    """while_loop with masked operands; a carried value is masked from the start if it is masked after a step."""
    constant, carried_parts = Parts(more), Parts(body_fn(*carried, *more)).with_start(carried)
    results = Results(carried_parts)

    def arguments(plain: Sequence[Any]) -> list[Any]:
        number = carried_parts.count()
        return [*carried_parts.together(plain[:number]), *constant.together(plain[number:])]

    def goes_on(*plain: Any) -> Any:
        answer = cond_fn(*arguments(plain))
        if isinstance(answer, MaskedTensor):
            raise MaskedSemanticsError(
                "the condition of a while_loop is masked, and may be invalid: choose what an invalid one counts as, "
                "to_tensor(False) or to_tensor(True)"
            )
        return answer

    def step(*plain: Any) -> tuple[Any, ...]:
        return results.apart(body_fn(*arguments(plain)))

    found = while_loop(goes_on, step, tuple(carried_parts.apart(carried)), tuple(constant.apart(more)))
    return results.together(found)


CONTROL_FLOW: dict[str, Callable[..., Any]] = {"cond": run_cond, "scan": run_scan, "while_loop": run_while_loop}
