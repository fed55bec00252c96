"""Run checks in the processes of a gloo group: all checks in one start of the processes, results by name.

A check is a function (rank, ranks) that raises where something is wrong. A module has them in a table, CHECKS.
"""

from __future__ import annotations

import datetime
import importlib
import json
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

Check = Callable[[int, int], None]
# Longer than any check waits for a slow process, and shorter than anybody waits for a test.
PATIENCE = datetime.timedelta(seconds=20)


class Checks(dict[str, Check]):
    """The table of a module, in which all names begin alike."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix

    def named(self, name: str) -> Callable[[Check], Check]:
        """A decorator that enters a check."""

        def enter(function: Check) -> Check:
            assert self.prefix + name not in self
            self[self.prefix + name] = function
            return function

        return enter


def run_checks(module: str, ranks: int) -> dict[str, dict[int, str | None]]:
    """For each name in the module's table CHECKS what failed on each rank, None if nothing."""
    with tempfile.TemporaryDirectory() as folder:
        # Not forked: a fork of a process whose other threads hold locks may wait for them for ever.
        multiprocessing.start_processes(_process, (module, ranks, folder), ranks, start_method="spawn")
        found = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]
    return {name: {rank: found[rank][name] for rank in range(ranks)} for name in found[0]}


def _process(rank: int, module: str, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(Path(folder) / "store"), ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    checks: dict[str, Check] = importlib.import_module(module).CHECKS
    failed: dict[str, str | None] = {}
    for name, check in checks.items():
        torch.manual_seed(rank)
        failed[name] = _failure(lambda check=check: check(rank, ranks))
        lost = _failure(distributed.barrier)
        if lost:
            failed[name] = failed[name] or lost
            break
    for name in checks.keys() - failed.keys():
        failed[name] = f"not run: the processes lost each other in {list(failed)[-1]}"
    (Path(folder) / str(rank)).write_text(json.dumps(failed))
    if not lost:
        distributed.destroy_process_group()


def _failure(run: Callable[[], Any]) -> str | None:
    try:
        run()
    except BaseException:  # torch's CheckpointException is no Exception
        return traceback.format_exc()
    return None


def impatient_group(seconds: float = 1.0) -> Any:
    """A group of all ranks that gives up soon, and that a check may break."""
    return distributed.new_group(timeout=datetime.timedelta(seconds=seconds), backend="gloo")
