"""Traits: what a category's run, a lowering or a fast path needs to know about an operator, as a frozen value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from op_registry.dimensions.labels import Dimensions


@dataclass(frozen=True)
class Traits:
    """The traits of a rule; those that no one states have the values here.

    The docstrings of the categories' runs (laws/categories.py, laws/whole_slices.py) say what each run makes of its
    own; and of any rule:

    dims        which dimensions the operator works on (dimensions.py): lowerings to sparse storage, the fast path for
                rows and oracles follow from it
    identity    of a reduction or a scan: what takes the place of invalid elements; a function of the dtype, or a number
    divided     whether a reduction is the sum of elements filled with its identity, divided by their number
    plain       the indices of results that are plain tensors
    sparse_factors  whether it is a product that torch also has for plain torch.sparse tensors, which other rules get
                stored densely
    data_sizes  whether it computes tensors in between whose sizes depend on data
    exact_out   whether its out= form takes an `out` of the result's shape only
    unchanged   of a rule that is a function of records: a function of the arguments behind the first, with their
                defaults, that says whether torch returns the first argument itself
    """

    derivative: str = "general"
    neutral: bool | int | float | complex = 1
    keeps_zero: bool = False
    traps: bool | str = False
    writes: bool = False
    identity: Any = None
    mixed_derivative: bool = False
    divided: bool = False
    reason: str = ""
    instead: str = ""
    replacement: Any = None
    dims: Dimensions | None = None
    plain: tuple[int, ...] = ()
    sparse_factors: bool = False
    data_sizes: bool = False
    exact_out: bool = False
    unchanged: Callable[..., bool] | None = None

    def __post_init__(self) -> None:
        for name, value in self.stated().items():
            fits, what = KINDS[name]
            if not fits(value):
                raise TypeError(f"{name}={value!r} is not {what}")

    def stated(self) -> Mapping[str, Any]:
        """The traits that differ from the values here, by name."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in values.items() if value is not default}


NO_TRAITS = Traits()


def _one_of(*values: Any) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: any(value is v or (type(value) is str and value == v) for v in values)), (
        f"one of {', '.join(map(repr, values))}"
    )


def _of_type(what: str, *types: type) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: isinstance(value, types)), what


_NUMBER = (bool, int, float, complex)
_TEXT = _of_type("a clause of the error's text", str)
_FLAG = _of_type("True or False", bool)
# What a trait's value has to be, and that in words.
KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "derivative": _one_of("linear", "bilinear", "general"),
    "neutral": _of_type("a number", *_NUMBER),
    "keeps_zero": _FLAG,
    "traps": _one_of(True, False, "integers", "complex"),
    "writes": _FLAG,
    "identity": (lambda value: isinstance(value, _NUMBER) or callable(value), "a number, or a function of the dtype"),
    "mixed_derivative": _FLAG,
    "divided": _FLAG,
    "reason": _TEXT,
    "instead": _TEXT,
    "replacement": (lambda value: isinstance(value, _NUMBER) or callable(value), "a number, or a function of the data"),
    "dims": _of_type(
        "a value of op_registry.authoring: Slices(...), Equation(...), LastDims(...), Elementwise()", Dimensions
    ),
    "plain": (
        lambda value: isinstance(value, tuple) and all(type(n) is int for n in value),
        "a tuple of indices of results",
    ),
    "sparse_factors": _FLAG,
    "data_sizes": _FLAG,
    "exact_out": _FLAG,
    "unchanged": (callable, "a function of the arguments behind the first"),
}
# What every rule may state, whatever its category.
OF_ANY_RULE = ("dims", "plain", "sparse_factors", "data_sizes", "exact_out")
# What a rule that is a function may state: most of it is read by fast paths.
OF_A_FUNCTION = ("identity", "divided", "reason", "unchanged", *OF_ANY_RULE)
