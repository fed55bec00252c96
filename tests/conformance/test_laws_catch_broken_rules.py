"""Test the testers: each law is given rules and subjects that are broken on purpose, and has to complain.

What is broken here is no way of a mutant (tests/thorough/conformance/test_mutants.py), or shows each law by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, broadcast_shapes

from masked_dispatch.autograd.reached import Call
from masked_dispatch.conformance_subject import Eager
from op_registry import check, registry
from op_registry.authoring import (
    COMPOSITE,
    REDUCTION,
    Dense,
    Equation,
    Slices,
    contraction,
    masked_rule,
    over_slices,
)
from op_registry.conformance import mutants
from op_registry.conformance.compare import difference
from op_registry.conformance.law import outcome_of
from op_registry.conformance.laws import LAWS
from op_registry.conformance.laws.values import compress
from op_registry.conformance.masks import masking
from op_registry.conformance.mutant_ways import WAYS
from op_registry.conformance.sample import Sample
from op_registry.conformance.samples import operator_named
from op_registry.conformance.subject import Records, Subject, records, zeros
from op_registry.conformance.trials import Settings, run_operator, trials_of
from op_registry.conformance.variations import with_other_numbers
from op_registry.conformance.verdict import answer_of
from op_registry.sparse.coordinates import gather
from op_registry.sparse.record import NotLowered, Sparse

aten = torch.ops.aten
EAGER = "masked_dispatch.conformance_subject:eager"


def complaints(law: str, entry: str, subject: Subject = records, **settings: Any) -> list[str]:
    """What a law has to say about an operator, under the rules that hold now."""
    found = []
    chosen = Settings(laws=(law,), most=3, **settings)
    for description, trial in trials_of(operator_named(entry), law, subject, chosen):
        check = LAWS[law].check
        assert check is not None
        status, message = outcome_of(check, trial)
        if status in ("broken", "error"):
            found.append(f"{description}: {message}")
    return found


@pytest.fixture
def replace() -> Iterator[Callable[[Any, Callable[..., Any]], None]]:
    with registry.overlay() as mine:
        yield lambda op, function: mine.replace(op, function)


def exp_in_another_way(x: Dense) -> Dense:
    """Not the same to the last bit."""
    return x.like(torch.expm1(x.data) + 1)


def test_p1_asks_for_every_bit(replace: Any) -> None:
    assert complaints("P1", "exp") == []
    replace(aten.exp.default, exp_in_another_way)
    assert any("values differ" in line for line in complaints("P1", "exp"))


class ExpOfUnevenCalls:
    """Right to rounding, but every third call has another last bit; it may also depend on what is hidden."""

    def __init__(self, leak: float) -> None:
        self.leak = leak
        self.calls = 0

    def __call__(self, x: Dense) -> Dense:
        self.calls += 1
        uneven = 1 + torch.finfo(x.data.dtype).eps * (self.calls % 3 == 0)
        return x.like(torch.exp(x.data) * uneven * (1 + self.leak * float(x.data.isnan().any())))


def exp_with_a_trace_of_garbage(x: Dense) -> Dense:
    """The last bit tells whether there is a NaN, each time the same."""
    return x.like(torch.exp(x.data) * (1 + torch.finfo(x.data.dtype).eps * float(x.data.isnan().any())))


def test_bits_that_differ_between_equal_calls_are_no_leak(replace: Any) -> None:
    replace(aten.exp.default, ExpOfUnevenCalls(leak=0))
    assert complaints("P3", "exp") == []


@pytest.mark.parametrize("leaks", [ExpOfUnevenCalls(leak=0.01), exp_with_a_trace_of_garbage])
def test_a_leak_shows_among_uneven_calls_and_in_the_last_bit(leaks: Any, replace: Any) -> None:
    replace(aten.exp.default, leaks)
    assert any("with nan under the mask: result 0: " in line for line in complaints("P3", "exp"))


def test_the_last_bit_of_an_operand_may_decide() -> None:
    """A softmax of numbers near 200 in bfloat16, where neighbours lie 1 apart: it decides in some of these trials."""
    settings = Settings(laws=("P2",), most=6, masks=("one_hole",), dtypes="bfloat16")
    subject = operator_named("nn_functional_multi_head_attention_forward")
    decided = 0
    for _, trial in trials_of(subject, "P2", records, settings):
        got, want = trial.outcome()[0], trial.expected()[0]
        decided += bool(difference(got[0], want.data, want.mask, magnitude=trial.magnitude, coarsest=trial.rounding))
        assert outcome_of(compress, trial)[0] == "pass"
    if not decided:
        pytest.skip("in no sample of this torch do numbers lie so near that their last bits decide")


def exp_off_by_a_tenth(x: Dense) -> Dense:
    return x.like(torch.exp(x.data) * 1.1)


def test_other_last_bits_do_not_explain_a_tenth(replace: Any) -> None:
    assert complaints("P2", "exp", dtypes="bfloat16") == []
    replace(aten.exp.default, exp_off_by_a_tenth)
    assert any("result 0" in line for line in complaints("P2", "exp", dtypes="bfloat16"))


# ------------------------------------------------------------------------------------------- on storage of other kinds


@pytest.mark.parametrize(
    "law, storage, way, says",
    [
        ("P4", "bsr", "hidden NaN leaks", "stored as bsr: result 0: "),
        ("P3", "csr", "hidden NaN leaks", "stored as csr with "),
        ("P4", "bsr", "mask lost", "stored as bsr: result 0: mask "),
        ("P3", "coo", "mask lost", "stored as coo with "),
        ("P4", "csr", "gradient doubled", "stored as csr: gradient 0: "),
        ("P5", "csr", "gradient doubled", "stored as csr: gradient 0: "),
        ("P5", "hybrid", "second derivative cut", "stored as hybrid: only one of this storage and dense storage "),
        ("P4", "bsr", "refuses what is partly valid", "stored as bsr: MaskedSemanticsError: "),
    ],
)
def test_a_broken_lowering_is_caught(law: str, storage: str, way: str, says: str) -> None:
    settings = Settings(subject=EAGER, laws=(law,), most=3, storages=(storage,), also_stored=(storage,))
    assert run_operator("exp", settings).failures == []
    rule = registry.get(aten.exp.default)
    assert rule is not None
    with mutants.installed(rule, WAYS[way], sparse=True):
        found = [o.message for o in run_operator("exp", settings).failures]
    assert any(message.startswith(says) for message in found), found[:3] or "nothing was said"


def test_a_partner_stored_densely_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def mul_by_all(op: Any, x: Any, other: Any) -> Any:
        """Takes the other operand's mask for granted, where it is stored densely."""
        if isinstance(x, Sparse) and isinstance(other, Dense) and broadcast_shapes(x.shape, other.shape) == x.shape:
            theirs = other.data.expand(x.shape).contiguous()
            return x.like(x.values.like(x.values.data * gather(theirs, x.pattern.coordinates())))
        raise NotLowered("not this one")

    settings = Settings(subject=EAGER, laws=("P4",), most=3, storages=("csr", "csr_first"))
    rule = registry.get(aten.mul.Tensor)
    assert rule is not None
    monkeypatch.setitem(rule.lowerings, Sparse, mul_by_all)
    found = [o.message.partition(":")[0] for o in run_operator("mul", settings).failures]
    assert set(found) == {"stored as csr_first"}


