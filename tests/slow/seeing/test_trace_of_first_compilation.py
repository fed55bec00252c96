"""A trace of what is compiled for the first time inside of it, in a process that has not loaded the compiler."""

from __future__ import annotations

import subprocess
import sys

FIRST_COMPILED_INSIDE = """
import sys, torch, masked_dispatch as md
assert "torch._dynamo" not in sys.modules
x = md.from_lengths(torch.ones(2, 3), torch.tensor([3, 1]))
layer = torch.nn.Linear(3, 2)
with md.trace() as t:
    compiled = torch.compile(lambda x: layer(x * 2), backend="aot_eager", fullgraph=True)
    compiled(x)
    compiled(x)
print([call.name for call in t.calls])
"""


def test_what_is_compiled_for_the_first_time_inside_a_trace() -> None:
    """The first run goes into a graph, and says so; the next run is seen."""
    done = subprocess.run([sys.executable, "-c", FIRST_COMPILED_INSIDE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str(
        [
            "compiled region: its calls go into a graph and are not seen; run it again, or uncompiled, to see them",
            "aten.mul.Tensor",
            "Linear",
            "aten.linear.default",
        ]
    )
