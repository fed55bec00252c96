"""What is stored densely in compiled functions: explained as they run uncompiled, logged by their graphs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import masked_dispatch as md
from explained_operands import stored

aten = torch.ops.aten


scan, softmax = torch.compile(torch.cumsum), torch.compile(torch.nn.Softmax(1))
COMPILED: dict[str, Any] = {
    "function": lambda x: md.explain(scan, x, 1),
    "module": lambda x: md.explain(softmax, x),
    "inside a function": lambda x: md.explain(lambda t: scan(t, 1), x),
}


@pytest.mark.parametrize("explained", COMPILED.values(), ids=COMPILED)
def test_a_compiled_function_is_explained_uncompiled_and_says_so(explained: Any) -> None:
    explanation = explained(stored("sparse_csr"))
    assert explanation.steps[0].op in (aten.cumsum.default, aten.softmax.int, aten._softmax.default)
    assert "(explained as it runs uncompiled; what a compiled graph stores densely is in the log of" in str(explanation)


def test_a_graph_with_symbolic_sizes_logs_without_a_guard(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(lambda t, w: F.conv1d(t, w), backend="aot_eager", fullgraph=True, dynamic=True)
    with caplog.at_level(logging.INFO, logger="masked_dispatch.densification"):
        for rows in (4, 6):  # every size another number, or torch takes two for one
            data = torch.arange(11.0 * rows).reshape(rows, 11)
            given = md.masked_tensor(data, data % 3 == 0).to_sparse_csr()
            with torch.compiler.set_stance("fail_on_recompile" if rows == 6 else "default"):
                compiled(given, torch.randn(13, rows, 2))
    assert any("aten.conv1d.default stores shape" in r.getMessage() for r in caplog.records)
