"""P8: closed or refused. A call with invalid elements gives masked results, or raises an error naming the operator."""

from __future__ import annotations

from collections.abc import Sequence

from torch._ops import OpOverload

from op_registry.conformance.compare import bit_difference
from op_registry.conformance.oracles.call import Expected, NoOracle, Refused
from op_registry.conformance.trees import tree_leaves
from op_registry.conformance.trial import Broken, NotAsked, Trial
from op_registry.conformance.watching import calls_of
from op_registry.errors import MaskedSemanticsError
from op_registry.resolve import resolve
from op_registry.rule import packet_name


def closed_or_refused(trial: Trial) -> None:
    """P8: never a silent plain result. P2 tests whether the mask is right."""
    if not trial.partial:
        raise NotAsked("nothing is invalid")
    try:
        results = trial.outcome()
    except MaskedSemanticsError as error:
        _names_the_operator(str(error), trial)
        return
    # An empty tensor has no mask to lose; torch's kernels return empty tensors for results that they don't compute.
    plain = [n for n, v in enumerate(results) if isinstance(v, tuple) and v[1] is None and v[0].numel()]
    lost = [n for n in _expected_masked(trial, plain) if _depends_on_masked_operands(trial, n)] if plain else []
    if lost:
        raise Broken(f"result {lost[0]}: a plain tensor, although an operand is masked")


def _names_the_operator(message: str, trial: Trial) -> None:
    """Broken if the error message does not name the operator."""
    if isinstance(trial.sample.fn, OpOverload):
        name = packet_name(trial.sample.fn).rpartition("::")[2]
        if name not in message:
            raise Broken(f"the refusal does not name {name}: {message[:160]}")


def _expected_masked(trial: Trial, plain: Sequence[int]) -> list[int]:
    """Which of the `plain` results should be masked, according to the rules and, if there is one, the oracle."""
    rules = [resolve(op).rule for op in _overloads(trial)]
    plain = [n for n in plain if not any(rule is not None and rule.is_plain(n) for rule in rules)]
    try:
        want = trial.expected()
    except (Refused, NoOracle):
        return list(plain)
    return [n for n in plain if n >= len(want) or isinstance(want[n], Expected)]


def _depends_on_masked_operands(trial: Trial, result: int) -> bool:
    """Whether plain torch's result changes with the masked operands. If it doesn't, it is rightly plain."""
    try:
        with_other_values = tree_leaves(trial.on_other_values(masked_only=True).plain())[result]
    except Exception:
        # Whether plain torch raises depends on these values, and so does the result.
        return True
    original = tree_leaves(trial.plain())[result]
    return bool(bit_difference(with_other_values, original)) or with_other_values.dtype is not original.dtype


def _overloads(trial: Trial) -> Sequence[OpOverload]:
    sample = trial.sample
    return [sample.fn] if isinstance(sample.fn, OpOverload) else calls_of(sample.fn, *sample.args, **sample.kwargs)
