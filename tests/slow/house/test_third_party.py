"""Operators of another library: each test has a name, a wrong rule fails by it, and the line that it prints repeats it.

examples/third_party has the right rules and its own suite (`make third-party`), tests/helpers the wrong ones.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from repository import HELPERS, ROOT

THIRD_PARTY = ROOT / "examples" / "third_party"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process that sees this checkout, the other library and the tests."""
    path = os.pathsep.join(map(str, (ROOT, THIRD_PARTY, HELPERS)))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=THIRD_PARTY,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


def pytest_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "pytest", "-p", "op_registry_pytest", "-p", "no:cacheprovider", "-q", *arguments)


@pytest.fixture(scope="module")
def broken() -> subprocess.CompletedProcess[str]:
    """The suite on wrong rules, on dense storage and CSR."""
    file = str(HELPERS / "third_party_with_broken_rules.py")
    return pytest_run(
        file,
        "-rfE",
        "--op-registry-laws",
        "P1,P2,P3,P4",
        "--op-registry-layouts=dense,csr",
        "--rootdir",
        str(THIRD_PARTY),
    )


def failed(said: str) -> set[str]:
    """Operator, law and layout of each failing test."""
    return {m[1] for m in re.finditer(r"^FAILED .*\[third_party\.(.*)-float32-cpu\]", said, re.MULTILINE)}


def test_each_wrong_rule_fails_by_name(broken: subprocess.CompletedProcess[str]) -> None:
    assert broken.returncode == 1, broken.stdout + broken.stderr
    found = failed(broken.stdout)
    expected = {
        "soft_sign": {"P1", "P2", "P3-dense"},
        "noisy_or": {"P2"},
        "weighted_mean": {"P2"},
        "row_dot": {"P4-csr"},
    }
    for operator, laws in expected.items():
        assert {f"{operator}.default-{law}" for law in laws} <= found, broken.stdout
    # What is right about them still holds: the dense rule of row_dot, and the others where all is valid.
    right = {"row_dot.default-P1", "row_dot.default-P2", "row_dot.default-P3-dense", "noisy_or.default-P1"}
    assert not right & found


def test_the_table_names_the_broken_laws(broken: subprocess.CompletedProcess[str]) -> None:
    table = broken.stdout.partition("op_registry: results by operator and law")[2].splitlines()
    assert table[1].split() == ["P1", "P2", "P3", "P4"]
    rows = {line.split()[0]: line.split()[1:] for line in table[2:6]}
    assert rows["third_party.row_dot.default"][:2] == ["holds", "holds"]
    assert rows["third_party.row_dot.default"][3] == "broken"
    assert rows["third_party.noisy_or.default"][:2] == ["holds", "broken"]


@pytest.mark.parametrize("operator", ["soft_sign", "row_dot"])
def test_the_line_that_a_failure_prints_repeats_it(operator: str, broken: subprocess.CompletedProcess[str]) -> None:
    law = "P4" if operator == "row_dot" else "P2"
    line = re.search(
        rf"python (-m op_registry check .*--op third_party\.{operator}\.default --law {law} .*)", broken.stdout
    )
    assert line is not None, broken.stdout
    assert "--import third_party_with_broken_rules" in line[1]
    again = run(*shlex.split(line[1]), "--subject", "masked_dispatch.conformance_subject:eager")
    assert again.returncode == 1, again.stdout + again.stderr
    assert f"{law} broken" in again.stdout
    assert "   1 trials" in again.stdout


def test_op_registry_does_not_need_pytest() -> None:
    done = run("-c", "import sys; sys.modules['pytest'] = None; import masked_dispatch, op_registry.testing")
    assert done.returncode == 0, done.stderr


def test_the_plugin_does_not_load_torch() -> None:
    done = run("-c", "import sys, op_registry_pytest; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_laws_are_asked_on_another_device() -> None:
    file = str(HELPERS / "third_party_on_reference_device.py")
    done = pytest_run(file, "-rp", "--op-registry-devices=reference", "--rootdir", str(THIRD_PARTY))
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(
        r"^PASSED .*\[third_party\.(\w+)\.default-(\w+)(?:-\w+)?-float\d\d-reference\]", done.stdout, re.MULTILINE
    )
    assert len(passed) == 4 * (3 + 3 + 2 + 3)
    assert {law for _, law in passed} == {"P1", "P2", "P3", "P4", "P5", "P8"}
