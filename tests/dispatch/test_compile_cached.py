"""Compiled graphs in torch's caches on disk: found again by other processes, by the rules and the library alone that
made them, and for operands of the same geometry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache

import masked_dispatch as md
from compiled_regions import masked, same
from repository import ROOT
from storages import STORAGES

pytestmark = pytest.mark.usefixtures("fresh_compiler")

aten = torch.ops.aten

# A first call, forward and backward, of a function that takes a masked tensor and makes another inside.
PROCESS = """
import json, sys, torch
import masked_dispatch as md
import torch._inductor.config
from torch._dynamo.utils import counters

torch._inductor.config.cpp_cache_precompile_headers = False  # which would take longer than the rest

def region(x, data, mask):
    return ((x * 2).exp() + md.as_masked_tensor(data, mask)).sum()

if sys.argv[1] == "another rule":
    md.registry.replace(torch.ops.aten.exp.default, lambda x: x.like(x.filled(0) + 5))
mask = torch.tensor([True, True, False])
x = md.masked_tensor(torch.zeros(3), mask, requires_grad=True)
total = torch.compile(region, fullgraph=True)(x, torch.ones(3), mask)
total.backward()
found = counters["aot_autograd"]
print(json.dumps({"result": total.item(), "gradient": x.grad.to_tensor(-1.0).tolist(),
                  **{what: found[f"autograd_cache_{what}"] for what in ("hit", "miss", "bypass")}}))
"""


def run(cache: Path, root: Path = ROOT, what: str = "") -> dict[str, object]:
    """What PROCESS prints in a fresh process with the library in `root` and the cache in `cache`."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(root)}
    script = cache / "process.py"  # a file, by which its rule is known
    script.write_text(PROCESS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script, what], env=environment, cwd=cache, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return printed


RIGHT = {"result": 4.0, "gradient": [2.0, 2.0, -1.0]}
COMPILED, FOUND = {"hit": 0, "miss": 1, "bypass": 0}, {"hit": 1, "miss": 0, "bypass": 0}


@pytest.mark.slow  # half a minute: two processes that load inductor, and a C++ compiler
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    assert run(tmp_path) == RIGHT | COMPILED
    assert run(tmp_path) == RIGHT | FOUND


@pytest.mark.slow
def test_another_rule_or_another_version_of_the_library_is_compiled_anew(tmp_path: Path) -> None:
    cache, other = tmp_path / "cache", tmp_path / "other"
    cache.mkdir()
    assert run(cache) == RIGHT | COMPILED
    of_another_rule = {"result": 12.0, "gradient": [2.0, 2.0, -1.0]}
    assert run(cache, what="another rule") == of_another_rule | COMPILED
    assert run(cache, what="another rule") == of_another_rule | FOUND
    for package in ("masked_dispatch", "op_registry"):
        shutil.copytree(ROOT / package, other / package, ignore=shutil.ignore_patterns("__pycache__"))
    assert run(cache, other) == RIGHT | FOUND
    for changed in ("masked_dispatch/metrics.py", "op_registry/ops/elementwise/activations.py"):
        with (other / changed).open("a", encoding="utf-8") as source:
            source.write("# another version\n")
        assert run(cache, other) == RIGHT | COMPILED
        assert run(cache, other) == RIGHT | FOUND


def test_rules_that_no_file_has_are_never_taken_for_each_other() -> None:
    def typed(body: str) -> Callable[..., Tensor]:
        names: dict[str, Callable[..., Tensor]] = {}
        exec(compile(f"rule = lambda x: {body}", "<stdin>", "exec"), names)
        return names["rule"]

    versions = []
    for body in ("x * 2", "x * 3"):
        with md.registry.overlay() as mine:
            mine.replace(aten.exp.default, typed(body))
            versions.append(md.registry.version)
    assert len(set(versions)) == 2


def upper_left(rows: int, columns: int) -> md.MaskedTensor:
    """A masked tensor of which the same elements are valid whatever its sizes."""
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    mask[:2, :2] = True
    return masked(rows, columns, mask=mask)


@pytest.mark.parametrize("storage", STORAGES)
def test_graphs_are_told_apart_by_the_sizes_of_what_is_stored(storage: str) -> None:
    keys = {STORAGES[storage](upper_left(*sizes))._stable_hash_for_caching() for sizes in ((4, 6), (4, 8), (6, 6))}
    assert len(keys) == 3


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["coo", "csc"])  # whose index tensors do not have the sizes of all dimensions
def test_a_cached_graph_is_not_taken_for_one_of_other_sizes(storage: str) -> None:
    with fresh_cache():
        for sizes in ((4, 6), (4, 8), (6, 6), (4, 6)):
            torch.compiler.reset()
            x = STORAGES[storage](upper_left(*sizes))
            found = torch.compile(lambda x: x.exp(), fullgraph=True)(x)
            assert found.shape == x.shape
            same(found.to_dense(), x.exp().to_dense())


@pytest.mark.parametrize("later", [torch.Tensor.conj, lambda z: z.conj().imag], ids=["conjugated", "negated"])
def test_graphs_are_told_apart_by_what_torch_does_later(later: Callable[[Tensor], Tensor]) -> None:
    """Of conjugates and their imaginary parts torch keeps the data, and a note of what is to be done to it."""
    data, mask = later(torch.randn(3, dtype=torch.complex64)), torch.tensor([True, False, True])
    done = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype).copy_(data)
    noted, resolved = md.as_masked_tensor(data, mask), md.as_masked_tensor(done, mask)
    assert noted._stable_hash_for_caching() != resolved._stable_hash_for_caching()


def test_autograd_caches_tell_masks_of_one_kind_from_another() -> None:
    """AOTAutograd's cache asks for a hash: equal for equal geometry, rules and library, whatever the values."""
    x = masked()
    assert x._stable_hash_for_caching() == masked()._stable_hash_for_caching()
    others = [
        masked(4, 6, mask=None),
        masked(4, 6, mask=torch.rand(4, 1) > 0.5),
        masked(6, 4),
        masked(requires_grad=True),
        x.double(),
        x.t(),
    ]
    hashes = {o._stable_hash_for_caching() for o in (x, *others)}
    assert len(hashes) == len(others) + 1
    with md.registry.overlay() as mine:
        mine.replace(aten.exp.default, lambda x: x)
        assert x._stable_hash_for_caching() not in hashes
    assert x._stable_hash_for_caching() in hashes