def test_a_leak_where_no_derivative_is_asked_for_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fast path of reductions, in which nothing is filled; calls with derivatives don't take it."""
    from masked_dispatch.dispatch import fast_paths

    right = fast_paths.kept_steps
    monkeypatch.setattr(fast_paths, "kept_steps", lambda *args: (None, None, *right(*args)[2:]))
    for entry in ("sum", "mean"):
        settings = Settings(subject=EAGER, laws=("P3",), most=3, masks=("half",))
        found = [o.message for o in run_operator(entry, settings).failures]
        assert any(m.startswith("without a derivative, with nan under the mask: result 0: ") for m in found), found


def test_an_invalid_value_that_overwrites_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from op_registry.ops.indexing import sparse

    right = sparse.written

    def skips_what_is_invalid(x: Sparse, flat: Dense, coordinates: Any, accumulate: bool) -> Any:
        if flat.valid is None or accumulate:
            return right(x, flat, coordinates, accumulate)
        kept = flat.valid.nonzero()[:, 0]
        return right(x, flat.take_rows(kept), tuple(c[kept] for c in coordinates), accumulate)

    settings = Settings(subject=EAGER, laws=("P4",), most=4, storages=("csr",), masks=("half_values",))
    assert run_operator("index_put", settings).failures == []
    monkeypatch.setattr(sparse, "written", skips_what_is_invalid)
    found = run_operator("index_put", settings).failures
    assert any(o.message.startswith("stored as csr: result 0: mask ") for o in found), found


