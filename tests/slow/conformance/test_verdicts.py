"""`check` answers for each law, and its verdict is true only where every law that applies was asked and held.

Operators are those of a stranger's library, defined here; each test registers rules in an overlay.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from op_registry import check, registry
from op_registry.__main__ import main
from op_registry.authoring import Dense, contraction, elementwise, masked_rule, reduction, scan
from op_registry.conformance import find_subject
from op_registry.conformance import subject as subjects
from op_registry.conformance.samples import operators_of
from op_registry.conformance.subject import Records
from op_registry.conformance.trials import Settings, run_operator
from op_registry.laws.categories import ELEMENTWISE
from repository import ROOT

pytestmark = pytest.mark.usefixtures("rules_forgotten")

EAGER = "masked_dispatch.conformance_subject:eager"


def defined(name: str, function: Callable[..., Any], *, fake: bool = True) -> Any:
    """A custom operator without a derivative."""
    operator = torch.library.custom_op(f"verdicts::{name}", function, mutates_args=())
    if fake:
        operator.register_fake(lambda *args, **kwargs: function(*args, **kwargs).clone())
    return operator


def doubled(x: Tensor) -> Tensor:
    return x * 2


def centered(x: Tensor) -> Tensor:
    return x - x.mean()


def summed(x: Tensor, dim: int) -> Tensor:
    return x.sum(dim)


def accumulated(values: Tensor, dim: int) -> Tensor:
    return values.cumsum(dim)


def product(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


defined("doubled", doubled)
defined("doubled_without_fake", doubled, fake=False)
defined("centered", centered)
defined("accumulated", accumulated)
defined("product", product)
defined("summed", summed)
SUMMED_WITH_DERIVATIVE = defined("summed_with_derivative", summed)


def _keep_shape(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shape, ctx.dim = inputs[0].shape, inputs[1]


SUMMED_WITH_DERIVATIVE.register_autograd(
    lambda ctx, grad: (grad.unsqueeze(ctx.dim).expand(ctx.shape), None), setup_context=_keep_shape
)
OWN = torch.ops.verdicts


def decisions(verdict: Any) -> dict[str, str]:
    return {law: verdict.of(law) for law in ("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8")}


WITHOUT_DERIVATIVE = {
    **dict.fromkeys(("P1", "P2", "P3", "P4", "P7", "P8"), "holds"),
    **dict.fromkeys(("P5", "P6"), "does not apply"),
}


# ------------------------------------------------------------------------------------- right rules pass, by any name


@pytest.mark.parametrize(
    "register, name, traits",
    [
        (elementwise, "doubled", {}),
        (reduction, "summed", {"identity": 0}),
        (scan, "accumulated", {"identity": 0}),
        (contraction, "product", {}),
    ],
    ids=["elementwise", "reduction", "scan", "contraction"],
)
def test_a_right_rule_is_asked_every_law(register: Any, name: str, traits: dict[str, Any]) -> None:
    operator = getattr(OWN, name)
    register(operator, **traits)
    verdict = check(operator)
    assert verdict, str(verdict)
    assert decisions(verdict) == WITHOUT_DERIVATIVE
    reasons = {a.law: a.reason for a in verdict.answers}
    assert "no autograd formula was registered" in reasons["P5"]
    assert reasons["P6"] == "its schema returns no view"


def test_a_right_rule_with_a_derivative_is_asked_for_it() -> None:
    reduction(OWN.summed_with_derivative, identity=0)
    verdict = check(OWN.summed_with_derivative)
    assert verdict, str(verdict)
    assert decisions(verdict) == WITHOUT_DERIVATIVE | {"P5": "holds"}
    assert all(a.trials >= 2 for a in verdict.answers if a.decision == "holds" and a.law != "dims")


@pytest.mark.parametrize("name", ["linalg_inv", "sort"])
def test_an_operator_of_torch_is_asked_every_law(name: str) -> None:
    """Of one that refuses partly valid input, storage and compiled graphs are tried where everything is valid."""
    verdict = check(name, most=1)
    assert verdict, str(verdict)
    assert {law for law, decision in decisions(verdict).items() if decision != "holds"} == {"P6"}


# ------------------------------------------------------------------------------------------------ wrong ones do not


def test_a_rule_that_raises_in_backward_is_broken() -> None:
    """Only plain torch's forward excuses a trial: its derivative is tried before, and not when a rule has failed."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ArithmeticError("no gradient today")

    reduction(OWN.summed_with_derivative, identity=0)
    registry.replace(
        OWN.summed_with_derivative.default, lambda x, dim: Dense(Raises.apply(x.filled(0)).sum(dim), x.any_valid(dim))
    )
    verdict = check(OWN.summed_with_derivative, laws=("P3", "P5"), subject="records")
    assert (verdict.of("P3"), verdict.of("P5")) == ("broken", "broken")
    assert {o.message.partition(" (")[0] for o in verdict.failures} == {"ArithmeticError: no gradient today"}


