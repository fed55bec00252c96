"""What one process compiled, another finds in the cache on disk: as many graphs as of plain tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.compile import start

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("kind", ["plain", "masked"])
def test_a_second_process_compiles_nothing(kind: str, tmp_path: Path) -> None:
    first, second = (start("MLP", kind, str(tmp_path)) for _ in range(2))
    assert (first["misses"], first["hits"]) == (1, 0)
    assert (second["misses"], second["hits"]) == (0, 1)
