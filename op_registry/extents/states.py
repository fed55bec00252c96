"""Carried states: the steps of recurrences, of which tensors are the states.

The state of a sample lives on past its end, valid and there. A tensor that is computed from a state knows which step
of which recurrence it is the state of. That hides nothing, until states of one recurrence at different steps are
stacked along a new dimension, or written one by one into a buffer: they are there at the steps that a sample has.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from op_registry.bound import Bound
from op_registry.dimensions.labels import Dimension, Elementwise, Labels, atoms
from op_registry.dimensions.sizes import known_to_hold
from op_registry.errors import MaskedSemanticsError
from op_registry.extents import indices
from op_registry.extents.factors import any_along, confined, factors_of, where_all
from op_registry.extents.follow import (
    Outcome,
    any_stored,
    carried_to,
    for_each_result,
    only_padded,
    records_of,
    sizes_of,
    with_factors,
)
from op_registry.extents.found import layout_of
from op_registry.extents.meetings import combined, laid_out, met
from op_registry.laws.categories import ASSIGNMENT
from op_registry.records.dense import Dense
from op_registry.records.extent import (
    NUMBERS,
    SAMPLES,
    SCATTERED,
    Along,
    Boolean,
    Extent,
    Factor,
    State,
    numbers_samples,
)
from op_registry.records.validity import as_int8
from op_registry.rule import Run
from op_registry.sparse.permuted import RECORDS, AnyRecord
from op_registry.sparse.record import NotLowered


def states_of(record: AnyRecord) -> tuple[State, ...]:
    """The steps of which a record is the state, or computed from it."""
    return () if record.extent is None else record.extent.states


def any_states(records: Iterable[AnyRecord]) -> bool:
    """Whether one of these records is the state of a recurrence, or computed from one."""
    return any(states_of(record) for record in records)


def with_states(result: Any, found: Sequence[State]) -> Any:
    """A result of a call that is the state of these steps."""
    if not found:
        return result
    if isinstance(result, Outcome):
        whole = result.mask == "there" or _is_whole(result.record)
        extent = Extent((), whole) if result.extent is None else result.extent
        return replace(result, extent=replace(extent, states=tuple(found)))
    extent = result.extent or Extent((), _is_whole(result))
    return Outcome(result, replace(extent, states=tuple(found)))


def _is_whole(record: AnyRecord) -> bool:
    return getattr(record, "validity", False) is None


# ---------------------------------------------------------------------------------------------------------- other calls


def kept(call: Bound, labels: Labels, result: Any) -> Any:
    """The results of a call, which are states of the steps that its operands are states of."""
    sizes, records = sizes_of(call, labels), records_of(call)
    if call.rule.category is ASSIGNMENT and isinstance(call.rule.dims, Elementwise):
        records.pop(next(iter(records)))  # all of it is written

    def of_result(record: Any, dims: Sequence[Dimension]) -> Any:
        inner = record.record if isinstance(record, Outcome) else record
        if not isinstance(inner, RECORDS) or any(inner is r for r in records_of(call).values()):
            return record
        found = [
            state.moved(there)
            for name, operand in records.items()
            for state in states_of(operand)
            for there in _in_result(call, labels, name, state.there, dims, sizes, inner)
        ]
        return with_states(record, merged(found))

    return for_each_result(result, labels.results, of_result)


def _in_result(
    call: Bound, labels: Labels, name: str, there: Factor, dims: Sequence[Dimension], sizes: Any, result: AnyRecord
) -> list[Factor]:
    """The factor of a state in a result: as carried, and where samples are moved by an operator, moved so, too."""
    record = call.tensors[name]
    acts = {d: labels.role_of(labels.operands[name][d]) for d in there.depends}
    if {"window", "front"} & {*acts.values()}:  # a window of steps, or what was sorted of them, is none of them
        return []
    # (along positions, flip and roll act within each sample)
    roles = {role for d, role in acts.items() if not record.extent.numbers(d)}
    writes = call.rule.category is ASSIGNMENT or call.rule.category.name == "accumulation"
    if not roles & {"moved", "indexed"} or (writes and name == next(iter(call.tensors))):
        return carried_state(there, labels.operands[name], dims, sizes, record, result)
    first = next(iter(call.tensors))
    if name != first or not isinstance(record, Dense) or len(labels.results) > 1:
        return []
    return [indices.read(call, first, there, labels)]


def carried_state(
    there: Factor,
    operand: Sequence[Dimension],
    dims: Sequence[Dimension],
    sizes: Any,
    record: AnyRecord,
    result: AnyRecord,
) -> list[Factor]:
    """The factor of a state in a result, if the result has all dimensions that it depends on."""
    gone = [d for d in there.depends if not set(atoms(operand[d])) <= {a for r in dims for a in atoms(r)}]
    return [] if gone else carried_to([there], operand, dims, sizes, record, result)


def merged(found: Sequence[State]) -> list[State]:
    """The latest step of each recurrence: what is computed from a state and from an earlier one is of its step."""
    result: list[State] = []
    for state in found:
        n = next((n for n, s in enumerate(result) if s.recurrence == state.recurrence and _same_dims(s, state)), None)
        if n is None:
            result.append(state)
        elif state.number > result[n].number:
            result[n] = state
    return result


def _same_dims(a: State, b: State) -> bool:
    return a.there.depends == b.there.depends


# ---------------------------------------------------------------------------------------------------------------- joins


def stacked(
    parts: Sequence[tuple[Sequence[State], int]], dim: int, is_new: bool, name: str
) -> tuple[list[Factor], list[State]]:
    """The factors of a join of states, and the states that the result still is: parts have the result's dimensions."""
    found: list[Factor] = []
    kept: list[State] = []
    for recurrence in dict.fromkeys(s.recurrence for steps, _ in parts for s in steps):
        mine = [[s for s in steps if s.recurrence == recurrence] for steps, _ in parts]
        given = [s for steps in mine for s in steps]
        sizes = [size for _, size in parts]
        of_one_step = not is_new or sum(map(bool, mine)) < 2 or len({s.number for s in given}) == 1
        if any(numbers_samples(s.there.along[dim]) for s in given):  # of samples, joined again
            kept.append(_laid(mine, sizes, dim, SAMPLES))
        elif of_one_step and any(s.there.along[dim] is not None for s in given):  # of steps, joined again
            kept.append(_laid(mine, sizes, dim, SCATTERED))
        elif of_one_step:
            kept += merged(given)
        elif recurrence is None:
            raise MaskedSemanticsError(
                f"{name}: states that compiled regions have returned are stacked, and it is not known outside of these "
                "whether they are steps of one recurrence. Compile the whole loop; or say what is there of a stack, "
                "torch.stack([h.without_extent() for h in states], 1).mask_with(there)."
            )
        else:
            factor, state = _at_steps(_laid(mine, sizes, dim, SCATTERED), dim)
            found.append(factor)
            kept.append(state)
    return found, kept