def test_p4_leaves_operands_plain() -> None:
    for entry, kinds in (("mul", {"half", "half_first", "half_others"}), ("index_put", {"half_values"})):
        trials = trials_of(operator_named(entry), "P4", records, Settings(), True)
        assert kinds <= {description.split()[3] for description, _ in trials}


# -------------------------------------------------------------------------------------- what is kept, what is refused


def test_numbers_are_changed_where_that_changes_no_shape() -> None:
    def changed(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = with_other_numbers(Sample(fn, args, kwargs, 0, torch.float32))
        return found.args[1:], found.kwargs

    x = torch.ones(2, 3)
    assert changed(torch.add, x, x, alpha=2) == ((x,), {"alpha": 3})
    assert changed(aten.sum.dim_IntList, x, [1], True) == (([1], True), {})
    assert changed(torch.nn.functional.dropout, x, 0.5, True) == ((0.25, True), {})
    assert changed(aten.native_batch_norm.default, x, None, None, None, None, True, 0.5, 1e-5)[0][4:] == (
        True,
        0.25,
        5e-6,
    )
    # A step changes the shape, a start does not.
    assert changed(torch.arange, 0.0, 4.0, 2.0)[0] == (4.0, 2.0)


def test_masks_of_one_shape_tell_tensors_apart() -> None:
    for shape in ((3, 4), (2, 5), (5, 5)):
        for seed in range(20):
            made = masking("half", [torch.ones(shape)] * 2, seed)
            assert made is not None
            a, b = made.masks
            assert all(part.any() for part in (a & b, a & ~b, ~a & b))


# ---------------------------------------------------------------------------------------------------------- gradients


class OtherGradients(Records):
    """Gives gradients that are made into something else."""

    def __init__(self, made: Callable[[Any], Any]) -> None:
        self.made = made

    def gradients(self, scalar: Tensor, inputs: Sequence[Any], create_graph: bool = False) -> list[Any]:
        return [self.made(g) for g in super().gradients(scalar, inputs, create_graph)]


OF_THE_WRONG_KIND: dict[str, Callable[[Any], Any]] = {
    "a masked gradient for a plain tensor": lambda g: Dense(g, None) if isinstance(g, Tensor) else g,
    "a plain gradient for a masked tensor": lambda g: g.data if isinstance(g, Dense) else g,
    "mask": lambda g: Dense(g.data, None) if isinstance(g, Dense) else g,  # valid everywhere
}


@pytest.mark.parametrize("says", OF_THE_WRONG_KIND)
def test_gradients_of_the_wrong_kind_are_caught(says: str) -> None:
    found = complaints("P5", "mul", OtherGradients(OF_THE_WRONG_KIND[says]))
    assert any(says in line for line in found), found[:3] or "nothing was said"


class CopiesViews(Eager):
    """MaskedTensor, except that what should be views are copies."""

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = super().call(fn, *args, **kwargs)
        return result.clone() if result is not args[0] else result


def test_a_view_that_copies_is_caught() -> None:
    assert complaints("P6", "permute", Eager()) == []
    found = complaints("P6", "permute", CopiesViews())
    assert any("in the base, mask" in line for line in found), found[:3] or "nothing was said"


def test_zero_filling_is_no_masked_tensor() -> None:
    """Plain torch on zeros obeys P3, and next to nothing else."""
    assert complaints("P3", "mean", zeros) == []
    assert complaints("P2", "mean", zeros) != []
    assert complaints("P5", "mean", zeros) != []


# ------------------------------------------------------------------------------------ what comes back when it is masked


@pytest.mark.parametrize(
    ("entry", "stored"),
    [("exp", {}), ("nn_functional_linear", {}), ("mul", {"also_stored": ("csr",), "dense": False})],
)
def test_what_comes_back_through_results_that_are_left_out_is_caught(
    entry: str, stored: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Call, "needs", lambda *_: False)
    answer = answer_of(run_operator(entry, Settings(laws=("later",), most=2, **stored)), "later")
    assert answer.decision == "broken"
    failure = answer.failures[0]
    assert "gradient 0: " in failure.message
    assert failure.message.endswith("comes back through results that are all invalid")
    assert f"check --op {entry} --law later --sample" in failure.repro
    assert failure.repro.endswith("--storage csr") == bool(stored)


@pytest.mark.parametrize(
    ("entry", "subject", "decision", "why"),
    [
        ("argmax", EAGER, "does not apply", "it has no derivative"),
        ("exp", "records", "undecided", "does not support it"),
    ],
)
def test_where_nothing_can_come_back(entry: str, subject: str, decision: str, why: str) -> None:
    answer = answer_of(run_operator(entry, Settings(laws=("later",), most=2, subject=subject)), "later")
    assert answer.decision == decision
    assert why in answer.reason


# ---------------------------------------------------------------------------------------- operators of another library

LIBRARY = torch.library.Library("broken_rules", "DEF")
for schema, body in (
    ("gram(Tensor x, Tensor y) -> Tensor", lambda x, y: torch.einsum("bmk,bmn->bkn", x, y)),
    ("three(Tensor x, Tensor y, Tensor z) -> Tensor", lambda x, y, z: torch.einsum("mk,kn,n->mn", x, y, z)),
    ("affine(Tensor x, Tensor weight, Tensor? bias) -> Tensor", torch.nn.functional.linear),
    ("twice(Tensor x, Tensor y) -> Tensor", lambda x, y: 2 * (x @ y)),
    ("mean(Tensor x, int dim) -> Tensor", lambda x, dim: x.mean(dim)),
    ("centred(Tensor x, int dim) -> Tensor", lambda x, dim: x - x.mean(dim, keepdim=True)),
):
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], body, "CompositeExplicitAutograd")
own = torch.ops.broken_rules


