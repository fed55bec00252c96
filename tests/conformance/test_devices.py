"""P7 on other devices: the whole database on the reference device and on meta, and that the comparison notices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import device_in_cpp
import masked_dispatch as md
from masked_dispatch.conformance_subject import Eager
from op_registry.__main__ import main
from op_registry.conformance.devices.available import DeviceMissing, device_called
from op_registry.conformance.devices.comparison import findings
from op_registry.conformance.samples import operator_named
from repository import ROOT

# What plain torch does not run on the device, or what it cannot be compared with, by kind.
NOT_COMPARABLE = {
    "reference": {"plain torch on reference raises": {"to_sparse"}},
    "cpp_device": {"plain torch on cpp_device raises": {"to_sparse"}},
    "meta": {
        "plain torch on meta raises": {
            *("allclose", "argwhere", "bincount", "combinations", "corrcoef", "cov", "equal", "geqrf", "histogram"),
            *("histogramdd", "istft", "linalg_lstsq", "linalg_lstsq_grad_oriented", "masked_select"),
            *("nn_functional_ctc_loss", "nn_functional_fractional_max_pool3d", "nn_functional_gaussian_nll_loss"),
            *("nn_functional_multi_margin_loss", "nn_functional_multilabel_margin_loss", "nn_functional_one_hot"),
            *("nonzero", "to_sparse", "unique", "unique_consecutive"),
        }
    },
}
# At least as many are equal to the CPU's.
EQUAL = {
    "reference": {"results": 650, "gradients": 510},
    "cpp_device": {"results": 650, "gradients": 530},
    "meta": {"results": 620, "gradients": 500},
}


def test_every_operator_gives_on_the_reference_device_what_it_gives_on_the_cpu() -> None:
    """In a process of its own, because the device takes a name for the whole process."""
    command = [sys.executable, "-m", "op_registry", "check", "--device", "reference"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    check_findings("reference", done.stdout)


@pytest.mark.slow
def test_every_operator_gives_on_a_device_in_cpp_what_it_gives_on_the_cpu() -> None:
    command = [sys.executable, str(device_in_cpp.__file__)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    check_findings(device_in_cpp.NAME, done.stdout)


def test_every_operator_gives_on_meta_what_it_gives_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check", "--device", "meta"])
    said = capsys.readouterr().out
    assert status == 0, said[-6000:]
    check_findings("meta", said)


def check_findings(device: str, said: str) -> None:
    for what, least in EQUAL[device].items():
        (equal,) = re.findall(rf"^{what} on {device}: (\d+) equal", said, re.MULTILINE)
        assert int(equal) >= least
    for reason, names in re.findall(r"^    ([^:]*): (.*)$", said, re.MULTILINE):
        if reason.startswith("plain torch"):
            assert set(names.split(", ")) <= NOT_COMPARABLE[device][reason]
        elif reason == "the CPU raises":
            assert all(name.startswith("jiterator") for name in names.split(", "))
        else:
            assert reason in ("no tensor of two elements to mask", "no gradient")


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


OF_RESULTS = {
    "plain, on the CPU masked": lambda result: result.get_data(),
    "torch.float64 (20,) instead of torch.float32 (20,)": lambda result: result.double(),
    "torch.float32 (1, 20) instead of torch.float32 (20,)": lambda result: result.unsqueeze(0),
    "raises NotImplementedError: no kernel": raising,
}
OF_VALUES = {
    "values differ, the first": lambda result: result + 1,
    "mask [0, 0, 0": with_mask_of(torch.zeros_like),
}


@pytest.mark.parametrize("noticed", OF_RESULTS)
def test_another_kind_of_result_is_noticed(noticed: str) -> None:
    found = found_with(OF_RESULTS[noticed], "meta")["results"]
    assert found.startswith("different")
    assert noticed in found


@pytest.mark.parametrize("noticed", OF_VALUES)
def test_other_values_are_noticed(noticed: str) -> None:
    found = found_with(OF_VALUES[noticed], "cpu:0")["results"]
    assert found.startswith("different")
    assert noticed in found


def test_a_result_or_a_mask_on_the_cpu_is_noticed() -> None:
    def brought(result: Any) -> Any:
        return md.masked_tensor(torch.ones(20), torch.ones(20, dtype=torch.bool))

    assert found_with(brought, "meta")["results"] == "different 0: on cpu instead of meta"


def test_other_gradients_are_noticed() -> None:
    found = found_with(lambda result: result.detach() + 0 * result, "cpu:0")
    assert found["results"] == "equal "
    assert re.match(r"different 0: \d+ of \d+ values differ, the first 0.0 instead of", found["gradients"])


def test_what_is_refused_on_the_cpu_has_to_be_refused() -> None:
    """And is then compared with every element valid."""

    class Lenient(Eager):
        def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Any:
            return super().wrap(data, None if data.is_meta else mask, requires_grad)

    def statuses(subject: Eager) -> list[str]:
        found = findings(operator_named("linalg_householder_product"), torch.device("meta"), subject, sample=0)
        return [finding.status for finding in found]

    assert statuses(Lenient()) == ["different"]
    assert statuses(Eager()) == ["refused", "equal", "equal"]


# ------------------------------------------------------------------------------------------------------ devices by name


def test_a_device_that_is_missing_is_skipped_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    missing = next(name for name in ("cuda", "xpu", "mps") if not getattr(torch, name).is_available())
    with pytest.raises(DeviceMissing) as reason:
        device_called(missing)
    assert main(["check", "--device", missing, "--op", "exp"]) == 0
    assert capsys.readouterr().out == f"skipped: no device {missing} on this machine ({reason.value})\n"


def test_the_command_says_what_came_of_an_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--device", "meta", "--op", "masked_select"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("results on meta: 0 equal to the CPU's, 0 refused on both, 0 different, 1 not comparable\n")
    assert "masked_select, results: not comparable plain torch on meta raises: NotImplementedError" in out


def test_options_of_the_laws_are_not_for_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--device", "meta", "--op", "exp", "--law", "P3"]) == 2
    assert "--device compares with the CPU and asks no laws: leave out --law" in capsys.readouterr().err
