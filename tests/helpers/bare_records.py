"""Bare records for tests of rules: made of plain values, given to a rule, and shown as plain values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from op_registry import registry
from op_registry.authoring import Dense
from op_registry.records.validity import as_bool, as_int8


def apply(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The rule for `op` on records."""
    rule = registry.get(op)
    assert rule is not None, f"{op} has no rule"
    return rule.bind(op)(*args, **kwargs)


def plain(values: Any) -> Dense:
    """A record of `values` without a mask."""
    return Dense(values if isinstance(values, Tensor) else torch.tensor(values))


def masked(values: Any, mask: Any, **options: Any) -> Dense:
    """A record of `values`, valid where `mask` is true."""
    data = values if isinstance(values, Tensor) else torch.tensor(values, **options)
    return Dense(data, as_int8(torch.tensor(mask, dtype=torch.bool)))


def valid_of(record: Dense) -> Tensor:
    """The mask of a record in full, checking on the way that it is one."""
    if record.validity is None:
        return torch.ones(record.shape, dtype=torch.bool)
    assert record.validity.ndim <= record.ndim
    assert record.validity.dtype in (torch.int8, torch.bool)
    return as_bool(record.validity).expand(record.shape)


def seen(record: Dense) -> tuple[Tensor, Tensor]:
    """The mask of a record in full, and its values with zeros under the mask."""
    valid = valid_of(record)
    return valid, torch.where(valid, record.data, torch.zeros_like(record.data))


def shown(record: Dense, invalid: Any = "--") -> Any:
    """The values of a record as a flat list, with `invalid` in place of what is invalid."""
    values, kept = record.data.flatten().tolist(), valid_of(record).flatten().tolist()
    return [v if k else invalid for v, k in zip(values, kept, strict=True)]


def shows(record: Dense, expected: Any) -> None:
    """The record has the expected values, None standing for invalid."""

    def read(data: Any, valid: Any) -> Any:
        if isinstance(data, list):
            return [read(d, v) for d, v in zip(data, valid, strict=True)]
        return data if valid else None

    assert read(record.data.tolist(), valid_of(record).tolist()) == expected