def _laid(mine: Sequence[Sequence[State]], sizes: Sequence[int], dim: int, along: Along) -> State:
    """Steps of one recurrence, each at its indices of a dimension, of which `along` is known then."""
    given = [s for steps in mine for s in steps]
    booleans = [where_all([s.there for s in steps]) if steps else None for steps in mine]
    there = laid_out(list(zip(booleans, sizes, strict=True)), dim, given[0].there.there)
    known = _known([s.there for s in given])
    return State(Factor((*known[:dim], along, *known[dim + 1 :]), there), given[0].recurrence, next(NUMBERS))


def _at_steps(state: State, dim: int) -> tuple[Factor, State]:
    """Where states are there that are steps of one recurrence along `dim`.

    If they say the same they are of one step (as two states that `where` holds are): all are there, and remain states.
    """
    steps = state.there.there
    same = as_int8((steps == steps.narrow(dim, 0, 1)).all())
    there = steps | same
    factor = Factor(state.there.along, there).knowing(dim, layout_of(there, dim))
    return factor, state.moved(replace(state.there, said=steps | (1 - same)))


# -------------------------------------------------------------------------------------------------- what makes a state


def of_cell(call: Bound, labels: Labels, run: Run) -> Any:
    """A cell: its state lives on where its input is not there, or is itself a state past its end."""
    records, sizes = records_of(call), sizes_of(call, labels)
    first, record = next(iter(call.tensors.items()))
    old = {name: r for name, r in records.items() if name.startswith("hx")}
    if states_of(record):
        call = call.with_(**{first: confined(record, where_all([s.there for s in states_of(record)]))})
    results = call.applied(run)
    recurrence, number = _recurrence(old.values()), next(NUMBERS)

    def of_result(new: Any, dims: Sequence[Dimension]) -> Any:
        def moved(name: str, factors: Sequence[Factor]) -> list[Factor]:
            return carried_to(factors, labels.operands[name], dims, sizes, records[name], new)

        factors = [moved(name, factors_of(r)) for name, r in old.items()]
        factors.append(moved(first, [f for f in factors_of(record) if f.positions]))
        outcome = with_factors(new, combined(factors, call.rule.name), only_padded(old), whole=True)
        of_samples = [f for f in factors_of(record) if not f.positions]
        steps = moved(first, [*of_samples, *[s.there for s in states_of(record)]])
        return with_states(outcome, [State(_all_of(steps), recurrence, number)] if steps else [])

    return for_each_result(results, labels.results, of_result)


