"""How an operator runs on sparse records.

A rule has at most one lowering for each kind of sparse record: its own (``rule.lowering``), else its category's. A
lowering is called as ``(op, *args, **kwargs)`` with records in place of tensors, even if the rule's dense run does not
take the overload. Alternatives are listed in the order in which to try them, ``first_of(a, b, c)``.

A lowering raises NotLowered, with the reason, for a call that it does not handle. The caller may then store the
operands densely and call again.

The calls that a lowering takes are stated in front of its body. A lowering refuses a call for one of a few reasons: an
operand is stored in another way, or has elements nowhere, or operands differ in dtype or in their number of dimensions,
or nothing may be read while tracing. They are stated by the names of arguments, and the text of the refusal follows::

    @on_call(sparse="self", one_dtype="self, values", eager=True)
    def index_put(c): ...

A *plan* is what of a lowering follows from a call's operator, the ranks and storages of its tensors, and its numbers:
which rows a rule runs on, which dimensions a product contracts. It is worked out in the first of such calls, and kept
for the next ones, which only do it. What depends on sizes, dtypes or elements belongs to the run, not to the plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn, TypeVar, overload

import torch
from torch._ops import OpOverload

from op_registry.autocast import autocast_on
from op_registry.bound import Bound
from op_registry.dimensions.labels import Labels
from op_registry.dimensions.sizes import known_to_hold
from op_registry.errors import MaskedSemanticsError
from op_registry.records.arguments import shape_alone
from op_registry.records.dense import Dense, map_tensors
from op_registry.records.tracing import being_traced
from op_registry.rule import Rule, name_rule
from op_registry.sparse.permuted import RECORDS, Permuted, sparse_dims_first
from op_registry.sparse.record import NotLowered, Sparse


def run_sparsely(op: OpOverload, rule: Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a rule on arguments with a sparse record among them; NotLowered, with all reasons, if no lowering can."""
    if not _any_permuted((*args, *kwargs.values()) if kwargs else args):
        lowering = lowering_of(rule, Sparse)
        if lowering is None:
            raise NotLowered(rule.category.why_dense)
        return run_lowering(lowering, rule, op, args, kwargs)
    reason = "dense dimensions stand before sparse ones"
    lowering = lowering_of(rule, Permuted)
    if lowering is not None:
        try:
            return run_lowering(lowering, rule, op, args, kwargs)
        except NotLowered as refusal:
            reason = str(refusal)
    lowering = lowering_of(rule, Sparse)
    if lowering is None:
        raise NotLowered(reason)
    try:
        args, named = map_tensors(sparse_dims_first, (list(args), list(kwargs.items())), Permuted)
    except NotLowered:
        raise NotLowered(reason) from None
    return run_lowering(lowering, rule, op, args, dict(named))


