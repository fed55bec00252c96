"""P7 on other devices: what the comparison with the CPU notices (the whole database: test_database_on_devices.py)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch.conformance_subject import Eager
from op_registry.__main__ import main
from op_registry.conformance.law import Trial, outcome_of
from op_registry.conformance.laws.devices import findings, on_device
from op_registry.conformance.laws.values import compress
from op_registry.conformance.masks import masking
from op_registry.conformance.reference_device import DeviceMissing, device_called
from op_registry.conformance.samples import operator_named
from op_registry.conformance.trials import Settings, run_operator


class Misbehaving(Eager):
    """A masked tensor that gives something else at its second call on masked operands, which is on the device."""

    def __init__(self, differently: Callable[[Any], Any]) -> None:
        super().__init__()
        self.differently = differently
        self.calls = 0

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = super().call(fn, *args, **kwargs)
        self.calls += md.is_masked_tensor(args[0])
        return self.differently(result) if md.is_masked_tensor(args[0]) and self.calls == 2 else result


def found_with(differently: Callable[[Any], Any], device: str) -> dict[str, str]:
    """Status and reason of the results and the gradients of exp, of a vector of 20 (cpu:0 is another name for cpu)."""
    found = findings(operator_named("exp"), torch.device(device), Misbehaving(differently), sample=0)
    return {finding.what: f"{finding.status} {finding.reason}" for finding in found}


def raising(result: Any) -> Any:
    raise NotImplementedError("no kernel")


def with_mask_of(compute: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """The results with another mask, computed from theirs."""
    return lambda result: md.as_masked_tensor(result.get_data(), compute(result.get_mask()))


def brought(result: Any) -> Any:
    return md.masked_tensor(torch.ones(20), torch.ones(20, dtype=torch.bool))


OTHERWISE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a plain tensor instead of a masked tensor": ("meta", lambda result: result.get_data()),
    "torch.float64 (20,) instead of torch.float32 (20,)": ("meta", lambda result: result.double()),
    "mask of shape (1, 20) instead of (20,)": ("meta", lambda result: result.unsqueeze(0)),
    "raises NotImplementedError: no kernel": ("meta", raising),
    "leaf 0: on cpu and cpu instead of meta": ("meta", brought),
    "values differ, the first": ("cpu:0", lambda result: result + 1),
    "mask [0, 0, 0": ("cpu:0", with_mask_of(torch.zeros_like)),
}


@pytest.mark.parametrize("noticed", OTHERWISE)
def test_another_result_is_noticed(noticed: str) -> None:
    device, differently = OTHERWISE[noticed]
    found = found_with(differently, device)["results"]
    assert found.startswith("broken")
    assert noticed in found


def test_other_gradients_are_noticed() -> None:
    found = found_with(lambda result: result.detach() + 0 * result, "cpu:0")
    assert found["results"] == "pass "
    assert re.match(r"broken leaf 0: \d+ of \d+ values differ, the first 0.0 instead of", found["gradients"])


def test_what_is_refused_on_the_cpu_has_to_be_refused() -> None:
    """And is then compared with every element valid."""

    class Lenient(Eager):
        def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Any:
            return super().wrap(data, None if data.is_meta else mask, requires_grad)

    def statuses(subject: Eager) -> list[str]:
        found = findings(operator_named("linalg_householder_product"), torch.device("meta"), subject, sample=0)
        return [finding.status for finding in found]

    assert statuses(Lenient()) == ["broken"]
    assert statuses(Eager()) == ["refused rightly", "pass", "pass"]


# ------------------------------------------------------------------------------------------------------ devices by name


def test_a_device_that_is_missing_is_skipped_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    missing = next(name for name in ("cuda", "xpu", "mps") if not getattr(torch, name).is_available())
    with pytest.raises(DeviceMissing) as reason:
        device_called(missing)
    assert main(["check", "--device", missing, "--op", "exp"]) == 0
    assert capsys.readouterr().out == f"skipped: no device {missing} on this machine ({reason.value})\n"


def test_the_command_says_what_came_of_an_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--device", "meta", "--op", "masked_select"]) == 0
    assert "device does not apply " in (out := capsys.readouterr().out)
    assert "as on the CPU: plain torch on meta raises: NotImplementedError" in out
    assert main(["check", "--device", "meta", "--op", "exp"]) == 0
    assert re.findall(r"^  (\S+) holds +(\d) trials", capsys.readouterr().out, re.MULTILINE) == [
        ("device", "1"),
        ("device-gradients", "1"),
    ]


def test_laws_that_need_values_are_not_for_meta(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--device", "meta", "--op", "exp", "--law", "P3"]) == 2
    assert "--device meta has no values that a law could compare: leave out --law" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- laws on a device


def test_laws_run_on_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    laws = [word for law in ("P1", "P3") for word in ("--law", law)]
    assert main(["check", "--device", "cpu", "--op", "exp", *laws]) == 0
    assert re.findall(r"^  (P\d) holds", capsys.readouterr().out, re.MULTILINE) == ["P1", "P3"]


def test_a_law_that_is_broken_on_a_device_has_a_command_that_repeats_it() -> None:
    class OffByOne(Eager):
        def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return super().call(fn, *args, **kwargs) + 1

    operator = operator_named("exp")
    sample = operator.samples(torch.float32)[0]
    masks = masking("half", sample.tensors, 0)
    assert masks is not None
    for subject, status in ((Eager(), "pass"), (OffByOne(), "broken")):
        trial = Trial(on_device(subject, torch.device("cpu")), sample, masks)
        assert outcome_of(compress, trial)[0] == status
    settings = Settings(laws=("P2",), sample=0, masks=("half",), device="cpu")
    lines: list[str] = []
    run_operator("exp", settings, lines.append)
    assert lines[-1].endswith("--op exp --law P2 --sample 0 --mask half --dtype float32 --seed 0 --device cpu")
