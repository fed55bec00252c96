"""The device of device_in_cpp.cpp: built once for each source and torch, and given a name, once in a process.

``python tests/helpers/device_in_cpp.py [NAME…]`` compares entries of torch's database on it with the CPU, all by
default: what ``python -m op_registry check --device`` does on the devices that it knows.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

from op_registry.conformance.reference_device import Module
from op_registry.conformance.samples import database
from op_registry.conformance.trials import OF_DEVICES, Settings, run_operator
from op_registry.report import conformance
from repository import HELPERS

NAME = "cpp_device"
SOURCE = HELPERS / "device_in_cpp.cpp"


def built() -> Path:
    """The library, out of the folder for temporary files if it has been built before."""
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {torch.__file__}".encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"masked_dispatch_device_{os.getuid()}_{key}.so"
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")  # several processes may build at once
        done = subprocess.run(command(unfinished), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        unfinished.rename(library)
    return library


def command(library: Path) -> list[str]:
    """Without optimisation, and without headers of Python: 7 seconds."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "c++"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    linked = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    options = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", abi, *includes]
    return [*options, str(SOURCE), "-o", str(library), *linked, *libraries]


def set_up() -> None:
    """Make NAME a device of this process."""
    torch.ops.load_library(built())
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, Module())


if __name__ == "__main__":
    set_up()
    settings = Settings(laws=OF_DEVICES, device=NAME)
    reports = [run_operator(name, settings) for name in sys.argv[1:] or database()]
    print(conformance.summary(reports))
    sys.exit(1 if any(report.failures for report in reports) else 0)
