"""What is known of a call's results is remembered: a call of the same operator on the same sizes finds it again.

Which dimensions an extent depends on, and whether the mask says it all, is known without reading a tensor. Only the
booleans of results with several factors depend on the operands; they are computed when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.extents import slices
from op_registry.extents.factors import confined, conjunction, said_of, with_extent
from op_registry.extents.follow import Mask, Outcome, for_each, is_all_valid
from op_registry.extents.writes import same_extent
from op_registry.records.dense import Dense, map_tensors
from op_registry.records.extent import NUMBERS, Boolean, Extent, Factor, State, made_of
from op_registry.records.validity import intersect
from op_registry.rule import Rule, Run
from op_registry.sparse.permuted import RECORDS, AnyRecord, Permuted

# Extents of a call's results, with how their masks follow; None for a result without one.
Plan = list["tuple[Extent | None, Mask] | None"]
_plans: dict[Any, Plan] = {}
_ITSELF: Plan = []  # of a call whose result is an operand
_MOST = 8192


def forget_plans() -> None:
    """Forget what is known of calls so far."""
    _plans.clear()


_STATIC = frozenset((int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


class PartOfEach(Dense):
    """A view whose mask hides more than that part of its base's mask: what is no position of a sample's own part."""

    __slots__ = ()


def remembered(
    run: Run,
    rule: Rule,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outcome: Callable[[Run, Rule, OpOverload, Sequence[Any], Mapping[str, Any]], Any],
) -> Any:
    """The results of a call; `outcome` finds them, and their extents, the first time."""
    records: list[AnyRecord] = []
    key = _key((*args, *kwargs.items()), records)
    if key is None:
        return for_each(outcome(run, rule, op, args, kwargs), finished)
    states: tuple[Any, ...] = ()
    same = len(records) > 1 and _have_one_extent(records)
    if same:
        _share_mask(records)
    for record in records:
        if record.extent is not None and record.extent.states:
            states = _key_of_states(records)
            break
    key = (rule, op, key, same, states) if same or states else (rule, op, key)
    plan = _plans.get(key)
    if plan is _ITSELF:
        result = run(*args, **kwargs)
        if any(result is record for record in records):
            return result
        run, plan = (lambda *_, **__: result), None  # (a copy, this time)
    if plan is None:
        return _first(key, records, run, rule, op, args, kwargs, outcome)
    result = run(*args, **kwargs)
    made: dict[Any, Any] = {}
    if isinstance(result, RECORDS):
        return _as_planned(result, plan[0], records, made)
    rest = iter(plan)
    return for_each(result, lambda r: _as_planned(r, next(rest), records, made))


def planned(rule: Rule, op: OpOverload, args: Sequence[Any]) -> tuple[Extent | None, bool] | None:
    """The extent of a call's one result, if that is its mask or it has none, and whether it is valid everywhere; None
    if that is not known yet, or has to be computed.
    """
    records: list[AnyRecord] = []
    key = _key(args, records)
    if any(r.extent is not None and r.extent.states for r in records):
        return None
    plan = None if key is None else _plans.get((rule, op, key))
    if plan is None or len(plan) != 1 or plan[0] is None:
        return None
    extent, mask = plan[0]
    if extent is None:
        return None, mask == "there"
    return (extent, False) if mask == "kept" and extent.is_mask and not extent.says else None


def _key(values: Sequence[Any], records: list[AnyRecord]) -> tuple[Any, ...] | None:
    """What the extents of results depend on; None if that can't be told without values. Collects the records."""
    key: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _STATIC:
            key.append(value)
        elif isinstance(value, RECORDS):
            if isinstance(value, Dense):
                data = value.data
                sizes: Any = data.shape
            else:
                base, order = (value.base, value.order) if isinstance(value, Permuted) else (value, None)
                data, pattern = base.values.data, base.pattern
                sizes = (pattern.sizes, data.shape[pattern.lead :], pattern.layout, order)
            if type(data) not in _PLAIN:
                return None
            records.append(value)
            extent = value.extent
            key += (sizes, data.device, is_all_valid(value) if extent is None else extent.number + 2)
        elif kind is float:
            key.append(float)
        elif kind is list or kind is tuple:
            inner = _key(value, records)
            if inner is None:
                return None
            key.append(inner)
        else:
            return None
    return tuple(key)


def _key_of_states(records: Sequence[AnyRecord]) -> tuple[Any, ...]:
    """What results depend on of operands that are states: which are of one recurrence, and which step is the later."""
    given = [(i, s) for i, r in enumerate(records) if r.extent is not None for s in r.extent.states]
    recurrences = list(dict.fromkeys(s.recurrence for _, s in given))
    numbers = sorted({s.number for _, s in given})
    return tuple(
        (i, s.there.along, s.there.step, s.recurrence and recurrences.index(s.recurrence) + 1, numbers.index(s.number))
        for i, s in given
    )