@torch.library.custom_op("broken_rules::squares", mutates_args=())
def squares(x: Tensor, dim: int) -> Tensor:
    """It has no derivative."""
    return x.square().sum(dim)


Shapes = list[tuple[tuple[int, ...] | None, ...]]
RIGHT: dict[str, tuple[Any, str, Shapes]] = {
    "gram": (own.gram, "bmk,bmn->bkn", [((2, 3, 4), (2, 3, 2))]),
    "three factors": (own.three, "mk,kn,n->mn", [((3, 4), (4, 2), (2,))]),
    "affine": (own.affine, "*k,nk,+->*n", [((3, 4), (2, 4), (2,)), ((2, 3, 4), (2, 4), None)]),
}
WRONG: dict[str, tuple[Any, str, Shapes, str]] = {
    "another letter contracted": (own.gram, "bmk,bnk->bmn", [((2, 3, 3), (2, 3, 3))], "values differ"),
    "batch taken for contracted": (own.gram, "bmk,bmn->kn", [((2, 3, 4), (2, 3, 2))], "its result has shape"),
    "a factor taken for added": (own.three, "mk,kn,+->mn", [((3, 4), (4, 2), (2,))], "values differ"),
    "a coefficient": (own.twice, "mk,kn->mn", [((3, 4), (4, 2))], "values differ"),
    "other sizes": (own.gram, "bmk,bnm->bkn", [((2, 3, 4), (2, 3, 2))], "dimensions of sizes"),
    "other ranks": (own.gram, "mk,mn->kn", [((2, 3, 4), (2, 3, 2))], r"operands of \[3, 3\] dimensions"),
}


