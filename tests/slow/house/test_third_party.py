"""Operators of another library: each test has a name, and a wrong rule fails by it.

examples/third_party has the right rules and its own suite (`make third-party`), tests/helpers the wrong ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

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


def test_each_wrong_rule_fails_by_name_and_in_the_table() -> None:
    """The suite on wrong rules, on dense storage and CSR."""
    chosen = ("--op-registry-laws", "P1,P2,P3,P4", "--op-registry-layouts=dense,csr")
    file = str(HELPERS / "third_party_with_broken_rules.py")
    done = pytest_run(file, "-rfE", *chosen, "--rootdir", str(THIRD_PARTY))
    assert done.returncode == 1, done.stdout + done.stderr
    found = set(re.findall(r"^FAILED .*\[third_party\.(.*)-float32-cpu\]", done.stdout, re.MULTILINE))
    assert found >= {"noisy_or.default-P2", "row_dot.default-P4-csr"}, done.stdout
    # What is right about them still holds: the dense rule of row_dot, and the other where all is valid.
    right = {"row_dot.default-P1", "row_dot.default-P2", "row_dot.default-P3-dense", "noisy_or.default-P1"}
    assert not right & found
    assert "--import third_party_with_broken_rules" in done.stdout
    table = done.stdout.partition("op_registry: results by operator and law")[2].splitlines()
    assert table[1].split() == ["P1", "P2", "P3", "P4"]
    rows = {line.split()[0]: line.split()[1:] for line in table[2:4]}
    assert rows["third_party.row_dot.default"][:2] == ["holds", "holds"]
    assert rows["third_party.row_dot.default"][3] == "broken"
    assert rows["third_party.noisy_or.default"][:2] == ["holds", "broken"]


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
