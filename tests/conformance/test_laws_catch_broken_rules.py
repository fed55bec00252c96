"""Test the testers: each law is given rules and subjects that are broken on purpose, and has to complain.

What is broken here is no way of a mutant (tests/thorough/conformance/test_mutants.py), or the only fast test of a law.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, broadcast_shapes

import op_registry
from op_registry import registry
from op_registry.authoring import Dense, Equation, contraction
from op_registry.conformance.compare import difference
from op_registry.conformance.law import outcome_of
from op_registry.conformance.laws import LAWS
from op_registry.conformance.laws.values import compress
from op_registry.conformance.masks import masking
from op_registry.conformance.plain_torch import derivative
from op_registry.conformance.sample import Sample
from op_registry.conformance.samples import operator_named, overload_samples
from op_registry.conformance.subject import Records, Subject, records
from op_registry.conformance.trials import Outcome, Settings, run_operator, trials_of
from op_registry.conformance.variations import FOLDED, storable, with_other_numbers
from op_registry.conformance.verdict import answer_of
from op_registry.errors import MaskedSemanticsError
from op_registry.records.dense import valid_in_all
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


def sum_masked_afterwards(x: Dense, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Dense:
    """Multiplies by the mask: right until there is a NaN below it."""
    data = x.data if x.valid is None else x.data * x.valid
    return Dense(aten.sum.dim_IntList(data, dim, keepdim, dtype=dtype), x.any_valid(dim, keepdim))


def mean_by_numel(x: Dense, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Dense:
    """Divides by the number of elements, valid or not."""
    return Dense(aten.mean.dim(x.filled(0), dim, keepdim, dtype=dtype), x.any_valid(dim, keepdim))


def transpose_data_only(x: Dense, dim0: int, dim1: int) -> Dense:
    """Loses the mask."""
    return Dense(x.data.transpose(dim0, dim1))


def mul_of_garbage(x: Dense, other: Any) -> Dense:
    """Right forward; backward, each operand's gradient reads what is hidden in the other: 0 · NaN."""
    theirs = other.data if isinstance(other, Dense) else other
    return Dense(x.data * theirs, valid_in_all(x, other))


def exp_in_another_way(x: Dense) -> Dense:
    """Not the same to the last bit."""
    return x.like(torch.expm1(x.data) + 1)


def cumsum_from_the_end(x: Dense, dim: int, *, dtype: Any = None) -> Dense:
    """The right numbers in the wrong order."""
    return x.like(x.filled(0).flip(dim).cumsum(dim, dtype=dtype).flip(dim))


def raises_on_nan(x: Dense) -> Dense:
    """Whether it raises depends on what is hidden."""
    if x.data.isnan().any():
        raise ValueError("there is a NaN")
    return x.like(torch.exp(x.data))


