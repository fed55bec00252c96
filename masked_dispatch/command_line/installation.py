"""What is installed: versions, devices, the number of rules, and which optional libraries are there."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from typing import Any

import torch

from op_registry import registry

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
    found = [f"cpu ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"]
    found += [f"cuda:{n} ({torch.cuda.get_device_name(n)})" for n in range(torch.cuda.device_count())]
    found += ["mps"] if torch.backends.mps.is_available() else []
    found += [f"xpu:{n}" for n in range(torch.xpu.device_count())] if torch.xpu.is_available() else []
    return found


def extras() -> dict[str, dict[str, str | None]]:
    """For each extra, its libraries with their versions; None for a library that is not installed."""
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, dict[str, str | None]] = {}
    for requirement in required:
        match = OF_EXTRA.match(requirement)
        if match is not None:
            library, extra = match.groups()
            found.setdefault(extra, {})[library] = version_of(library)
    return found


def as_text(found: dict[str, Any]) -> str:
    """The same as lines."""
    lines = [f"{name:18}{found[name]}" for name in ("masked_dispatch", "torch", "python", "system")]
    lines += [f"{'devices' if n == 0 else '':18}{device}" for n, device in enumerate(found["devices"])]
    lines.append(f"{'rules':18}{found['rules']} overloads")
    for extra, libraries in found["extras"].items():
        there = [f"{name} {version}" for name, version in libraries.items() if version]
        missing = [name for name, version in libraries.items() if not version]
        parts = [", ".join(there), f"missing: {', '.join(missing)}" if missing else ""]
        lines.append(f"{f'[{extra}]':18}{'; '.join(filter(None, parts))}")
    return "\n".join(lines)
