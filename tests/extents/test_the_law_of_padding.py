"""P9 as conformance asks it: what a ragged batch is made of, what is claimed of it, and which mutants it notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from op_registry.bound import Bound
from op_registry.conformance import mutant_dimensions as mutant_extents
from op_registry.conformance.laws.ragged import DRAWS, NoBatch, Ragged, axes_of, widened
from op_registry.conformance.subject import records
from op_registry.conformance.trials import Settings, run_operator
from op_registry.conformance.verdict import answer_of
from op_registry.registry import registry

aten = torch.ops.aten
P9 = Settings(laws=("P9",), most=1)


def call_of(op: Any, *args: Any, **kwargs: Any) -> Bound:
    rule = registry.get(op)
    assert rule is not None
    return Bound.of(rule, op, args, kwargs)


def ragged(op: Any, *args: Any, draw: int = 0) -> Ragged:
    call = call_of(op, *args)
    assert call.labels is not None
    return Ragged(call.rule, op, call, call.labels, axes_of(call, call.labels)[0], DRAWS[draw], seed=0)


def test_a_batch_has_the_samples_and_garbage_between_them() -> None:
    x = torch.arange(1.0, 13).reshape(3, 4)
    batch = ragged(aten.cumsum.default, x, 1)
    assert sorted(batch.lengths) == [1, 1, 4] or min(batch.lengths) == 1
    (operand,) = batch.batch("nan").values()
    for n, length in enumerate(batch.lengths):
        assert torch.equal(operand[n, :length], x[n, :length])
        assert bool(operand[n, length:].isnan().all())
        assert torch.equal(batch.cut("self", operand, n)[0], x[n, :length])


@pytest.mark.parametrize("draw", range(len(DRAWS)), ids=lambda n: str(DRAWS[n]).replace(" ", "_"))
def test_samples_lie_where_the_padding_leaves_them(draw: int) -> None:
    batch = ragged(aten.cumsum.default, torch.ones(4, 5), 1, draw=draw)
    assert min(batch.lengths) == DRAWS[draw].least
    assert max(batch.lengths) == 5
    assert torch.equal(batch.there.sum(1), torch.tensor(batch.lengths))
    for there, length in zip(batch.there, batch.lengths, strict=True):
        ends = {"right": (bool(there[0]), False), "left": (False, bool(there[-1])), "centre": (False, False)}
        if 0 < length < 4:
            assert (bool(there[0]), bool(there[-1])) == ends[DRAWS[draw].side]


def test_every_role_is_padded_once() -> None:
    call = call_of(aten.bmm.default, torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    assert call.labels is not None
    assert {(a.role, a.samples) for a in axes_of(call, call.labels)} >= {("batch", "b"), ("contracted", "b")}


def test_sizes_are_a_samples_own() -> None:
    batch = ragged(aten.layer_norm.default, torch.ones(3, 4), [4], None, None)
    n = batch.lengths.index(1)
    assert batch.named({"input": torch.ones(1, 1)}, n).named["normalized_shape"] == [1]


def test_one_sample_becomes_several() -> None:
    call = call_of(aten.cumsum.default, torch.ones(1, 4), 1)
    assert call.labels is not None
    assert widened(call, call.labels).tensors["self"].shape == (3, 4)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((torch.ones(4), 0), "no dimension of more than one index is batch for it"),
        ((torch.ones(4, 1), 1), "no operand has another dimension of more than one index beside one that is batch"),
    ],
)
def test_what_is_no_batch_says_why(args: tuple[Any, ...], why: str) -> None:
    call = call_of(aten.cumsum.default, *args)
    assert call.labels is not None
    with pytest.raises(NoBatch) as error:
        axes_of(call, call.labels)
    assert str(error.value) == why


@pytest.mark.parametrize(
    ("entry", "decision", "reason"),
    [
        ("nn_functional_linear", "holds", ""),
        ("linalg_inv", "holds", "refused"),
        ("block_diag", "does not apply", "nothing is stated: each operand has rows and columns of its own"),
        ("dot", "does not apply", "no dimension of more than one index is batch for it"),
    ],
)
def test_the_answer(entry: str, decision: str, reason: str) -> None:
    answer = answer_of(run_operator(entry, P9), "P9")
    assert answer.decision == decision, str(answer)
    assert reason in answer.reason


def test_in_place_and_out_forms_are_asked() -> None:
    assert {"aten.cumsum_.default", "aten.cumsum.out"} <= set(run_operator("cumsum", P9).rules)


def test_the_ways_to_hold_an_extent_are_compared() -> None:
    settings = Settings(subject="misbehaving_subjects:forgets_own_extents", laws=("P9",), most=4)
    messages = [failure.message for failure in run_operator("cumsum", settings).failures]
    assert any("with an extent of its own: " in message for message in messages), messages


def test_a_subject_without_extents_is_not_asked() -> None:
    answer = answer_of(run_operator("exp", Settings(subject="records", laws=("P9",), most=1)), "P9")
    assert "P9" not in records.laws
    assert (answer.decision, answer.reason) == ("does not apply", "the subject 'records' does not support it")


@pytest.mark.parametrize("name", mutant_extents.WAYS)
def test_wrong_extents_are_noticed(name: str) -> None:
    assert mutant_extents.noticed(mutant_extents.WAYS[name])
