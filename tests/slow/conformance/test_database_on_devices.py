"""P7 on other devices: the whole database on devices written in Python and in C++, and on meta."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import device_in_cpp
from op_registry.__main__ import main
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
# At least as many are equal to the CPU's, or refused on both.
EQUAL = {
    "reference": {"device": 670, "device-gradients": 510},
    "cpp_device": {"device": 670, "device-gradients": 530},
    "meta": {"device": 640, "device-gradients": 500},
}
IN_A_PROCESS = {
    "reference": ("-m", "op_registry", "check", "--device", "reference"),
    device_in_cpp.NAME: (str(device_in_cpp.__file__),),
}


@pytest.mark.parametrize("device", IN_A_PROCESS)
def test_every_operator_gives_on_a_device_what_it_gives_on_the_cpu(device: str) -> None:
    """In a process of its own, because the device takes a name for the whole process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *IN_A_PROCESS[device]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    check_findings(device, done.stdout)


def test_every_operator_gives_on_meta_what_it_gives_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check", "--device", "meta"])
    said = capsys.readouterr().out
    assert status == 0, said[-6000:]
    check_findings("meta", said)


def check_findings(device: str, said: str) -> None:
    for law, least in EQUAL[device].items():
        (equal,) = re.findall(rf"^{law} +(\d+) ", said, re.MULTILINE)
        assert int(equal) >= least
    for names, reason in re.findall(r"^device[a-z-]* compared nothing of \d+ \((.*)\): (.*)$", said, re.MULTILINE):
        if reason.startswith("plain torch"):
            assert set(names.split(", ")) <= NOT_COMPARABLE[device][reason]
        elif reason == "the CPU raises":
            assert all(name.startswith("jiterator") for name in names.split(", "))
        else:
            assert reason in ("no tensor of two elements to mask", "no gradient")
