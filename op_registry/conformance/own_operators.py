"""Operators of other libraries: samples come from their rule, or are generated from the schema.

A schema doesn't specify the shapes of tensors. A rule may, by the dimensions that it states; otherwise several are
tried, and each call that plain torch runs is a sample.
If none runs, the operator has no samples, and every law is undecided until the rule provides some (``rule.samples``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.oracles.by_category import dimensions_of
from op_registry.conformance.plain_torch import derivative
from op_registry.conformance.sample import Operator, Sample, start_all_random_numbers, tree_leaves, tree_map
from op_registry.dimensions.equation import Equation
from op_registry.dimensions.labels import Dimensions, tensor_arguments
from op_registry.dimensions.slices import LastDims
from op_registry.registry import registry
from op_registry.rule import Rule, path_in_package
from op_registry.schema import is_inplace, is_out, mutable_forms, written_arguments

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Shape = tuple[int, ...]

# The dtypes to try; OTHERS only if the operator takes no floating point.
FLOATING = (torch.float32, torch.float64)
OTHERS = (torch.complex64, torch.int64, torch.bool)

# Shapes for operators of one tensor, or of several tensors of the same shape.
ONE_SHAPE: tuple[Shape, ...] = ((), (5,), (3, 4), (2, 3, 4), (0, 3))
# Shapes for operators of two tensors: broadcasting, then products.
TWO_SHAPES: tuple[tuple[Shape, Shape], ...] = (
    ((3, 4), (4,)),
    ((2, 3, 4), (3, 1)),
    ((3, 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((3, 4), (5, 4)),
)


def samples_of_rule(rule: Rule, dtype: torch.dtype) -> Iterator[Arguments]:
    """The sample calls that a rule provides."""
    make = functools.partial(torch.testing.make_tensor, dtype=dtype, device="cpu")
    for maker in rule.sample_makers:
        for call in maker(make):
            args, kwargs = call if len(call) == 2 and isinstance(call[1], dict) else (tuple(call), {})
            yield tuple(args), kwargs


class RegisteredOperator(Operator):
    """An overload that has a rule and is not in torch's database.

    Its samples are those of its rule (``rule.samples``), or generated from its schema: floating-point tensors, numbers,
    and 0 and -1 for arguments called ``dim``, in every combination that plain torch runs.
    """

    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self.name = str(op)
        self.dtypes = self._dtypes_that_run() or frozenset(FLOATING)

    @property
    def rule(self) -> Rule | None:
        return registry.get(self.op)

    @property
    def brings_samples(self) -> bool:
        """Whether the rule provides samples."""
        return self.rule is not None and bool(self.rule.sample_makers)

    def samples(self, dtype: torch.dtype) -> list[Sample]:
        start_all_random_numbers()
        rule = self.rule if self.brings_samples else None
        calls = _calls_that_run(self.op, dtype) if rule is None else samples_of_rule(rule, dtype)
        samples = [Sample(self.op, args, kwargs, n, dtype) for n, (args, kwargs) in enumerate(calls)]
        return samples if rule is not None else [*samples, *self._with_ties(samples)]

    def _with_ties(self, samples: list[Sample]) -> list[Sample]:
        """Calls of what has an identity with elements that equal it, or 0: what is filled in must not count."""
        identity = None if self.rule is None else self.rule.traits.identity
        if identity is None:
            return []

        def ties(x: Tensor) -> Tensor:
            value = identity(x.dtype) if callable(identity) else identity
            return torch.where(x.real > 0, value, 0).to(x.dtype) if x.is_floating_point() or x.is_complex() else x

        return [
            dataclasses.replace(
                s, args=args, kwargs=kwargs, number=len(samples) + n, differentiable=False, values="ties"
            )
            for n, s in enumerate(s for s in samples if any(x.ndim > 1 and x.numel() for x in s.tensors))
            for args, kwargs in [s.with_tensors(ties)]
        ]

    def _dtypes_that_run(self) -> frozenset[torch.dtype]:
        def runs(dtype: torch.dtype) -> bool:
            return any(_runs(self.op, s.args, s.kwargs) for s in self.samples(dtype))

        floating = frozenset(filter(runs, FLOATING))
        return floating or frozenset(filter(runs, OTHERS))

    @property
    def module(self) -> str | None:
        """The module in which the rule is registered, for ``--import``; None if it can't be imported."""
        return module_written_in(self.rule.where) if self.rule is not None else None


