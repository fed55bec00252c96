"""The one-pass kernels of kernels.cpp, compiled on first use and called on torch tensors: the limit of the figures."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp-simd"]
# What of -ffast-math lets sums be vectorised; NaN and inf keep their meaning.
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"]

# Operations whose result has the rows' length; the others give one number a row.
ELEMENTWISE_RESULT = frozenset({"softmax", "layer_norm"})


def compiler() -> str:
    """The C++ compiler: $CXX, or the first of g++, clang++ and c++ that is installed."""
    named = os.environ.get("CXX")
    found = named or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    if found is None:
        raise RuntimeError("the one-pass kernels need a C++ compiler: install g++ or clang, or set CXX")
    return found


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels; built once for each version of the source and each machine."""
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode() + os.uname().nodename.encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"masked_dispatch_kernels_{os.getuid()}_{key}.so"
    if not built.exists():
        unfinished = built.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler(), *FLAGS, str(SOURCE), "-o", str(unfinished)], check=True)
        unfinished.rename(built)
    return ctypes.CDLL(str(built))


def _function(name: str) -> ctypes._NamedFuncPointer:
    return getattr(library(), {"std": "std_", "std_backward": "std__backward"}.get(name, name))


def _address(t: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr())


class OnePass:
    """One operation over the last dimension of float32 `x` where int8 `mask` is 1, into memory kept for it."""

    def __init__(self, name: str, x: Tensor, mask: Tensor) -> None:
        assert (x.dtype, mask.dtype) == (torch.float32, torch.int8)
        assert x.is_contiguous()
        assert mask.is_contiguous()
        self.x, self.mask = x, mask
        rows, length = x.shape
        self.out = torch.empty_like(x) if name in ELEMENTWISE_RESULT else x.new_empty(rows)
        self.gradient = torch.empty_like(x)
        self._sizes = (ctypes.c_int64(rows), ctypes.c_int64(length))
        self._forward, self._backward = _function(name), _function(f"{name}_backward")

    def forward(self) -> Tensor:
        self._forward(_address(self.x), _address(self.mask), _address(self.out), *self._sizes)
        return self.out

    def forward_backward(self, g: Tensor) -> Tensor:
        """The gradient of `x`, given the gradient `g` of the result."""
        out = self.forward()
        arguments = (self.x, self.mask, out, g, self.gradient)
        self._backward(*(_address(t) for t in arguments), *self._sizes)
        return self.gradient


def rows_of_csr(name: str, ends: Tensor, values: Tensor, out: Tensor) -> None:
    """One number for each row of a CSR matrix: "csr_sum" or "csr_amax" of float32 `values`, int64 `ends`."""
    _function(name)(_address(ends), _address(values), _address(out), ctypes.c_int64(out.shape[0]))


def csr_matmul(ends: Tensor, columns: Tensor, values: Tensor, dense: Tensor, out: Tensor) -> None:
    """A CSR matrix by a dense one, whose width is a multiple of 128."""
    rows, width = out.shape
    assert width % 128 == 0
    pieces = (_address(t) for t in (ends, columns, values, dense, out))
    _function("csr_matmul")(*pieces, ctypes.c_int64(rows), ctypes.c_int64(width))
