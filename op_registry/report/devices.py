"""``check --device``: every entry on another device, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from op_registry.conformance.devices.available import DeviceMissing, device_called
from op_registry.conformance.devices.comparison import Finding, findings
from op_registry.conformance.devices.xla import OnXla
from op_registry.conformance.samples import operator_named
from op_registry.conformance.subjects import find_subject
from op_registry.progress import Bar
from op_registry.report.as_json import of_devices

WHATS = ("results", "gradients")


def run(
    names: Sequence[str], device: str, subject: str | None = None, sample: int | None = None, as_json: bool = False
) -> int:
    """Compare entries on a device, and print the findings; the exit status is 1 if one differs.

    A device that this machine lacks is skipped: its name and torch's reason are printed.
    """
    try:
        there = device_called(device)
    except DeviceMissing as reason:
        skipped = f"no device {device} on this machine ({reason})"
        print(of_devices([], device, skipped) if as_json else f"skipped: {skipped}")
        return 0
    found = list(compared(names, there, subject, sample))
    print(of_devices(found, device) if as_json else summary(found, device, reasons=len(names) == 1))
    return 1 if any(finding.status == "different" for finding in found) else 0


def compared(
    names: Sequence[str], device: torch.device, subject: str | None = None, sample: int | None = None
) -> Iterable[Finding]:
    """The findings of each entry."""
    tested = find_subject(subject)
    comparison = OnXla if device.type == "jax" else None
    with Bar(len(names), "entry") as bar:
        for name in names:
            yield from findings(operator_named(name), device, tested, sample, comparison)
            bar.advance(name)


def summary(found: Sequence[Finding], device: str, reasons: bool = False) -> str:
    """Counts, the entries that could not be compared, and a command for each that differs.

    With `reasons`, also a line for every other finding.
    """
    lines = []
    for what in WHATS:
        statuses = Counter(finding.status for finding in found if finding.what == what)
        lines.append(
            f"{what} on {device}: {statuses['equal']} equal to the CPU's, {statuses['refused']} refused on both, "
            f"{statuses['different']} different, {statuses['not comparable']} not comparable"
        )
        lines += [f"    {line}" for line in not_comparable([f for f in found if f.what == what])]
    for finding in found:
        if finding.status == "different":
            lines.append(f"{finding.entry}, {finding.what}: {finding.reason}\n    {repro(finding, device)}")
        elif reasons:
            lines.append(f"{finding.entry}, {finding.what}: {finding.status} {finding.reason}".rstrip())
    return "\n".join(lines)


def not_comparable(found: Iterable[Finding]) -> list[str]:
    """A line for each kind of reason, with its entries."""
    entries: dict[str, list[str]] = {}
    for finding in found:
        if finding.status == "not comparable":
            entries.setdefault(finding.reason.partition(":")[0], []).append(finding.entry)
    return [f"{reason}: {', '.join(sorted(names))}" for reason, names in sorted(entries.items())]


def repro(finding: Finding, device: str) -> str:
    """The command that repeats a finding."""
    sample = "" if finding.sample is None else f" --sample {finding.sample}"
    return f"python -m op_registry check --device {device} --op {finding.entry}{sample}"