def of_choice(found: Sequence[State], dropped: Sequence[Factor]) -> list[State]:
    """The states of a choice between branches, of which `found` are states and `dropped` say which samples are there.

    A state that is held where a step is not there lives on, as that of a cell does.
    """
    if not dropped:
        return merged(found)
    recurrence = found[0].recurrence if found else next(NUMBERS)
    others = [s for s in found if s.recurrence != recurrence]
    return [*merged(others), State(_all_of(dropped), recurrence, next(NUMBERS))]


def _recurrence(records: Iterable[AnyRecord]) -> int | None:
    """That of the first state, or a new one."""
    found = [s.recurrence for record in records for s in states_of(record)]
    return found[0] if found else next(NUMBERS)


def _all_of(factors: Sequence[Factor]) -> Factor:
    """Where all of these factors are, which have as many dimensions."""
    said = factors[0].said
    for factor in factors[1:]:
        if factor.said is not said:
            said = Boolean(torch.bitwise_and, (said, factor.said))  # type: ignore[arg-type]
    return Factor(_known(factors), said, any(f.step for f in factors))


def _known(factors: Sequence[Factor]) -> tuple[Along, ...]:
    """What is known of each dimension where all of these factors are."""
    knowns = zip(*[f.along for f in factors], strict=True)
    return tuple(functools.reduce(met, [k for k in each if k is not None]) if any(each) else None for each in knowns)


# -------------------------------------------------------------------------------------------------------------- choices


def chosen(call: Bound, labels: Labels, run: Run) -> Any:
    """`where`: along positions as elementwise; whether the sample is there follows the branch that is chosen."""
    records = records_of(call)
    sizes = sizes_of(call, labels)
    (dims,) = labels.results
    result = call.applied(run)

    def factors(name: str) -> list[Factor]:
        record = records[name]
        return carried_to(factors_of(record), labels.operands[name], dims, sizes, record, result)

    condition, *branches = (factors(name) if name in records else [] for name in call.tensors)
    of_sample = [[f for f in each if not f.positions] for each in branches]
    found = [
        s.moved(there)
        for name, record in records.items()
        for s in states_of(record)
        for there in carried_state(s.there, labels.operands[name], dims, sizes, record, result)
    ]
    kept = of_choice(found, [f for each in of_sample for f in each])
    if not any(of_sample):
        outcome = with_factors(result, combined([condition, *branches], call.rule.name), only_padded(records))
        return with_states(outcome, kept)
    if any_stored(call):
        raise NotLowered("whether a sample is there follows the branch that it chooses, on dense storage")
    of_positions = [[f for f in each if f.positions] for each in branches]
    chosen = [*combined([condition, *of_positions], call.rule.name), _of_chosen(call, of_sample, result)]
    return with_states(with_factors(result, chosen, padded=False), kept)


def _of_chosen(call: Bound, of_sample: Sequence[Sequence[Factor]], result: Dense) -> Factor:
    """Whether each sample is there: where some element is chosen from a branch in which it is."""
    condition = next(iter(call.tensors.values()))
    test = condition.filled(False) if isinstance(condition, Dense) else condition
    ones = torch.ones([1] * result.ndim, dtype=torch.int8, device=result.device)
    first, second = [where_all(each) if each else ones for each in of_sample]
    there = torch.where(test, first, second)
    given = [f for each in of_sample for f in each]
    depends = {d for f in given for d in f.depends}
    there = there.expand(result.shape) if there.ndim < result.ndim else there
    others = [d for d in range(result.ndim) if d not in depends and not known_to_hold(there.shape[d] == 1)]
    there = any_along(there, others)
    along = tuple(SAMPLES if d in depends else None for d in range(result.ndim))
    return Factor(along, there, not depends and any(f.step for f in given))
