"""What a second process pays to start: compiled functions out of torch's caches on disk, against plain tensors.

A first process compiles and leaves the cache; the processes after it start warm. Plain and masked take turns, and CPU
seconds of the first forward and backward are compared. (The first compilation's are printed beside.)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.harness import Goal, print_table

# Loading the compiler is not part of it: a process that does something else may have loaded it.
CHILD = """
import json, sys, time, torch
import torch._inductor.compile_fx
from torch._dynamo.utils import counters
import masked_dispatch as md
torch.set_num_threads(1)
torch.manual_seed(0)
net = {
    "MLP": lambda: torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.GELU()),
    "encoder layer": lambda: torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
}[sys.argv[1]]()
x = torch.randn(8, 16, 32)
if sys.argv[2] == "masked":
    x = md.masked_tensor(x, torch.rand(8, 16, 1) > 0.3)
run = torch.compile(lambda x: net(x).mean(), fullgraph=True)
start = time.process_time()
loss = run(x)
(loss.to_tensor(0.0) if md.is_masked_tensor(loss) else loss).backward()
seconds = time.process_time() - start
found = counters["aot_autograd"]
print(json.dumps({"seconds": seconds, "hits": found["autograd_cache_hit"],
                  "misses": found["autograd_cache_miss"] + found["autograd_cache_bypass"]}))
"""
MODELS = ("MLP", "encoder layer")
KINDS = ("plain", "masked")


def start(model: str, kind: str, cache: str) -> dict[str, Any]:
    """What a fresh process says of its first call: CPU seconds, and hits and misses of the cache in folder `cache`."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, model, kind], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(rounds: int = 3) -> list[Goal]:
    rows, goals = [], []
    for model in MODELS:
        with tempfile.TemporaryDirectory() as plain_cache, tempfile.TemporaryDirectory() as masked_cache:
            caches = {"plain": plain_cache, "masked": masked_cache}
            cold = {kind: start(model, kind, caches[kind]) for kind in KINDS}
            warm = [{kind: start(model, kind, caches[kind]) for kind in KINDS} for _ in range(rounds)]
        ratio = statistics.median(turn["masked"]["seconds"] / turn["plain"]["seconds"] for turn in warm)
        for kind in KINDS:
            seconds = statistics.median(turn[kind]["seconds"] for turn in warm)
            rows.append([model, kind, f"{cold[kind]['seconds']:.2f} s", f"{seconds:.2f} s"])
        goals.append(Goal(f"{model}: a second process starts warm, masked / plain", ratio, 1.5))
        misses = sum(turn["masked"]["misses"] for turn in warm)
        goals.append(Goal(f"{model}: graphs that a warm process compiles", misses, 0))
    print_table("first call, CPU seconds", ["model", "tensors", "first process", "later processes"], rows)
    return goals
