"""P8: closed or refused. A call with something invalid gives masked results, or raises and names the operator."""

from __future__ import annotations

from collections.abc import Sequence

from torch._ops import OpOverload

from op_registry.conformance.compare import bit_difference
from op_registry.conformance.oracles import Expected, NoOracle, Refused
from op_registry.conformance.samples import calls_made
from op_registry.conformance.trees import tree_leaves
from op_registry.conformance.trial import Broken, NotAsked, Trial
from op_registry.errors import MaskedSemanticsError
from op_registry.resolve import resolve
from op_registry.rule import packet_name


def closed_or_refused(trial: Trial) -> None:
    """P8: never a silent plain result. P2 tests whether the mask is the right one."""
    if not trial.partial:
        raise NotAsked("nothing is invalid")
    try:
        got = trial.outcome()
    except MaskedSemanticsError as error:
        _names_the_operator(str(error), trial)
        return
    # A tensor without elements has no mask to lose; torch's kernels return such for results that they do not compute.
    plain = [n for n, v in enumerate(got) if isinstance(v, tuple) and v[1] is None and v[0].numel()]
    due = [n for n in _masked_results(trial, plain) if _depends_on_masked_operands(trial, n)] if plain else []
    if due:
        raise Broken(f"result {due[0]}: a plain tensor, although an operand is masked")


def _names_the_operator(message: str, trial: Trial) -> None:
    """A useful refusal names the operator."""
    if isinstance(trial.sample.fn, OpOverload):
        name = packet_name(trial.sample.fn).rpartition("::")[2]
        if name not in message:
            raise Broken(f"the refusal does not name {name}: {message[:160]}")


def _masked_results(trial: Trial, plain: Sequence[int]) -> list[int]:
    """Those of the `plain` results that have to be masked: as the rules say, and the oracle where there is one."""
    rules = [resolve(op).rule for op in _overloads(trial)]
    plain = [n for n in plain if not any(rule is not None and rule.is_plain(n) for rule in rules)]
    try:
        want = trial.expected()
    except (Refused, NoOracle):
        return list(plain)
    return [n for n in plain if n >= len(want) or isinstance(want[n], Expected)]


def _depends_on_masked_operands(trial: Trial, result: int) -> bool:
    """Whether other values of the masked operands give plain torch another result: of plain ones alone it is plain."""
    try:
        found = tree_leaves(trial.on_other_values(masked_only=True).plain())[result]
    except Exception:
        # Whether plain torch runs the call depends on these values, so its result does too.
        return True
    mine = tree_leaves(trial.plain())[result]
    return bool(bit_difference(found, mine)) or found.dtype is not mine.dtype


def _overloads(trial: Trial) -> Sequence[OpOverload]:
    return [trial.sample.fn] if isinstance(trial.sample.fn, OpOverload) else calls_made(trial.sample)
