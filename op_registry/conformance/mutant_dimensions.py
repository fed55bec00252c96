"""Ways of being wrong about dimensions, as rules state them, and about the extents that follow from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from op_registry.bound import Bound
from op_registry.conformance.mutant_ways import restating
from op_registry.conformance.trials import Settings, run_operator
from op_registry.dimensions.labels import Label, Labels, Role, atoms
from op_registry.extents import follow, indices, joins, run, samples, slices
from op_registry.extents.remembered import forget_plans
from op_registry.ops.windows import padding
from op_registry.records.dense import Dense
from op_registry.records.extent import Factor, extent_of
from op_registry.rule import Run

# Roles of labels whose indices are not independent.
MIXING = ("contracted", "reduced", "each", "scanned", "window")
EXCHANGED: Mapping[str, Role] = {"each": "reduced", "reduced": "each", "contracted": "each"}


@restating("states a wrong axis")
def wrong_axis(right: Labels, tensors: Mapping[str, Any]) -> Labels | None:
    """The first operand's dimensions are stated in another order."""
    name, dims = next(iter(right.operands.items()))
    roles = [right.roles.get(dim) if not isinstance(dim, tuple) else None for dim in dims]
    large = [n for n, size in enumerate(tensors[name].shape) if size > 1]
    kept = {a for result in right.results for dim in result for a in atoms(dim)}
    for n in large:
        for m in large:
            told_apart = roles[n] != roles[m] or (roles[n] is None and dims[n] in kept)
            if n < m and told_apart and dims[n] != dims[m]:
                other = [*dims]
                other[n], other[m] = dims[m], dims[n]
                return replace(right, operands={**right.operands, name: tuple(other)})
    return None


@restating("states a contracted dimension as batch")
def contracted_as_batch(right: Labels, tensors: Mapping[str, Any]) -> Labels | None:
    """The first label along which the operator mixes is stated batch."""
    label = next((a for a in _large(right, tensors) if right.roles.get(a) in MIXING), None)
    return None if label is None else replace(right, roles={a: r for a, r in right.roles.items() if a != label})


@restating("states a batch dimension as contracted")
def batch_as_contracted(right: Labels, tensors: Mapping[str, Any]) -> Labels | None:
    """The first batch label is stated as if results depended on the whole slice along it."""
    label = next((a for a in _large(right, tensors) if a not in right.roles), None)
    return None if label is None else replace(right, roles={**right.roles, label: "each"})


@restating("leaves an operand out of its dimensions")
def operand_left_out(right: Labels, tensors: Mapping[str, Any]) -> Labels | None:
    """The last operand is stated to have no dimensions."""
    last = list(right.operands)[-1]
    return replace(right, operands={**right.operands, last: ()}) if right.operands[last] else None


@restating("exchanges each and reduced")
def each_and_reduced_exchanged(right: Labels, tensors: Mapping[str, Any]) -> Labels | None:
    """What gives one result for each element of a slice is stated to give one for all of them, and the reverse."""
    exchanged = {a: EXCHANGED[role] for a in _large(right, tensors) if (role := right.roles.get(a, "")) in EXCHANGED}
    return replace(right, roles={**right.roles, **exchanged}) if exchanged else None


def _large(labels: Labels, tensors: Mapping[str, Any]) -> list[Label]:
    """The labels of operands' dimensions that have more than one index."""
    found = [
        dim
        for name, dims in labels.operands.items()
        for dim, size in zip(dims, tensors[name].shape, strict=True)
        if size > 1 and not isinstance(dim, tuple)
    ]
    return [label for label in dict.fromkeys(found) if label is not None]


# ----------------------------------------------------------------------------------------------------------------------
# Ways of being wrong about extents: a function of op_registry.extents is exchanged, and P9 has to notice.

# Each way names the operators on whose ragged batches it shows. The rules are right throughout; what is wrong is where
# the positions of their results are said to be.

