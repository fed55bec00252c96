"""Compiled graphs on disk, found again by other processes: for the rules, the library and the sizes that made them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import fresh_cache

from benchmarks.compile import start
from compiled_regions import same, upper_left
from repository import ROOT
from storages import STORAGES

pytestmark = pytest.mark.usefixtures("fresh_compiler")
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
    for changed in ("masked_dispatch/metrics.py", "op_registry/ops/elementwise/pointwise.py"):
        with (other / changed).open("a", encoding="utf-8") as source:
            source.write("# another version\n")
        assert run(cache, other) == RIGHT | COMPILED
        assert run(cache, other) == RIGHT | FOUND


@pytest.mark.parametrize("storage", ["coo", "csc"])  # whose index tensors do not have the sizes of all dimensions
def test_a_cached_graph_is_not_taken_for_one_of_other_sizes(storage: str) -> None:
    with fresh_cache():
        for sizes in ((4, 6), (4, 8), (6, 6), (4, 6)):
            torch.compiler.reset()
            x = STORAGES[storage](upper_left(*sizes))
            found = torch.compile(lambda x: x.exp(), fullgraph=True)(x)
            assert found.shape == x.shape
            same(found.to_dense(), x.exp().to_dense())


@pytest.mark.parametrize("kind", ["plain", "masked"])
def test_as_many_graphs_of_a_model_are_found_as_of_plain_tensors(kind: str, tmp_path: Path) -> None:
    first, second = (start("MLP", kind, str(tmp_path)) for _ in range(2))
    assert (first["misses"], first["hits"]) == (1, 0)
    assert (second["misses"], second["hits"]) == (0, 1)
