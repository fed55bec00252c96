"""What is installed, and whether the library works with it: assumptions, assignments, a sample of the laws."""

from __future__ import annotations

import functools
import platform
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from masked_dispatch.assumptions import assignments, compiler, dispatch, distributed, engine, graphs
from masked_dispatch.assumptions.checks import ASSUMPTIONS, broken_among
from masked_dispatch.compiler_internals import without_compiler_warnings
from masked_dispatch.conformance_subject import eager
from masked_dispatch.versions import TESTED
from op_registry import registry
from op_registry.conformance import check
from op_registry.conformance.own_operators import RegisteredOperator
from op_registry.conformance.samples import overload_named
from op_registry.conformance.trials import OF_DEVICES, Settings, run_operator

MODULES = (dispatch, engine, distributed, compiler, graphs)
# What torch writes with operators of its own choice, and what is easily lost; the tests try the other values too.
VALUES = ("a float", "an invalid scalar")
# CSC and BSR are written to by the rule of CSR, compiled sparse storage by the one of eager mode, in seconds each.
TARGETS = tuple(target for target in assignments.TARGETS if target not in ("csc", "bsr"))
COMPILED = ("plain", "strided")
LAWS = ("P1", "P2", "P3", "P5", "P8")
# One or two of each family. Their samples come from their schemas, so that nothing but torch is needed.
OPERATORS = (
    "add.Tensor", "exp.default", "where.self", "masked_fill.Scalar", "sum.dim_IntList", "mean.dim",
    "amax.default", "argmax.default", "median.dim", "cumsum.default", "sort.default", "_softmax.default", "mm.default",
    "linear.default", "cat.default", "view.default", "transpose.int",
    "select.int", "avg_pool2d.default", "mse_loss.default",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What one part of the examination has found.

    title    what was asked of
    asked    how many things were
    unit     what these are
    broken   a line for each that does not hold
    seconds  how long it took
    """

    title: str
    asked: int
    unit: str
    broken: tuple[str, ...]
    seconds: float


def parts() -> Iterator[Part]:
    """Every part, as it is done."""
    yield _timed("assumptions about torch", "checks", _assumptions)
    yield _timed("x[i] = v", "assignments", _assignments)
    yield _timed("laws on cpu", "operators", _laws)
    for device in other_devices():
        yield _timed(f"laws on {device}", "operators", functools.partial(_compared, device))


def _timed(title: str, unit: str, examine: Callable[[], tuple[int, list[str]]]) -> Part:
    start = time.perf_counter()
    with warnings.catch_warnings(), without_compiler_warnings():
        warnings.simplefilter("ignore")
        asked, broken = examine()
    return Part(title, asked, unit, tuple(broken), time.perf_counter() - start)


def other_devices() -> list[torch.device]:
    """The accelerators of this machine, one of each kind."""
    kinds = [("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())]
    kinds.append(("xpu", torch.xpu.is_available()))
    return [torch.device(kind) for kind, is_available in kinds if is_available]


def _assumptions() -> tuple[int, list[str]]:
    names = {module.__name__ for module in MODULES}
    examined = [assumption for assumption in ASSUMPTIONS if assumption.run.__module__ in names]
    return len(examined), broken_among(examined)


def _assignments() -> tuple[int, list[str]]:
    done = [
        assignments.tried(mode, target, VALUES)
        for mode in assignments.MODES
        for target in TARGETS
        if mode != "compiled" or target in COMPILED
    ]
    return sum(tried.calls for tried in done), [line for tried in done for line in tried.wrong]


def _laws() -> tuple[int, list[str]]:
    broken = []
    for name in OPERATORS:
        verdict = check(f"aten.{name}", subject=f"{eager.__module__}:eager", laws=LAWS, most=1)
        broken += [f"{a.operator}: {a}" for a in verdict.answers if a.decision in ("broken", "undecided")]
    return len(OPERATORS), broken


def _compared(device: torch.device) -> tuple[int, list[str]]:
    """Values, masks and gradients there against those of the CPU."""
    settings = Settings(subject=f"{eager.__module__}:eager", laws=OF_DEVICES, device=device.type)
    reports = [run_operator(RegisteredOperator(overload_named(f"aten.{name}")), settings) for name in OPERATORS]
    return len(OPERATORS), [f"{r.operator}, {o.law}: {o.message}" for r in reports for o in r.failures]


def as_document(done: list[Part]) -> dict[str, Any]:
    """The whole examination as values."""
    return {
        **machine(),
        "tested": list(TESTED),
        "holds": not any(part.broken for part in done),
        "parts": [asdict(part) for part in done],
    }


def as_line(part: Part) -> str:
    """One part in a line, and below it what is broken."""
    verdict = f"{len(part.broken)} BROKEN" if part.broken else "all hold"
    lines = [f"{part.title:26}{part.asked:5} {part.unit:12}{verdict:12}{part.seconds:6.1f} s"]
    return "\n".join([*lines, *(f"  {line}" for line in part.broken)])


def verdict(done: list[Part]) -> str:
    """What to make of it: that it works, or the lines to report."""
    facts = machine()
    if not any(part.broken for part in done):
        return f"verdict: masked_dispatch {facts['masked_dispatch']} works with torch {facts['torch']}"
    report = [
        f"verdict: masked_dispatch {facts['masked_dispatch']} does not work with torch {facts['torch']}; it was tested "
        f"with {', '.join(TESTED)}. Install one of these, and please report the lines from here on:",
        f"  python {facts['python']}, {facts['system']}, {', '.join(facts['devices'])}",
        *(f"  {part.title}: {line.splitlines()[0]}" for part in done for line in part.broken),
    ]
    return "\n".join(report)


# --------------------------------- info: versions, devices, the number of rules, and which optional libraries are there

DISTRIBUTION = "masked-dispatch"
OF_EXTRA = re.compile(r"^([\w.-]+).*;.*\bextra\s*==\s*['\"]([\w-]+)['\"]")


def info() -> dict[str, Any]:
    """Everything, as values."""
    return {**machine(), "rules": len(registry), "extras": extras()}


def machine() -> dict[str, Any]:
    """The versions of this library, torch and Python, the system, and its devices."""
    return {
        "masked_dispatch": version_of(DISTRIBUTION) or "not installed (imported from its sources)",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "devices": devices(),
    }


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def devices() -> list[str]:
    """The devices that torch has on this machine."""
    names = [f"cpu ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"]
    names += [f"cuda:{n} ({torch.cuda.get_device_name(n)})" for n in range(torch.cuda.device_count())]
    names += ["mps"] if torch.backends.mps.is_available() else []
    names += [f"xpu:{n}" for n in range(torch.xpu.device_count())] if torch.xpu.is_available() else []
    return names


def extras() -> dict[str, dict[str, str | None]]:
    """For each extra, its libraries with their versions; None for a library that is not installed."""
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    libraries: dict[str, dict[str, str | None]] = {}
    for requirement in required:
        match = OF_EXTRA.match(requirement)
        if match is not None:
            library, extra = match.groups()
            libraries.setdefault(extra, {})[library] = version_of(library)
    return libraries


def as_text(facts: dict[str, Any]) -> str:
    """The same as lines."""
    lines = [f"{name:18}{facts[name]}" for name in ("masked_dispatch", "torch", "python", "system")]
    lines += [f"{'devices' if n == 0 else '':18}{device}" for n, device in enumerate(facts["devices"])]
    lines.append(f"{'rules':18}{facts['rules']} overloads")
    for extra, libraries in facts["extras"].items():
        installed = [f"{name} {version}" for name, version in libraries.items() if version]
        missing = [name for name, version in libraries.items() if not version]
        parts = [", ".join(installed), f"missing: {', '.join(missing)}" if missing else ""]
        lines.append(f"{f'[{extra}]':18}{'; '.join(filter(None, parts))}")
    return "\n".join(lines)
