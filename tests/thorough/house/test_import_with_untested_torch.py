"""The import of the library in new processes: with a torch that is newer or older than those tested, and how long it
asks."""

from __future__ import annotations

import subprocess
import sys

from masked_dispatch.versions import TESTED
from repository import ROOT

# A torch that calls itself newer; and one whose engine is entered by another function.
NEWER = "import torch; torch.__version__ = '99.1.0'\n"
BROKEN = NEWER + (
    "from torch.autograd import graph\n"
    "engine = graph._engine_run_backward\n"
    "graph._engine_run_backward = lambda *args, **kwargs: engine(*args, **kwargs)\n"
)
# One that lacks an operator.
OLDER = (
    "import torch; torch.__version__ = '2.10.0'\n"
    "namespace = type(torch.ops.aten)\n"
    "found = namespace.__getattr__\n"
    "def get(self, name):\n"
    "    if name == '_foreach_powsum':\n"
    "        raise AttributeError(name)\n"
    "    return found(self, name)\n"
    "namespace.__getattr__ = get\n"
)


def imported(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", f"{program}import masked_dispatch"], capture_output=True, text=True)


def test_import_warns_or_refuses() -> None:
    warned = imported(NEWER)
    assert warned.returncode == 0
    assert warned.stderr.count("UntestedTorchWarning") == 1
    refused = imported(BROKEN)
    assert refused.returncode == 1
    assert "ImportError: masked_dispatch does not work with torch 99.1.0" in refused.stderr
    assert "  16. what the engine calls has its function below: torch 99.1.0 no longer holds that" in refused.stderr


def test_a_torch_without_the_operators_of_the_rules_is_refused() -> None:
    refused = imported(OLDER)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1] == (
        f"ImportError: op_registry and masked_dispatch need torch {TESTED[0].rpartition('.')[0]} or newer, and this is "
        "torch 2.10.0: it lacks operators that the rules name, such as aten._foreach_powsum. Install a newer torch."
    )


def test_what_is_asked_at_import_takes_a_tenth_of_a_second() -> None:
    program = (
        "import time, masked_dispatch\n"
        "before = set(__import__('sys').modules)\n"
        "start = time.process_time()\n"
        "from masked_dispatch.assumptions import at_import\n"
        "assert at_import.broken() == []\n"
        "print(time.process_time() - start, *sorted(set(__import__('sys').modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, *loaded = done.stdout.split()
    assert float(seconds) < 0.1
    assert [name for name in loaded if not name.startswith("masked_dispatch.assumptions")] == []


def test_make_tests_these_versions() -> None:
    shown = subprocess.run(["make", "--dry-run", "matrix"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"for torch in {' '.join(TESTED)};" in shown.stdout