@pytest.mark.parametrize(
    "law, entry, op, broken, says",
    [
        ("P1", "exp", aten.exp.default, exp_in_another_way, "values differ"),
        ("P2", "mean", aten.mean.dim, mean_by_numel, "differ"),
        ("P2", "transpose", aten.transpose.int, transpose_data_only, "mask"),
        ("P2", "cumsum", aten.cumsum.default, cumsum_from_the_end, "differ"),
        ("P3", "sum", aten.sum.dim_IntList, sum_masked_afterwards, "with nan under the mask"),
        ("P3", "mul", aten.mul.Tensor, mul_of_garbage, "gradient"),
        ("P3", "exp", aten.exp.default, raises_on_nan, "it raises ValueError: there is a NaN, otherwise it gives"),
        ("P5", "mean", aten.mean.dim, mean_by_numel, "gradient 0"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_rule_is_caught(law: str, entry: str, op: Any, broken: Any, says: str, replace: Any) -> None:
    assert complaints(law, entry) == []
    replace(op, broken)
    found = complaints(law, entry)
    assert any(says in line for line in found), found[:3] or "nothing was said"


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


def exp_less_a_mean_of_what_is_stored(op: Any, x: Sparse) -> Sparse:
    """Leaks: what lies beside the valid elements is in the mean."""
    return x.like(x.values.like(torch.exp(x.values.data) - 0 * x.values.data.mean()))


def exp_of_all_that_is_stored(op: Any, x: Sparse) -> Sparse:
    """What is stored becomes valid."""
    return x.like(Dense(torch.exp(x.values.filled(0))))


def exp_of_twice_the_slope(op: Any, x: Sparse) -> Sparse:
    """The right values with the wrong derivative."""
    result = torch.exp(x.values.filled(0))
    return x.like(x.values.like(result + (result - result.detach())))


class _ExpOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.result = torch.exp(x)
        return ctx.result.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.result.detach()


def exp_to_first_order(op: Any, x: Sparse) -> Sparse:
    """The right derivative, which has none."""
    return x.like(x.values.like(_ExpOnce.apply(x.values.filled(0))))


@pytest.mark.parametrize(
    "law, storage, broken, says",
    [
        ("P4", "bsr", exp_less_a_mean_of_what_is_stored, "stored as bsr: result 0: "),
        ("P3", "csr", exp_less_a_mean_of_what_is_stored, "stored as csr with "),
        ("P4", "bsr", exp_of_all_that_is_stored, "stored as bsr: result 0: mask "),
        ("P3", "coo", exp_of_all_that_is_stored, "stored as coo with nan in stored invalid elements: result 0: mask "),
        ("P4", "csr", exp_of_twice_the_slope, "stored as csr: gradient 0: "),
        ("P5", "csr", exp_of_twice_the_slope, "stored as csr: gradient 0: "),
        (
            "P5",
            "hybrid",
            exp_to_first_order,
            "stored as hybrid: only one of this storage and dense storage has a second-order gradient",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_lowering_is_caught(
    law: str, storage: str, broken: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(subject=EAGER, laws=(law,), most=3, storages=(storage,), also_stored=(storage,))
    assert run_operator("exp", settings).failures == []
    rule = registry.get(aten.exp.default)
    assert rule is not None
    monkeypatch.setitem(rule.lowerings, Sparse, broken)
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


def test_an_answer_to_another_number_is_caught(replace: Any) -> None:
    """fill, of which every sample of the database writes True."""
    kept: dict[Any, Dense] = {}

    def fill_as_before(x: Dense, value: Any) -> Dense:
        return kept.setdefault(x.shape, x.like(aten.fill.Scalar(x.data, value)))

    assert complaints("P1", "fill") == []
    replace(aten.fill.Scalar, fill_as_before)
    assert any("result 0: 20 of 20 values differ" in line for line in complaints("P1", "fill"))


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


def test_refusing_every_call_that_has_an_answer_is_no_answer(replace: Any) -> None:
    """Under other masks bucketize has to be refused, which holds for a rule that refuses too much as well."""

    def decision() -> str:
        return answer_of(run_operator("bucketize", Settings(subject="records", laws=("P3",), most=3)), "P3").decision

    def refuses(x: Any, boundaries: Dense, **how: bool) -> Dense:
        raise MaskedSemanticsError("bucketize: not today")

    assert decision() == "holds"
    replace(aten.bucketize.Tensor, refuses)
    assert decision() == "undecided"


def test_masks_of_one_shape_tell_tensors_apart() -> None:
    for shape in ((3, 4), (2, 5), (5, 5)):
        for seed in range(20):
            made = masking("half", [torch.ones(shape)] * 2, seed)
            assert made is not None
            a, b = made.masks
            assert all(part.any() for part in (a & b, a & ~b, ~a & b))


def test_the_call_that_tells_most_is_compiled() -> None:
    """Not the ones whose results are empty, nor, for a gate of two halves, the one of two elements."""
    for entry in ("constant_pad_nd", "nn_functional_glu"):
        (sample,) = overload_samples(operator_named(entry), torch.float32, lambda op: False)
        assert sample.fn(*sample.args, **sample.kwargs).numel() > 1


def test_samples_without_a_slope_are_not_all_there_is() -> None:
    """hardtanh between -0.5 and 0.5: every element of the database's samples of two dimensions is cut off."""
    found = storable([s for s in operator_named("nn_functional_hardtanh").samples(torch.float64) if s.tensors])
    assert [s.number > FOLDED for s in found] == [False, False, True, True]
    assert [derivative(s).sloped for s in found] == [False, False, True, True]


# ---------------------------------------------------------------------------------------------------------- gradients


class MaskedGradients(Records):
    """Gives every tensor a masked gradient, plain ones too."""

    def gradients(self, scalar: Tensor, inputs: Sequence[Any], create_graph: bool = False) -> list[Any]:
        found = super().gradients(scalar, inputs, create_graph)
        return [Dense(g, None) if isinstance(g, Tensor) else g for g in found]


class PlainGradients(Records):
    """Gives every tensor a plain gradient, masked ones too."""

    def gradients(self, scalar: Tensor, inputs: Sequence[Any], create_graph: bool = False) -> list[Any]:
        found = super().gradients(scalar, inputs, create_graph)
        return [g.data if isinstance(g, Dense) else g for g in found]


class GrownGradients(Records):
    """The gradient of a masked tensor is valid everywhere."""

    def gradients(self, scalar: Tensor, inputs: Sequence[Any], create_graph: bool = False) -> list[Any]:
        found = super().gradients(scalar, inputs, create_graph)
        return [Dense(g.data, None) if isinstance(g, Dense) else g for g in found]


@pytest.mark.parametrize(
    "subject, says",
    [
        (MaskedGradients(), "a masked gradient for a plain tensor"),
        (PlainGradients(), "a plain gradient for a masked tensor"),
        (GrownGradients(), "mask"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_gradients_of_the_wrong_kind_are_caught(subject: Subject, says: str) -> None:
    found = complaints("P5", "mul", subject)
    assert any(says in line for line in found), found[:3] or "nothing was said"


class OtherwiseWrong(Records):
    """Has a mode that gives something else."""

    laws = (*Records.laws, "P7")

    def modes(self) -> dict[str, Subject]:
        return {"aot_eager": _Doubled()}


class _Doubled(Records):
    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = super().call(fn, *args, **kwargs)
        return result.like(result.data * 2) if isinstance(result, Dense) else result


def outcomes(entry: str, law: str, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    monkeypatch.setattr("op_registry.conformance.trials.find_subject", lambda name: subject)
    return run_operator(entry, Settings(laws=(law,), most=2)).failures


def test_a_mode_that_differs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcomes("exp", "P7", OtherwiseWrong(), monkeypatch)
    assert any("aot_eager: result 0" in o.message for o in found), found


class CopiesViews(Subject):
    """MaskedTensor, except that what should be views are copies."""

    def __init__(self) -> None:
        from masked_dispatch.conformance_subject import eager

        self.eager = eager
        self.name = "copies"

    def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Any:
        return self.eager.wrap(data, mask, requires_grad)

    def observe(self, value: Any) -> tuple[Tensor, Tensor | None]:
        return self.eager.observe(value)

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = self.eager.call(fn, *args, **kwargs)
        return result.clone() if result is not args[0] else result


def test_a_view_that_copies_is_caught() -> None:
    from masked_dispatch.conformance_subject import eager

    assert complaints("P6", "permute", eager) == []
    found = complaints("P6", "permute", CopiesViews())
    assert any("in the base, mask" in line for line in found), found[:3] or "nothing was said"


def test_zero_filling_is_no_masked_tensor() -> None:
    """Plain torch on zeros obeys P3, and next to nothing else."""
    from op_registry.conformance.subject import zeros

    assert complaints("P3", "mean", zeros) == []
    assert complaints("P2", "mean", zeros) != []
    assert complaints("P5", "mean", zeros) != []


def test_a_gap_that_no_longer_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from op_registry.conformance import gaps
    from op_registry.rule import Gap

    monkeypatch.setitem(gaps.TABLE, "exp", (Gap("P2", "not a gap at all"),))
    found = outcomes("exp", "P2", records, monkeypatch)
    assert ["a named gap no longer fails" in o.message for o in found] == [True]


def test_a_named_gap_is_no_failure(monkeypatch: pytest.MonkeyPatch, replace: Any) -> None:
    from op_registry.conformance import gaps
    from op_registry.rule import Gap

    replace(aten.mean.dim, mean_by_numel)
    replace(aten.mean.default, lambda x, *, dtype=None: mean_by_numel(x, None, dtype=dtype))
    monkeypatch.setitem(gaps.TABLE, "mean", (Gap("P2", "divides by all elements"),))
    assert outcomes("mean", "P2", records, monkeypatch) == []


# ----------------------------------------------------------------------------------------------------------------------
# A contraction whose rule states another equation than its operator computes is noticed; the right one holds.

EQUATIONS = torch.library.Library("equations", "DEF")
EQUATIONS.define("gram(Tensor x, Tensor y) -> Tensor")
EQUATIONS.define("three(Tensor x, Tensor y, Tensor z) -> Tensor")
EQUATIONS.define("affine(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
EQUATIONS.define("twice(Tensor x, Tensor y) -> Tensor")
EQUATIONS.impl("gram", lambda x, y: torch.einsum("bmk,bmn->bkn", x, y), "CompositeExplicitAutograd")
EQUATIONS.impl("three", lambda x, y, z: torch.einsum("mk,kn,n->mn", x, y, z), "CompositeExplicitAutograd")
EQUATIONS.impl(
    "affine", lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias), "CompositeExplicitAutograd"
)
EQUATIONS.impl("twice", lambda x, y: 2 * (x @ y), "CompositeExplicitAutograd")
equations = torch.ops.equations

Shapes = list[tuple[tuple[int, ...] | None, ...]]
RIGHT: dict[str, tuple[Any, str, Shapes]] = {
    "gram": (equations.gram, "bmk,bmn->bkn", [((2, 3, 4), (2, 3, 2))]),
    "three factors": (equations.three, "mk,kn,n->mn", [((3, 4), (4, 2), (2,))]),
    "affine": (equations.affine, "*k,nk,+->*n", [((3, 4), (2, 4), (2,)), ((2, 3, 4), (2, 4), None)]),
}
WRONG: dict[str, tuple[Any, str, Shapes, str]] = {
    "another letter contracted": (equations.gram, "bmk,bnk->bmn", [((2, 3, 3), (2, 3, 3))], "values differ"),
    "batch taken for contracted": (equations.gram, "bmk,bmn->kn", [((2, 3, 4), (2, 3, 2))], "its result has shape"),
    "contracted taken for batch": (equations.gram, "bmk,bmn->mkn", [((3, 3, 3), (3, 3, 3))], "values differ"),
    "an operand left out": (equations.affine, "*k,nk,+->*k", [((2, 2, 2), (2, 2), (2,))], "values differ"),
    "a factor taken for added": (equations.three, "mk,kn,+->mn", [((3, 4), (4, 2), (2,))], "values differ"),
    "a coefficient": (equations.twice, "mk,kn->mn", [((3, 4), (4, 2))], "values differ"),
    "other sizes": (equations.gram, "bmk,bnm->bkn", [((2, 3, 4), (2, 3, 2))], "dimensions of sizes"),
    "other ranks": (equations.gram, "mk,mn->kn", [((2, 3, 4), (2, 3, 2))], r"operands of \[3, 3\] dimensions"),
}


def verdict_of(op: Any, equation: str, shapes: Shapes, laws: tuple[str, ...]) -> Any:
    with registry.overlay():
        rule = contraction(op, dims=Equation(equation))

        @rule.samples
        def of_shapes(make: Any) -> Iterator[tuple[Any, ...]]:
            for sizes in shapes:
                yield tuple(None if size is None else make(size) for size in sizes)

        return op_registry.check(op, laws=laws)


@pytest.mark.parametrize(("op", "equation", "shapes"), RIGHT.values(), ids=RIGHT)
def test_the_equation_of_an_operator_serves_it_in_every_storage(op: Any, equation: str, shapes: Shapes) -> None:
    verdict = verdict_of(op, equation, shapes, ("P1", "P2", "P3", "P4", "P5"))
    assert verdict, str(verdict)


@pytest.mark.parametrize(("op", "equation", "shapes", "said"), WRONG.values(), ids=WRONG)
def test_another_equation_is_noticed(op: Any, equation: str, shapes: Shapes, said: str) -> None:
    verdict = verdict_of(op, equation, shapes, ("P2",))
    assert not verdict
    assert re.search(said, str(verdict)), str(verdict)