# A contraction whose rule states another equation than its operator computes is noticed; the right one holds.


def verdict_of(op: Any, equation: str, shapes: Shapes, laws: tuple[str, ...]) -> Any:
    with registry.overlay():
        rule = contraction(op, dims=Equation(equation))

        @rule.samples
        def of_shapes(make: Any) -> Iterator[tuple[Any, ...]]:
            for sizes in shapes:
                yield tuple(None if size is None else make(size) for size in sizes)

        return check(op, laws=laws)


@pytest.mark.parametrize(("op", "equation", "shapes"), RIGHT.values(), ids=RIGHT)
def test_the_equation_of_an_operator_serves_it_in_every_storage(op: Any, equation: str, shapes: Shapes) -> None:
    verdict = verdict_of(op, equation, shapes, ("P1", "P2", "P3", "P4", "P5"))
    assert verdict, str(verdict)


@pytest.mark.parametrize(("op", "equation", "shapes", "said"), WRONG.values(), ids=WRONG)
def test_another_equation_is_noticed(op: Any, equation: str, shapes: Shapes, said: str) -> None:
    verdict = verdict_of(op, equation, shapes, ("P2",))
    assert not verdict
    assert re.search(said, str(verdict)), str(verdict)


# Of an operator without a derivative, P5 asks for the gradient of the rule's own values; P9 asks a formula, too.


def doubled(v: Any) -> Any:
    """The same values with twice the gradient."""
    return 2 * v - v.detach()


def on_slices(made: Callable[[Any], Any]) -> None:
    @over_slices(own.squares, category=REDUCTION, dims=Slices("one"))
    def rule(op: Any, over: Any, x: Any) -> Any:
        return made(over.sum(x.filled(0).square()))


def as_formula(made: Callable[[Any], Any]) -> None:
    rule = masked_rule(own.squares, category=COMPOSITE)(lambda x, dim: made(x.square()).sum(dim))
    rule.oracle(lambda x, dim: type(x)(torch.where(x.mask, x.data, 0).square().sum(dim), x.mask.any(dim)))


@pytest.mark.usefixtures("rules_forgotten")
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("register", [on_slices, as_formula])
def test_the_gradient_of_a_rule_without_an_operators_derivative(register: Any, wrong: bool) -> None:
    register(doubled if wrong else lambda v: v)
    verdict = check(own.squares, laws=("P2", "P5"))
    assert verdict.of("P2") == "holds"
    assert verdict.of("P5") == ("broken" if wrong else "holds"), verdict
    assert ("central differences give" in str(verdict)) is wrong


@pytest.mark.usefixtures("rules_forgotten")
@pytest.mark.parametrize(
    ("op", "formula", "decision"),
    [
        (own.mean, lambda x, dim: x.mean(dim), "holds"),
        (own.centred, lambda x, dim: x - x.mean(dim, keepdim=True), "holds"),
        (own.mean, lambda x, dim: x.sum(dim) / x.shape[dim], "broken"),
        (own.mean, lambda x, dim: x.to_tensor(0).mean(dim), "broken"),  # padding counts
    ],
)
def test_padding_ends_samples_for_a_formula(op: Any, formula: Callable[..., Any], decision: str) -> None:
    masked_rule(op, category=COMPOSITE)(formula)
    verdict = check(op, laws=("P9",))
    assert verdict.of("P9") == decision, verdict
