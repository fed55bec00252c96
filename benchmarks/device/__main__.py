"""``python -m benchmarks.device``: what this library does on a device, in one command that ends in time.

Each part runs in a process of its own, which is ended when its time is up: neither a slow part nor one that breaks the
device takes anything from the others. Both files are written after each part.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.device.part import kinds_missing
from op_registry.conformance.reference_device import DeviceMissing, device_called


@dataclass(frozen=True)
class Part:
    """A module with `rows`, `summary`, `COLUMNS` and `KINDS`; and its share of the time, and that on a CPU.

    fails       whether the command fails if something is wrong in it
    only_wrong  whether the page lists what is wrong alone
    """

    name: str
    title: str
    share: float
    on_cpu: float
    fails: bool = False
    only_wrong: bool = False


PARTS = (
    Part("laws", "1. The laws, beside oracles on the CPU", 0.32, 0.2, fails=True, only_wrong=True),
    Part("compiled", "2. Compiled for the device", 0.24, 0.33, fails=True),
    Part("times", "3. Times", 0.28, 0.33),
    Part("waits", "4. Waits of the host, and memory", 0.08, 0.07, fails=True),
    Part("claims", "5. What was said of devices without having been seen", 0.08, 0.07),
)
# What a row is of that is of no single thing.
ITSELF = "the part itself"
# How long a part may take to end by itself after its time; then it is ended.
GRACE = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device",
        description="Check this library on a device, and measure it there.",
        epilog="example:\n  python -m benchmarks.device --seconds 450 --json device.json\n\n"
        "exit codes: 0 nothing is wrong, or there is no such device; 1 a law is broken, a compiled function differs, "
        "one of the forty functions waits, or a part came to nothing. Times do not fail",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="cuda (the default), cpu, or reference: written in Python")
    parser.add_argument("--seconds", type=float, default=450.0, help="for all parts together; more is not used")
    parser.add_argument("--json", type=Path, default=Path("device.json"), metavar="FILE", help="every row")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the page; default: next to the JSON file")
    parser.add_argument(
        "--part", choices=[part.name for part in PARTS], help="only this part, in this process: a row a line"
    )
    arguments = parser.parse_args()
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # float32 products as exact as the CPU's, in all processes
    try:
        there = device_called(arguments.device)
    except DeviceMissing as reason:
        print(f"nothing was checked: no device {arguments.device} on this machine ({reason})")
        return 0
    if arguments.part is not None:
        return run_part(arguments.part, arguments.device, arguments.seconds)
    return run_all(there, arguments)


def run_part(name: str, device: str, seconds: float) -> int:
    """The rows of a part, as they come; 1 if something is wrong, or it came to nothing."""
    until = time.monotonic() + seconds
    module = importlib.import_module(f"benchmarks.device.{name}")
    rows = []
    for row in module.rows(device, until):
        print(json.dumps(row), flush=True)
        rows.append(row)
    if missing := kinds_missing(module.KINDS, rows):
        print(came_to_nothing(name, missing), file=sys.stderr)
    return int(bool(missing) or any("wrong" in row for row in rows))


def came_to_nothing(name: str, missing: Sequence[str]) -> str:
    return f"part {name}: NOTHING was found in its time of {', '.join(missing)}: give more --seconds"


def run_all(there: torch.device, arguments: argparse.Namespace) -> int:
    page = arguments.markdown or arguments.json.with_suffix(".md")
    document: dict[str, Any] = {"command": "benchmarks.device", "device": about(there), "parts": {}}
    ends = time.monotonic() + arguments.seconds
    print(", ".join(f"{key} {value}" for key, value in document["device"].items()), flush=True)
    wrong = False
    for position, part in enumerate(PARTS):
        # What a part leaves over is for those after it.
        share, *others = [p.on_cpu if there.type == "cpu" else p.share for p in PARTS[position:]]
        share /= share + sum(others)
        found = rows_of(part, arguments.device, max(1.0, (ends - time.monotonic()) * share))
        document["parts"][part.name] = found
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        page.write_text(as_page(document) + "\n", encoding="utf-8")
        print(f"{part.title}: {found['summary']} ({found['seconds']} s)", flush=True)
        for row in found["rows"]:
            if "wrong" in row:
                print(f"    {row['what']}: {row['wrong']}\n        {row.get('repeat', '')}", flush=True)
                wrong = wrong or part.fails or row["what"] == ITSELF
    print(f"written: {arguments.json}, {page}")
    return int(wrong)


def about(there: torch.device) -> dict[str, Any]:
    """What all figures depend on."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "device": there.type,
        "cores": os.cpu_count(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if there.type == "cuda":
        properties = torch.cuda.get_device_properties(there)
        found["device"] = properties.name
        found["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["CUDA"] = torch.version.cuda
    return found


def rows_of(part: Part, device: str, seconds: float) -> dict[str, Any]:
    """What a part finds in its time, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.device", "--part", part.name, "--device", device]
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        budget = max(1.0, seconds - GRACE / 2)
        process = subprocess.Popen(
            [*command, "--seconds", f"{budget:.0f}"], stdout=output, stderr=errors, start_new_session=True
        )
        code: int | None
        try:
            code = process.wait(timeout=seconds + GRACE / 2)
            ended = "" if code in (0, 1) else f"its process ended with {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and the processes that it has started
            process.wait()
            code, ended = None, "its process was ended: its time was up"
        output.seek(0)
        rows = list(map(json.loads, (line for line in output if line.startswith("{"))))
        errors.seek(0)
        told = [line.strip() for line in errors if line.strip()]
        # (Processes of the compiler's warn after what the part says at its end.)
        last = [line for line in told if line.startswith(f"part {part.name}:")] or told[-1:]
    module = importlib.import_module(f"benchmarks.device.{part.name}")
    if code and not any("wrong" in row for row in rows):
        ended = f"{ended or 'it failed'}: {' '.join(last)[:300]}"
    faults = [ended] if ended and code is not None else []
    if (missing := kinds_missing(module.KINDS, rows)) and (nothing := came_to_nothing(part.name, missing)) not in ended:
        faults.append(nothing)
    said = "; ".join([module.summary(rows), *([ended] if ended else [])])
    repeat = " ".join(["python", *command[1:]])
    rows += [{"what": ITSELF, "wrong": fault, "repeat": repeat} for fault in faults]
    columns = list(dict.fromkeys([*module.COLUMNS, "failed", "not asked", "wrong"]))
    taken = round(time.monotonic() - started, 1)
    return {"title": part.title, "seconds": taken, "summary": said, "columns": columns, "rows": rows}


def as_page(document: dict[str, Any]) -> str:
    """The document in Markdown."""
    lines = ["# The check of a device", ""]
    lines += [f"{', '.join(f'{key} {value}' for key, value in document['device'].items())}.", ""]
    listed = {part.name: part.only_wrong for part in PARTS}
    for name, found in document["parts"].items():
        lines += [f"## {found['title']}", "", f"{found['summary']}. ({found['seconds']} s)", ""]
        columns = found["columns"]
        rows = [row for row in found["rows"] if "wrong" in row or not listed[name]]
        used = [column for column in columns if any(row.get(column) is not None for row in rows)]
        if rows:
            lines += ["| " + " | ".join(["", *used[1:]]) + " |", "|" + "---|" * len(used)]
            lines += ["| " + " | ".join(cell(row.get(column)) for column in used) + " |" for row in rows]
            lines.append("")
    return "\n".join(lines).rstrip()


def cell(value: object) -> str:
    return "" if value is None else " ".join(str(value).replace("|", "\\|").split())


if __name__ == "__main__":
    sys.exit(main())