class OwnForm(RegisteredOperator):
    """The in-place form of such an operator, on a copy of its first tensor, or the out= form, into new tensors."""

    def __init__(self, base: OpOverload, mutable: OpOverload) -> None:
        self.form = "inplace" if is_inplace(mutable) else "out"
        self.mutable = mutable
        # Read from the schema here, because it cannot be read while the samples' function is traced.
        self._targets = written_arguments(mutable)
        super().__init__(base)
        self.name = f"{base}+{self.form}"

    def samples(self, dtype: torch.dtype) -> list[Sample]:
        function = in_place(self.mutable) if self.form == "inplace" else into_out(self._with_out)
        return [
            Sample(function, s.args, s.kwargs, s.number, dtype, differentiable=self._differentiable(s))
            for s in super().samples(dtype)
            if s.args and isinstance(s.args[0], Tensor)
        ]

    def _differentiable(self, sample: Sample) -> bool:
        """Whether the functional form has a derivative. Autograd doesn't notice an in-place form without a formula."""
        return self.form == "inplace" and derivative(sample).order > 0

    def _with_out(self, *args: Any, out: Tensor | Sequence[Tensor] | None = None, **kwargs: Any) -> Any:
        """The functional form, or the out= overload with its targets under their schema names."""
        if out is None:
            return self.op(*args, **kwargs)
        targets = [out] if isinstance(out, Tensor) else list(out)
        return self.mutable(*args, **kwargs, **dict(zip(self._targets, targets, strict=True)))


def forms_of(op: OpOverload) -> list[OwnForm]:
    """The in-place and out= forms that the operator's library has."""
    return [OwnForm(op, mutable) for mutable in mutable_forms(op)]


def module_written_in(where: str) -> str | None:
    """The imported module in whose file a rule is written (``rule.where``: file and line)."""
    path = where.rpartition(":")[0]
    last = path.rpartition("/")[2]  # compared first: every trial asks, of thousands of modules
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and file.endswith(last) and path_in_package(file, name) == path:
            spec = getattr(module, "__spec__", None)
            # A module run by `python -m` is called __main__; its spec has the name by which to import it.
            importable = spec.name if name == "__main__" and spec is not None else name
            return None if importable == "__main__" else importable.removesuffix(".__main__")
    return None


