"""The demo's models where they are served: as a file, compiled, in C++ and as ONNX, without this library.

Python code is run there in a fresh process in which this library cannot be imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import cpp_extension

import masked_dispatch as md
from compiled_regions import masked, same
from examples.demo.models import Autoencoder, Forecaster
from exported_modules import BATCH, MODELS_OF_FRAMES, expected, pair
from repository import ROOT

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's own LeafSpec, in export and its copies
]

# -S leaves out what installs packages in editable form; the finder refuses those that lie beside torch.
REFUSING = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("masked_dispatch", "op_registry"):
            raise ModuleNotFoundError(f"{name} is not installed here")
sys.meta_path.insert(0, Refuse())
"""


def run_without_library(code: str, *arguments: str, folder: Path) -> str:
    """What `code` prints, run in `folder` with `arguments` in sys.argv[1:]; fails with its output if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(Path(torch.__file__).parents[1])}
    command = [sys.executable, "-S", "-c", REFUSING + code, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Each with the shape of an example, and that of the samples that it serves.
MODELS: dict[str, tuple[nn.Module, tuple[int, ...], tuple[int, ...]]] = {
    "Transformer": (Forecaster(length=8, horizon=3, width=8, heads=2, layers=1), (8,), (8,)),
    "autoencoder": (Autoencoder(code=4, channels=2), (1, 8, 8), (1, 8, 8)),
    "every other frame": (MODELS_OF_FRAMES["GELU"](), (21, 8), (30, 8)),
}


class Exported(NamedTuple):
    """A program, arguments of another batch size than it was exported with, and what the model gives for them."""

    program: torch.export.ExportedProgram
    arguments: tuple[Tensor, Tensor]
    wanted: tuple[Tensor, Tensor]


def parts(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.to_tensor(0.0), x.get_mask()


@pytest.fixture(scope="module", params=MODELS)
def exported(request: pytest.FixtureRequest) -> Exported:
    torch.manual_seed(0)
    net, shape, served = MODELS[request.param]
    net.eval()
    sizes = {0: torch.export.Dim("batch", min=1, max=64)}
    if served != shape:
        sizes[1] = torch.export.Dim("length", min=8)
    program = md.export(net, (masked(2, *shape),), dynamic_shapes=(sizes,))
    x = masked(5, *served)
    with torch.no_grad():
        return Exported(program, (x.to_tensor(float("nan")), x.get_mask()), parts(net(x)))


@pytest.fixture(scope="module")
def package(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program compiled by AOTInductor."""
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    torch._inductor.aoti_compile_and_package(exported.program, package_path=str(path))
    return path


SERVING = """
import sys, torch
package, compiled = sys.argv[1], sys.argv[2] == "compiled"
run = torch._inductor.aoti_load_package(package) if compiled else torch.export.load(package).module()
arguments, wanted = torch.load("wanted.pt")
torch.testing.assert_close(tuple(run(arguments)), wanted)
print("equal")
"""


def test_saved(exported: Exported, tmp_path: Path) -> None:
    same(exported.program.module()(exported.arguments), exported.wanted)
    torch.save((exported.arguments, exported.wanted), tmp_path / "wanted.pt")
    torch.export.save(exported.program, tmp_path / "model.pt2")
    assert run_without_library(SERVING, "model.pt2", "saved", folder=tmp_path) == "equal\n"


def test_compiled(exported: Exported, package: Path, tmp_path: Path) -> None:
    torch.save((exported.arguments, exported.wanted), tmp_path / "wanted.pt")
    assert run_without_library(SERVING, str(package), "compiled", folder=tmp_path) == "equal\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A C++ program that runs a package."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "c++"
    program = tmp_path_factory.mktemp("server") / "serve"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [option for path in cpp_extension.library_paths() for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    source = ROOT / "tests/helpers/serve.cpp"
    command = [compiler, "-std=c++20", "-O0", abi, *includes, str(source), "-o", str(program), *libraries]
    done = subprocess.run(
        [*command, "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return program


def test_in_cpp(exported: Exported, package: Path, server: Path, tmp_path: Path) -> None:
    torch.save(list(exported.arguments), tmp_path / "inputs.pt")
    done = subprocess.run(
        [server, package, "inputs.pt", "results.pt"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    same(torch.load(tmp_path / "results.pt", weights_only=False), list(exported.wanted))


@pytest.mark.filterwarnings("ignore")  # of the exporter and of what it imports
def test_onnx(exported: Exported, tmp_path: Path) -> None:
    onnxruntime: Any = pytest.importorskip("onnxruntime", reason="onnxruntime has no build for this Python")
    pytest.importorskip("onnxscript", reason="onnxscript has no build for this Python")
    torch.onnx.export(exported.program, f=tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    names = [entry.name for entry in session.get_inputs()]
    assert [entry.type for entry in session.get_inputs()] == ["tensor(float)", "tensor(bool)"]
    feed = dict(zip(names, (tensor.numpy() for tensor in exported.arguments), strict=True))
    same([torch.from_numpy(result) for result in session.run(None, feed)], list(exported.wanted))
    integers = {**feed, names[1]: feed[names[1]].astype("int64")}
    with pytest.raises(Exception, match="Unexpected input data type"):
        session.run(None, integers)


def test_a_saved_program_runs_without_the_library(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Softmax(-1))
    net[0].weight = nn.Parameter(masked(6, 6))
    x = masked(5, 6)
    torch.export.save(md.export(net, (masked(4, 6),), dynamic_shapes=({0: BATCH},)), tmp_path / "net.pt2")
    torch.save((pair(x), expected(net(x))), tmp_path / "wanted.pt")
    code = """
import torch
arguments, wanted = torch.load("wanted.pt")
torch.testing.assert_close(torch.export.load("net.pt2").module()(arguments), wanted)
print("equal")
"""
    assert run_without_library(code, folder=tmp_path) == "equal\n"