def test_a_plain_result_is_refused_at_the_call() -> None:
    @masked_rule(OWN.doubled.default, category=ELEMENTWISE)
    def without_mask(x: Dense) -> Tensor:
        return x.data * 2

    x = md.masked_tensor([1.0, 2.0], [True, False])
    said = r"the rule of verdicts::doubled \[.*test_verdicts.py:\d+\] returned a plain tensor of shape \(2,\), which"
    with pytest.raises(TypeError, match=said):
        OWN.doubled(x)


class LosesMasks(Records):
    """Results are plain tensors, whatever the rules say."""

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = super().call(fn, *args, **kwargs)
        return result.data if isinstance(result, Dense) else result


def test_a_silent_plain_result_breaks_p8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("op_registry.conformance.trials.find_subject", lambda name: LosesMasks())
    report = run_operator("exp", Settings(laws=("P8",), most=1))
    assert {o.message for o in report.failures} == {"result 0: a plain tensor, although an operand is masked"}
    # A count is a plain answer, by its oracle.
    assert run_operator("count_nonzero", Settings(laws=("P8",), most=1)).failures == []


def test_a_refusal_has_to_name_the_operator() -> None:
    @masked_rule(OWN.doubled.default, category=ELEMENTWISE)
    def refuses(x: Dense) -> Dense:
        raise md.MaskedSemanticsError("not today")

    verdict = check(OWN.doubled, laws=("P1", "P8"), subject=EAGER)
    assert verdict.of("P8") == "broken"
    assert "the refusal does not name doubled: not today" in str(verdict)
    assert [(a.decision, a.reason) for a in verdict.answers if a.law == "P1"] == [
        ("undecided", "every call that has a result was refused")
    ]


# --------------------------------------------------------------------------------------------- undecided is not true


def test_what_nobody_could_ask_is_undecided_unless_allowed() -> None:
    elementwise(OWN.doubled_without_fake)
    verdict = check(OWN.doubled_without_fake)
    assert not verdict
    assert decisions(verdict) == WITHOUT_DERIVATIVE | {"P7": "undecided"}
    assert verdict.objections == ("verdicts.doubled_without_fake.default P7 is undecided",)
    (reason,) = (a.reason for a in verdict.answers if a.law == "P7")
    assert reason.startswith("no trial could test it: plain torch cannot do it in mode aot_eager either: ")
    allowed = check(OWN.doubled_without_fake, laws=("P1", "P7"), allow={"P7": "it has no fake implementation"})
    assert allowed
    assert "allowed: it has no fake implementation" in str(allowed)


def test_an_allowance_that_nothing_needs_is_an_objection() -> None:
    elementwise(OWN.doubled)
    verdict = check(OWN.doubled, laws=("P1", "P3"), allow={"P3": "leaks"}, allow_broken={"P1": "rounds"})
    assert not verdict
    assert verdict.objections == (
        "P3 is allowed to be undecided (leaks), but is not: remove the allowance",
        "P1 is allowed to be broken (rounds), but is not: remove the allowance",
    )


def test_an_allowance_is_for_one_law_and_one_decision() -> None:
    elementwise(OWN.centered)
    assert check(OWN.centered, laws=("P3",), allow_broken={"P3": "known"})
    assert not check(OWN.centered, laws=("P3",), allow={"P3": "known"})
    assert not check(OWN.centered, laws=("P2", "P3"), allow_broken={"P3": "known"})
    with pytest.raises(ValueError, match="unknown law P10; the laws are P1, P2"):
        check(OWN.centered, allow={"P10": "known"})


def test_an_operator_without_samples_is_undecided() -> None:
    def scaled(x: Tensor, how: str) -> Tensor:
        return x * len(how)

    defined("scaled", scaled)
    elementwise(OWN.scaled)
    verdict = check(OWN.scaled, laws=("P1", "P2", "P3", "P5", "P6", "P8"))
    assert not verdict
    assert {verdict.of(law) for law in ("P1", "P2", "P3", "P5", "P8")} == {"undecided"}
    assert all("no sample" in a.reason for a in verdict.answers if a.decision == "undecided")


def test_nothing_to_check_is_no_verdict() -> None:
    from op_registry.conformance import Verdict

    assert not Verdict(())
    assert Verdict(()).objections == ("nothing was checked",)


# ------------------------------------------------------------------------------ in-place and out= forms of a library