# What a way makes of the right function.
Wrong = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class WrongExtents:
    """A way: the function ``module.function`` is exchanged for what `wrong` makes of it.

    entries  entries of the database whose calls show it
    """

    name: str
    module: Any = field(repr=False)
    function: str
    wrong: Wrong = field(repr=False)
    entries: tuple[str, ...]

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within the block, the function is wrong; nothing is remembered of calls before and in it."""
        right = getattr(self.module, self.function)
        setattr(self.module, self.function, self.wrong(right))
        forget_plans()
        try:
            yield
        finally:
            setattr(self.module, self.function, right)
            forget_plans()


def noticed(wrong: WrongExtents, seed: int = 0, subject: str | None = None) -> list[str]:
    """What P9 says about the operators of a way while it is installed; nothing if it does not notice."""
    settings = Settings(subject=subject, laws=("P9",), most=4, seed=seed, until_broken=True)
    with wrong.installed():
        reports = [run_operator(entry, settings) for entry in wrong.entries]
    return [outcome.message for report in reports for outcome in report.failures]


def table(subject: str | None = None) -> tuple[str, bool]:
    """Each way with the first trial that notices it, and whether every way is noticed."""
    lines, every = [], True
    for name, wrong in WAYS.items():
        said = noticed(wrong, subject=subject)
        every &= bool(said)
        lines.append(f"{'noticed' if said else 'SURVIVED':8s}  {name}{f': {said[0]}' if said else ''}")
    return "\n".join(lines), every


WAYS: dict[str, WrongExtents] = {}


def _way(name: str, module: Any, function: str, *entries: str) -> Callable[[Wrong], Wrong]:
    """Decorator: registers a way of being wrong."""

    def register(wrong: Wrong) -> Wrong:
        WAYS[name] = WrongExtents(name, module, function, wrong, entries)
        return wrong

    return register


# ------------------------------------------------------------------------------------------------------ of any operator


@_way("an extent is dropped", follow, "with_factors", "mul", "nn_functional_linear")
def dropped(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda record, *args, **kwargs: record


@_way("the mask is not intersected with the extent", follow, "with_factors", "triu", "linalg_cross")
def not_intersected(right: Callable[..., Any]) -> Callable[..., Any]:
    def with_factors(record: Dense, factors: Any, *args: Any, **kwargs: Any) -> Dense:
        return Dense(record.data, record.validity, extent_of(factors, is_mask=False))

    return with_factors


@_way("missing values count as padding", follow, "only_padded", "mul", "cumsum")
def missing_as_padding(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda records: True


@_way("positions counted from the other end", follow, "carried_to", "mul", "softmax")
def in_another_order(right: Callable[..., Any]) -> Callable[..., Any]:
    def carried(*args: Any) -> list[Any]:
        return [None if f is None or f.said is None else _backwards(f) for f in right(*args)]

    return carried


def _backwards(factor: Factor) -> Factor:
    """A factor whose positions count from the other end."""
    return Factor(factor.along, factor.there.flip(factor.positions))


# ------------------------------------------------------------------------------------------------------ joins and views


@_way("the parts of a join are in another order", joins, "laid_out", "cat", "vstack")
def joined_backwards(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda parts, dim, like: right(parts[::-1], dim, like).flip(dim)


@_way("a slice counts from the start", slices, "_taken", "narrow", "split", "tensor_split")
def from_the_start(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda there, dim, part: there.narrow(dim, 0, right(there, dim, part).shape[dim])


@_way("windows read beyond a sample's end", samples, "windowed", "nn_functional_conv1d", "nn_functional_max_pool1d")
@_way("flips the batch", samples, "moved", "flip")
@_way("sorts to the front of the batch, not of the extent", samples, "sorted_to_the_front", "sort")
def as_any_other(right: Callable[..., Any]) -> Callable[..., Any]:
    def follower(call: Bound, labels: Labels, run: Run) -> Any:
        return follow.followed(call, labels, call.applied(run))

    return follower


@_way("windows that unfold reach into padding", samples, "in_whole_windows", "unfold")
def all_windows(right: Callable[..., Any]) -> Callable[..., Any]:
    def follower(call: Bound, labels: Labels, run: Run) -> Any:
        outcome = right(call, labels, run)
        factors = tuple(f.moved_by(torch.ones_like) for f in outcome.extent.factors)
        return replace(outcome, extent=replace(outcome.extent, factors=factors), mask="kept")

    return follower


# -------------------------------------------------------------------------------------------------- within each sample


@_way("a sample is the whole batch", padding, "crop_of_extent", "nn_functional_conv1d", "nn_functional_avg_pool1d")
def uncropped(right: Callable[..., Any]) -> Callable[..., Any]:
    def crop(x: Dense, dim: int, size: int) -> Any:
        return right(Dense(x.data), dim, size)

    return crop


@_way("samples are not brought to the front", samples, "compacted", "nn_functional_avg_pool1d", "nn_functional_conv1d")
def not_compacted(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda record, dim: record


@_way("the triangle of the batch", run, "is_prefix", "tril", "triu")
def of_the_batch(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda along: True


@_way("is_causal counts in the batch", run, "_same", "nn_functional_scaled_dot_product_attention")
def any_layout(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda operands: True


@_way("an integral over one position is nothing", run, "unite", "trapezoid")
def no_integral(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda validity, few: validity


@_way("a source writes from where it is not", indices, "_from_what_is_there", "index_copy", "scatter")
def written_from_padding(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda call, first, name, result: result