class Place(Boolean):
    """Stands for the boolean of an operand's factor: `number` has the number of both; of its states, from -1 down.

    said  what it is while a plan is made; a plan that is kept keeps nothing of the call that it was made in
    read  becomes non-empty when it is computed: it makes the call one without a plan
    """

    __slots__ = ("number", "read", "said")

    def __init__(self, said: Tensor | Boolean, number: tuple[int, int], read: list[bool]) -> None:
        self.said: Tensor | Boolean | None = said
        self.number, self.read, self.depth = number, read, 0

    def value(self) -> Tensor:
        self.read.append(True)
        found = self.said.value() if isinstance(self.said, Boolean) else self.said
        assert found is not None
        return found


class _Making:
    """The making of a plan: operands with places for their booleans, and the rule's own results."""

    def __init__(self, records: Sequence[AnyRecord], run: Run) -> None:
        self.run, self.raw = run, None
        same = _have_one_extent(records)
        shared: list[Place] = []
        self.read: list[bool] = []
        self.places: list[Place] = []
        self.numbers: dict[int, tuple[Any, ...]] = {}
        self.originals: dict[int, AnyRecord] = {}
        self.stand_ins: list[AnyRecord] = []
        for i, record in enumerate(records):
            extent = record.extent
            if extent is not None:
                if shared and extent.factors:  # one place: so rules see that they have one extent
                    places = shared
                else:
                    places = [Place(said_of(record, f), (i, j), self.read) for j, f in enumerate(extent.factors)]
                    self.places += places
                    shared = places if same else []
                factors = [replace(f, said=place) for f, place in zip(extent.factors, places, strict=True)]
                states = tuple(self.state(s, (i, -1 - k)) for k, s in enumerate(extent.states))
                extent = replace(extent, factors=tuple(factors), states=states)
            stand_in = with_extent(record, extent)
            self.originals[id(stand_in)] = record
            self.stand_ins.append(stand_in)

    def state(self, state: State, number: tuple[int, int]) -> State:
        """An operand's state, with a place for its boolean; its numbers are looked up when the plan is followed."""
        assert state.there.said is not None
        place = Place(state.there.said, number, self.read)
        self.places.append(place)
        self.numbers.setdefault(state.number, ("number", *number))
        if state.recurrence is not None:
            self.numbers.setdefault(state.recurrence, ("recurrence", *number))
        return state.moved(replace(state.there, said=place))

    def of_operands(self, extent: Extent | None) -> Extent | None:
        """An extent of a result with states whose numbers are those of operands, or made anew by each call."""
        if extent is None or not extent.states:
            return extent

        def place_of(number: int | None) -> Any:
            return None if number is None else self.numbers.get(number, ("made", number))

        states = tuple(State(s.there, place_of(s.recurrence), place_of(s.number)) for s in extent.states)
        return replace(extent, states=states)

    def on_originals(self, *args: Any, **kwargs: Any) -> Any:
        def original(record: AnyRecord) -> AnyRecord:
            return self.originals.get(id(record), record)

        self.raw = self.run(
            *[map_tensors(original, a, RECORDS) for a in args],
            **{k: map_tensors(original, v, RECORDS) for k, v in kwargs.items()},
        )
        return self.raw


def _have_one_extent(records: Sequence[AnyRecord]) -> bool:
    """Whether several records know which of their positions are there, and have the very same extent."""
    given = [r for r in records if r.extent is not None and r.extent.factors]
    return len(given) > 1 and same_extent(given)


def _share_mask(records: Sequence[AnyRecord]) -> None:
    """Give records whose one extent is their mask one object for it: it meets itself for free, and no result that has
    it is narrower than its operands.
    """
    given = [r for r in records if type(r) is Dense and r.extent is not None and r.extent.factors]
    for record in given[1:]:
        if record.extent is not None and not record.extent.says:
            record.validity = given[0].validity


def _first(
    key: Any,
    records: Sequence[AnyRecord],
    run: Run,
    rule: Rule,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outcome: Callable[..., Any],
) -> Any:
    making, warned = _Making(records, run), slices.warned
    stand_ins = iter(making.stand_ins)
    args = [map_tensors(lambda _: next(stand_ins), a, RECORDS) for a in args]
    kwargs = {k: map_tensors(lambda _: next(stand_ins), v, RECORDS) for k, v in kwargs.items()}
    result = outcome(making.on_originals, rule, op, args, kwargs)
    raw, outcomes = _flat(making.raw), _flat(result)
    if any(r is record for r in raw for record in records):
        if len(raw) == 1:
            _plans[key] = _ITSELF
        return making.raw
    quiet = not making.read and slices.warned == warned and len(raw) == len(outcomes)
    if not quiet or not all(_is_of(r, o) and _has_plan(o) for r, o in zip(raw, outcomes, strict=True)):
        return for_each(result, lambda one: finished(_without_places(one, records, {})))
    for place in making.places:
        place.said = None
    if len(_plans) > _MOST:
        _plans.clear()
    plan = [(making.of_operands(o.extent), o.mask) if isinstance(o, Outcome) else None for o in outcomes]
    made: dict[Any, Any] = {}
    _plans[key], planned = plan, iter(plan)
    return for_each(making.raw, lambda r: _as_planned(r, next(planned), records, made))