HALVING = torch.library.Library("verdicts_halving", "DEF")
HALVING.define("halved(Tensor x) -> Tensor")
HALVING.define("halved_(Tensor(a!) x) -> Tensor(a!)")
HALVING.define("halved.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
HALVING.impl("halved", lambda x: x / 2, "CompositeExplicitAutograd")
HALVING.impl("halved_", lambda x: x.copy_(x / 2), "CompositeExplicitAutograd")
HALVING.impl("halved.out", lambda x, out: out.copy_(x / 2), "CompositeExplicitAutograd")


def test_in_place_and_out_forms_of_a_strangers_library_follow_its_rule() -> None:
    halved = torch.ops.verdicts_halving.halved
    rule = elementwise(halved.default)
    assert [o.name for o in operators_of(rule.ops[0])] == [
        "verdicts_halving.halved.default",
        "verdicts_halving.halved.default+out",
        "verdicts_halving.halved.default+inplace",
    ]
    aliasing = "torch compiles no operator of another library that returns what it writes to"
    verdict = check(halved.default, allow={"P7": aliasing})
    assert verdict, str(verdict)
    assert [a.operator.partition("+")[2] for a in verdict.answers if a.decision == "undecided"] == ["inplace"]
    x = md.masked_tensor([2.0, 4.0], [True, False])
    assert torch.ops.verdicts_halving.halved_(x) is x
    assert repr(x) == "masked_tensor([1., --], valid=1/2, True=valid)"


def tripled(x: Tensor) -> Tensor:
    return x * 3


def tripled_(x: Tensor) -> None:
    x.mul_(3)


defined("tripled", tripled)
torch.library.custom_op("verdicts::tripled_", tripled_, mutates_args=("x",))


def test_an_in_place_form_that_returns_nothing_follows_the_rule_as_well() -> None:
    elementwise(OWN.tripled)
    verdict = check(OWN.tripled)
    assert verdict, str(verdict)
    assert {a.operator for a in verdict.answers} == {"verdicts.tripled.default", "verdicts.tripled.default+inplace"}
    x = md.masked_tensor([2.0, 4.0], [True, False])
    assert OWN.tripled_(x) is None
    assert repr(x) == "masked_tensor([6., --], valid=1/2, True=valid)"


# --------------------------------------------------------------------------------------------------- what is tested


def test_nothing_is_tested_silently_on_bare_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "declared_subjects", lambda: dict(subjects.SHIPPED))
    monkeypatch.delenv("OP_REGISTRY_SUBJECT", raising=False)
    with pytest.raises(LookupError, match=r"no masked tensor to test: .*pip install -e \. .*subject='records'"):
        find_subject()
    assert find_subject("records").name == "records"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no reader for TOML")
def test_a_checkout_declares_its_subjects_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "_installed", dict)
    assert subjects.declared_subjects()["default"] == EAGER
    assert find_subject().name == "eager"


# ------------------------------------------------------------------------------------------------------ repro lines

MODULE = """
import torch
import op_registry

@torch.library.custom_op("verdicts_stranger::shifted", mutates_args=())
def shifted(x: torch.Tensor) -> torch.Tensor:
    return x + x.mean()

op_registry.authoring.elementwise(torch.ops.verdicts_stranger.shifted)

if __name__ == "__main__":
    print(op_registry.check(torch.ops.verdicts_stranger.shifted, laws=("P3",)))
"""


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_repro_line_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "strangers.py").write_text(MODULE)
    said = run_in(tmp_path, "-m", "strangers").stdout
    line = next(line.strip() for line in said.splitlines() if "python -m op_registry check" in line)
    assert line.startswith("python -m op_registry check --import strangers --op verdicts_stranger.shifted.default")
    again = run_in(tmp_path, *line.split()[1:])
    assert again.returncode == 1
    assert "P3 broken            1 trials" in again.stdout
    # In worker processes too, which import what the line names.
    monkeypatch.syspath_prepend(tmp_path)
    status = main([*line.split()[3:], "--op", "exp", "--workers", "1"])
    del sys.modules["strangers"]
    many = capsys.readouterr()
    assert status == 1
    assert "no operator is called" not in many.out + many.err
    assert "verdicts_stranger.shifted.default P3: with nan under the mask" in many.out


def test_a_rule_registered_in_a_script_says_what_its_line_lacks(tmp_path: Path) -> None:
    (tmp_path / "strangers.py").write_text(MODULE)
    said = run_in(tmp_path, "strangers.py").stdout
    assert "# the rule is registered in __main__ (" in said
    assert "strangers.py:9): move it to a module, and add --import MODULE" in said