def run_lowering(lowering: Lowering, rule: Rule, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one lowering of a rule; NotLowered, with all reasons, if none of its alternatives can."""
    c: Bound | None = None  # the call, which alternatives share; it is bound for those that take it
    reasons = []
    ways = ways_of(lowering)
    for way in ways:
        try:
            if not isinstance(way, OnCall):
                return way(op, *args, **kwargs)
            c = c or Bound.of(rule, op, args, kwargs)
            return way(c)
        except NotLowered as reason:  # noqa: PERF203
            if len(ways) == 1:
                raise
            reasons.append(str(reason))
        except MaskedSemanticsError:
            raise
        except Exception as error:
            name_rule(error, rule, op)
            raise
    raise NotLowered("; ".join(dict.fromkeys(reasons)))


def _any_permuted(values: Sequence[Any]) -> bool:
    return any(type(v) is Permuted or (type(v) in (list, tuple) and Permuted in map(type, v)) for v in values)


def lowering_of(rule: Rule, record: type) -> Lowering | None:
    """The lowering of a rule for a kind of sparse record: its own, else its category's, else None."""
    own: Lowering | None = rule.lowerings.get(record)
    shared: Lowering | None = rule.category.lowerings.get(record)
    return own or (None if rule.dims is None and _reads_dims(shared) else shared)


def _reads_dims(lowering: Lowering | None) -> bool:
    if isinstance(lowering, FirstOf):
        return all(_reads_dims(alternative) for alternative in lowering.alternatives)
    return isinstance(lowering, OnCall) and lowering.of_dims


def alternatives(rule: Rule, record: type) -> tuple[Callable[..., Any], ...]:
    """The functions that may run a rule on a kind of sparse record, in the order in which they are tried."""

    ways = ways_of(lowering_of(rule, record))
    return tuple(way.run if isinstance(way, OnCall) else way for way in ways)


# ------------------------------------------------------------------------------------------ calls that a lowering takes


@dataclass(frozen=True)
class Takes:
    """What has to hold of a call. Arguments are named in one string, "self, weight"; those that are None always fit.

    sparse        stored sparsely, with dense dimensions last; of a list, each
    dense         stored densely; of a list, each
    packed        packed batches of sequences, whose dimensions may be shown in another order
    no_dense_dims if stored sparsely, without dense dimensions
    one_dtype     operands of one dtype
    one_ndim      operands of one number of dimensions
    floats        operands of float32 or float64, outside of autocast: the operator computes in their own dtype
    only          values that arguments must have: the operator's other variants run densely
    eager         whether sizes depend on numbers, which are not known while tracing
    elements      operands that need an element, or True for each; torch's results for none are computed densely
    """

    sparse: str = ""
    dense: str = ""
    packed: str = ""
    no_dense_dims: str = ""
    one_dtype: str = ""
    one_ndim: str = ""
    floats: str = ""
    only: tuple[tuple[str, Any], ...] = ()
    eager: bool = False
    elements: bool | str = False

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments that the conditions name."""
        stated = [getattr(self, field.name) for field in fields(self)]
        return (*[name for value in stated if isinstance(value, str) for name in listed(value)], *dict(self.only))

    def misfit(self, c: Bound) -> str | None:
        """Why the call is not taken, as a clause; None if it is."""
        for check, stated in self._stated:
            for reason in check(c, stated):
                return reason
        return None

    @functools.cached_property
    def _stated(self) -> list[tuple[Callable[[Bound, Any], Iterator[str]], Any]]:
        """The conditions that are stated, each with the names of its arguments, or with its value."""
        given = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(_CHECKS[name], listed(value) if isinstance(value, str) else value) for name, value in given if value]


def listed(names: str) -> list[str]:
    """The names in a condition."""
    return names.replace(",", " ").split()


# Each yields why a call does not meet a condition: stated of arguments, or of the call.


def _sparse(c: Bound, names: list[str]) -> Iterator[str]:
    for name in names:
        for record in _each(c.named.get(name)):
            if isinstance(record, Dense):
                yield f"`{name}` is stored densely"
            elif isinstance(record, Permuted):
                yield f"`{name}` has dense dimensions before sparse ones"


def _dense(c: Bound, names: list[str]) -> Iterator[str]:
    for name in names:
        if not all(isinstance(record, Dense) for record in _each(c.named.get(name))):
            yield f"`{name}` is stored sparsely"


def _packed(c: Bound, names: list[str]) -> Iterator[str]:
    for name in names:
        for record in _each(c.named.get(name)):
            base = record.base if isinstance(record, Permuted) else record
            if isinstance(base, Dense) or not base.pattern.layout.of_sequences:
                yield f"`{name}` is no packed batch"


def _no_dense_dims(c: Bound, names: list[str]) -> Iterator[str]:
    for name in names:
        if any(isinstance(record, Sparse) and record.dense_sizes for record in _each(c.named.get(name))):
            yield f"`{name}` has dense dimensions"


def _differ(what: str, of: Callable[[Any], Any]) -> Callable[[Bound, list[str]], Iterator[str]]:
    def check(c: Bound, names: list[str]) -> Iterator[str]:
        found = {name: of(x) for name in names if (x := c.named.get(name)) is not None}
        if len(set(found.values())) > 1:
            values = " and ".join(f"`{name}` has {value}" for name, value in found.items())
            yield f"its operands have different {what}: {values}"

    return check


def _floats(c: Bound, names: list[str]) -> Iterator[str]:
    for name in names:
        x = c.named.get(name)
        if x is not None and (x.dtype not in (torch.float32, torch.float64) or autocast_on(x.device)):
            yield f"it computes `{name}`, of {x.dtype}, in another dtype"


def _only(c: Bound, values: tuple[tuple[str, Any], ...]) -> Iterator[str]:
    for name, value in values:
        if name in c and c[name] is not value and c[name] != value:
            yield f"{name}={c[name]!r}, and only {name}={value!r} is written for sparse storage"


def _eager(c: Bound, stated: bool) -> Iterator[str]:
    for record in _each(list(c.named.values())):
        if being_traced(_stored(record)):
            yield "its result has as many elements as the numbers say, which are unknown while tracing"


def _elements(c: Bound, stated: bool | list[str]) -> Iterator[str]:
    for record in _each([c.named.get(name) for name in (c.named if stated is True else stated or ())]):
        stored = record.base if isinstance(record, Permuted) else record
        if known_to_hold(math.prod(stored.shape) == 0):
            yield f"an operand of shape {tuple(record.shape)} has no elements"


_CHECKS: dict[str, Callable[[Bound, Any], Iterator[str]]] = {
    "sparse": _sparse,
    "dense": _dense,
    "packed": _packed,
    "no_dense_dims": _no_dense_dims,
    "one_dtype": _differ("dtypes", lambda x: x.dtype),
    "one_ndim": _differ("numbers of dimensions", lambda x: x.ndim),
    "floats": _floats,
    "only": _only,
    "eager": _eager,
    "elements": _elements,
}


ANY_CALL = Takes()


def raise_error_of_torch(c: Bound) -> None:
    """Raises torch's error for operands of these shapes: the operator runs on tensors without memory.

    They hold bytes, since torch refuses a strided tensor of 2**63 bytes; integers keep their dtype, for indices.
    """

    def alone(record: Any) -> torch.Tensor:
        floats = record.dtype.is_floating_point or record.dtype.is_complex
        return shape_alone(record.shape).to(torch.uint8 if floats else record.dtype)

    c.map(alone, RECORDS).applied(c.op)


def _each(value: Any) -> list[Any]:
    """The records in an argument: none, one, or those of a list."""
    if isinstance(value, RECORDS):
        return [value]
    return [record for item in value for record in _each(item)] if isinstance(value, (list, tuple)) else []


def _stored(record: Any) -> torch.Tensor:
    base = record.base if isinstance(record, Permuted) else record
    return base.values.data if isinstance(base, Sparse) else base.data


# ------------------------------------------------------------------------------------------------------------ lowerings


@dataclass(frozen=True)
class OnCall:
    """A lowering that gets the bound call in place of the overload and its arguments, and which calls it takes.

    of_dims  whether it is for rules that state their dimensions, and serves a category's others not at all
    """

    run: Callable[[Bound], Any]
    takes: Takes = ANY_CALL
    of_dims: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments that `takes` names."""
        return self.takes.names

    def __call__(self, c: Bound) -> Any:
        """The result; NotLowered for a call that it does not take."""
        misfit = None if self.takes is ANY_CALL else self.takes.misfit(c)
        if misfit is not None:
            raise NotLowered(misfit)
        return self.run(c)


@dataclass(frozen=True)
class FirstOf:
    """Alternatives; the first one that handles a call runs it."""

    alternatives: tuple[Any, ...]


Lowering = Callable[..., Any] | OnCall | FirstOf


@overload
def on_call(run: Callable[[Bound], Any]) -> OnCall: ...
@overload
def on_call(**takes: Any) -> Callable[[Callable[[Bound], Any]], OnCall]: ...
def on_call(run: Callable[[Bound], Any] | None = None, **takes: Any) -> Any:
    """Decorator: a lowering that is a function of the bound call, ``def layer_norm(c): ... c.weight ...``.

    Keyword arguments state the calls that it takes (:class:`Takes`): ``on_call(sparse="self", dense="weight")``.
    """
    return functools.partial(OnCall, takes=Takes(**takes)) if run is None else OnCall(run)


def first_of(*alternatives: Lowering) -> FirstOf:
    """One lowering made of several, tried in this order."""
    return FirstOf(tuple(way for alternative in alternatives for way in ways_of(alternative)))


def ways_of(lowering: Lowering | None) -> tuple[Any, ...]:
    """The lowerings that are tried, in order: those of a list of alternatives, or the lowering itself."""
    if lowering is None:
        return ()
    return lowering.alternatives if isinstance(lowering, FirstOf) else (lowering,)


def never(reason: str) -> Callable[..., NoReturn]:
    """A lowering that refuses every call, for rules that their category's lowering would run incorrectly."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotLowered(reason)

    return refuse


# ---------------------------------------------------------------------------------------------------------------- plans

Plan = TypeVar("Plan")

_PLANS: dict[Hashable, Any] = {}
_MOST = 4096


def planned(make: Callable[[Bound, Labels | None], Plan]) -> Callable[[Bound], Plan]:
    """Decorator: the plan of a call, which `make` works out once, with the labels of the call. A NotLowered that it
    raises is raised each time.

    A plan is not kept if the labels of dimensions depend on sizes, as those of views do.
    """

    def plan_of(c: Bound) -> Plan:
        try:
            c.form = c.form or tuple([_form(value) for value in c.named.values()])
            key = (make, c.rule, c.op, c.form)
            plan: Any = _PLANS.get(key)
        except TypeError:  # a number that is not known while tracing
            plan = key = None
        if plan is None:
            read: list[str] = []
            try:
                plan = make(c, c.map(lambda tensor: _Rank(tensor, read), RECORDS).labels)
            except NotLowered as refusal:
                plan = str(refusal)
            if key is not None and not read:
                if len(_PLANS) >= _MOST:
                    _PLANS.clear()
                _PLANS[key] = plan
        if type(plan) is str:
            raise NotLowered(plan)
        return plan

    return plan_of


class _Rank:
    """A tensor for labels of dimensions; what they read of it besides the rank is noted."""

    def __init__(self, tensor: Any, read: list[str]) -> None:
        self.ndim, self._tensor, self._read = tensor.ndim, tensor, read

    def __getattr__(self, name: str) -> Any:
        self._read.append(name)
        return getattr(self._tensor, name)


def _form(value: Any) -> Hashable:
    """What a plan may depend on: of a record, its ranks and its order of dimensions. TypeError for symbolic numbers."""
    kind = type(value)
    if kind is Dense:
        return _DENSE[value.data.ndim]
    if kind is Sparse:
        return kind, value.values.data.ndim, value.pattern.lead, len(value.pattern.sizes)
    if kind is Permuted:
        return kind, value.order, _form(value.base)
    if kind in _SYMBOLIC:
        raise TypeError(f"{value} is symbolic")
    return tuple(map(_form, value)) if kind in (list, tuple) else value


_DENSE = tuple((Dense, rank) for rank in range(65))  # torch's tensors have at most 64 dimensions
_SYMBOLIC = frozenset((torch.SymInt, torch.SymFloat, torch.SymBool))