def _without_places(result: Any, records: Sequence[AnyRecord], made: dict[Any, Any]) -> Any:
    """A result of a call without a plan, with the booleans of operands themselves: a loop would add a place a step."""
    extent = result.extent if isinstance(result, (Outcome, *RECORDS)) else None
    if extent is None or not (extent.says or extent.states):
        return result

    def own(factor: Factor) -> Factor:
        return replace(factor, said=_replayed(factor.said, records, made))

    states = tuple(s.moved(own(s.there)) for s in extent.states)
    extent = replace(extent, factors=tuple(map(own, extent.factors)), states=states)
    if isinstance(result, Outcome):
        return replace(result, extent=extent)
    return (
        type(result)(result.data, result.validity, extent) if isinstance(result, Dense) else with_extent(result, extent)
    )


def _has_plan(outcome: Any) -> bool:
    extent = outcome.extent if isinstance(outcome, Outcome) else None
    factors = () if extent is None else (*extent.factors, *(s.there for s in extent.states))
    return all(_of_operands(f.said) for f in factors)


def _of_operands(said: Tensor | Boolean | None) -> bool:
    """Whether a boolean is computed of operands' alone, and not of a tensor that a call has made."""
    if isinstance(said, Place) or said is None:
        return True
    return isinstance(said, Boolean) and bool(said.of) and all(map(_of_operands, said.of))


def _is_of(raw: Any, outcome: Any) -> bool:
    """Whether a result is the rule's own."""
    return raw is (outcome.record if isinstance(outcome, Outcome) else outcome)


def _flat(result: Any) -> list[Any]:
    if isinstance(result, (list, tuple)):
        return [r for item in result for r in _flat(item)]
    return [result]


def _as_planned(
    result: Any, planned: tuple[Extent | None, Mask] | None, records: Sequence[AnyRecord], made: dict[Any, Any]
) -> Any:
    """A result with the extent that is planned for it; `made` has what the call has made for other results."""
    if planned is None or not isinstance(result, RECORDS) or any(result is record for record in records):
        return result
    extent, mask = planned
    if extent is not None and (extent.says or extent.states):
        factors = tuple(replace(f, said=_replayed(f.said, records, made)) for f in extent.factors)
        states = tuple(_replayed_state(s, records, made) for s in extent.states) if extent.states else ()
        extent = replace(extent, factors=factors, states=states)
    if mask == "kept":
        result.extent = extent
        return result
    return finished(Outcome(result, extent, mask))


def _replayed_state(state: State, records: Sequence[AnyRecord], made: dict[Any, Any]) -> State:
    """A state of a plan, whose numbers are those of operands, or new ones."""

    def number(place: Any) -> Any:
        if place is None:
            return None
        kind, *numbers = place
        if kind == "made":
            if place not in made:
                made[place] = next(NUMBERS)
            return made[place]
        extent = records[numbers[0]].extent
        assert extent is not None
        return getattr(extent.states[-1 - numbers[1]], kind)

    there = replace(state.there, said=_replayed(state.there.said, records, made))
    return State(there, number(state.recurrence), number(state.number))


def _replayed(said: Tensor | Boolean | None, records: Sequence[AnyRecord], made: dict[int, Any]) -> Any:
    """The boolean that was computed of the operands of the first call, of those of this one."""
    if not isinstance(said, Boolean):
        return said
    found = made.get(id(said))
    if found is None:
        if isinstance(said, Place):
            i, j = said.number
            extent = records[i].extent
            assert extent is not None
            found = said_of(records[i], extent.factors[j]) if j >= 0 else extent.states[-1 - j].there.said
        elif not said.of:
            found = said
        else:
            found = Boolean(said.move, tuple([_replayed(b, records, made) for b in said.of]))
        made[id(said)] = found
    return found


def finished(result: Any) -> Any:
    """A result whose validity agrees with its extent."""
    if not isinstance(result, Outcome):
        return result
    record, extent, mask = result.record, result.extent, result.mask
    if extent is None:
        return Dense(record.data) if mask == "there" and isinstance(record, Dense) else with_extent(record, None)
    if mask == "kept":
        return with_extent(record, extent)
    there = conjunction(extent.factors)
    extent = made_of(extent.factors, extent.is_mask, extent.new, extent.states)
    if not isinstance(record, Dense):
        return with_extent(confined(record, there), extent)
    validity = there if mask == "there" else intersect(record.validity, there)
    kind = PartOfEach if mask == "part" else Dense
    return kind(record.data, validity, extent)