def _runs(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether plain torch runs the call."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            op(*args, **kwargs)
    except Exception:
        return False
    return True


def _calls_that_run(op: OpOverload, dtype: torch.dtype) -> list[Arguments]:
    """Of shapes as stated; of others if torch runs none of those, so that a wrong statement is noticed."""
    required = [a for a in op._schema.arguments if not a.has_default_value()]
    number = sum(str(a.type) in ("Tensor", "List[Tensor]") for a in required)
    for all_shapes in (_shapes_as_stated(op, required), _shapes(number)):
        found = [call for call in _calls_from_schema(op, required, all_shapes, dtype) if _runs(op, *call)]
        if found:
            return found
    return []


def _calls_from_schema(
    op: OpOverload, required: Sequence[torch.Argument], all_shapes: Iterable[tuple[Shape, ...]], dtype: torch.dtype
) -> Iterator[Arguments]:
    """Calls with every required argument, for several shapes of tensors and values of `dim`."""
    dims = dims_of_rule(op)
    for shapes in all_shapes:
        for dim in (0, -1) if dimensions_of(op) else (0,):
            remaining = iter(shapes)
            values = {a.name: _value(op, a, remaining, dim, dtype) for a in _with_dimensions(op, required)}
            if isinstance(dims, LastDims) and isinstance(dims.count, str):
                values[dims.count] = list(shapes[0][-1:])
            if any(value is NotImplemented for value in values.values()):
                return
            keywords = {a.name for a in op._schema.arguments if a.kwarg_only}
            names = [a.name for a in op._schema.arguments if not a.kwarg_only]
            positional = list(itertools.takewhile(values.__contains__, names))
            args = tuple(values[name] for name in positional)
            yield args, {k: v for k, v in values.items() if k in keywords or k not in positional}


def dims_of_rule(op: OpOverload) -> Dimensions | None:
    rule = registry.get(op)
    return None if rule is None else rule.dims


def _shapes_as_stated(op: OpOverload, required: Sequence[torch.Argument]) -> list[tuple[Shape, ...]]:
    """Shapes of the required tensors, from the dimensions that the rule states; none if those say nothing of them."""
    dims, names = dims_of_rule(op), [a.name for a in required]
    tensors = tensor_arguments(op, lists=True)
    if isinstance(dims, LastDims):
        count = dims.count if isinstance(dims.count, int) else 1
        others = sum(name in names for name in tensors) - 1
        return [(shape, *[shape[len(shape) - count :]] * others) for shape in ((2, 3, 4), (3, 3)) if len(shape) > count]
    if not isinstance(dims, Equation):
        return []
    found = []
    for equation, batch in itertools.product(dims.equations, ((), (2,))):
        left, _, right = equation.partition("->")
        terms = left.split(",")
        if len(terms) == len(tensors) and (not batch or "*" in equation):
            result = right.split(",")[0]
            stated = zip(tensors, (result if term == "+" else term for term in terms), strict=True)
            letters = sorted(set(re.findall("[A-Za-z]", equation)))
            sizes = {letter: 3 + n for n, letter in enumerate(letters)} | {"1": 1, "?": 3}  # each has a size of its own
            found.append(tuple(_shape(term, sizes, batch) for name, term in stated if name in names))
    return found


def _shape(term: str, sizes: Mapping[str, int], batch: Shape) -> Shape:
    """The shape of an operand with the dimensions of a term."""
    parts = re.findall(r"\([A-Za-z]+\)|[A-Za-z1*?]", term)
    dims = [batch if p == "*" else (math.prod(sizes[letter] for letter in p.strip("()")),) for p in parts]
    return tuple(size for dim in dims for size in dim)


def _with_dimensions(op: OpOverload, required: Sequence[torch.Argument]) -> list[torch.Argument]:
    """The arguments of a generated call: the required ones, and dimensions even if they have a default."""
    names = {a.name for a in required}
    return [a for a in op._schema.arguments if a.name in names or a.name in dimensions_of(op)]


def _shapes(number: int) -> Iterable[tuple[Shape, ...]]:
    equal_shapes = [(shape,) * number for shape in ONE_SHAPE]
    return [*equal_shapes, *TWO_SHAPES] if number == 2 else equal_shapes


def _value(op: OpOverload, argument: torch.Argument, shapes: Iterator[Shape], dim: int, dtype: torch.dtype) -> Any:
    """A value of the argument's type; NotImplemented for a type without an obvious value."""
    kind, dimension = str(argument.type), argument.name in dimensions_of(op)
    if kind == "Tensor":
        return torch.testing.make_tensor(next(shapes), dtype=dtype, device="cpu")
    if kind == "List[Tensor]":
        shape = next(shapes)
        return [torch.testing.make_tensor(shape, dtype=dtype, device="cpu") for _ in range(2)]
    if kind in ("int", "SymInt", "Optional[int]", "Optional[SymInt]") and (dimension or not kind.startswith("Opt")):
        return dim if dimension else 1
    if "List[int]" in kind or "List[SymInt]" in kind:
        return [dim] if dimension else None if kind.startswith("Optional") else [1]
    if kind.startswith("Optional"):
        return None
    return {"float": 0.5, "number": 0.5, "Scalar": 0.5, "bool": False}.get(kind, NotImplemented)


# ----------------------------------------------------------------------------------------------------------------------
# Turn in-place and out= forms into functions of their inputs, so that samples of the functional form serve them.


def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on a copy of its first argument.

    It must return that copy, or None as operators defined by torch.library.custom_op do.
    """

    @functools.wraps(function)
    def on_a_copy(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = x.clone()
        result = function(copy, *args, **kwargs)
        assert result is copy or result is None, "an in-place operator returns its argument"
        return copy

    return on_a_copy


def into_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with newly allocated out= tensors, which it must return."""

    def into_out(*args: Any, **kwargs: Any) -> Any:
        functional_result = function(*args, **kwargs)
        targets = tree_map(lambda t: torch.empty_like(t) if isinstance(t, Tensor) else t, functional_result)
        result = function(*args, **kwargs, out=targets if isinstance(targets, Tensor) else tuple(targets))
        if result is None:
            return targets
        for returned, target in zip(tree_leaves(result), tree_leaves(targets), strict=True):
            assert returned is target, "an out= form returns the tensors given as out="
        return result

    return into_out


def written_by(form: OpOverload, functional: OpOverload, named: Mapping[str, Any]) -> Any:
    """What an in-place form leaves in a copy of its first argument, or an out= form in new tensors.

    named  the arguments of the functional form
    """
    given = {a.name: named[a.name] for a in form._schema.arguments if a.name in named}
    written = written_arguments(form)
    if not is_out(form):
        copy = given[written[0]].clone()
        form(**given | {written[0]: copy})
        return copy
    made = tree_leaves(functional(**named))
    targets = [t.new_empty(t.shape) for t in made]
    lists = any(a.name in written and isinstance(a.type, torch.ListType) for a in form._schema.arguments)
    form(**given, **({written[0]: targets} if lists else dict(zip(written, targets, strict=True))))
    return targets
