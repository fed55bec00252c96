"""P9 by rule, as a page: on ragged batches, which rules are right, which refuse, and of which nothing can be asked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from op_registry.conformance.report import Report
from op_registry.conformance.samples import overload_named
from op_registry.registry import registry

COMMAND = "python -m op_registry check --law P9 --table-of-padding docs/results/padding.md"
# How many characters of a reason a line shows.
SHOWN = 110


def page(reports: Sequence[Report]) -> str:
    """The page, in Markdown."""
    counts, why, unasked = _by_rule(reports)
    trials = sum(sum(c.values()) - c["not asked"] for c in counts.values())
    verdicts: dict[str, list[str]] = {}
    for rule, statuses in counts.items():
        verdicts.setdefault(_verdict(statuses), []).append(rule)
    every = {rule.name for rule in registry.rules()}
    lines = [
        "# A padded batch is its samples: by rule",
        "",
        f"Written by `{COMMAND}`; [conformance.md](../conformance.md) says what P9 asks.",
        f"{trials:,} ragged batches, right-, left- and centre-padded, lengths from 0, with and without missing values.",
        "",
        "| | rules |",
        "|---|---|",
        *(f"| {verdict} | {len(verdicts.get(verdict, []))} |" for verdict in VERDICTS),
        f"| called by no sample: derivatives, and forms that torch calls on other devices | {len(every - {*counts})} |",
    ]
    for verdict in VERDICTS[1:]:
        rules = sorted(verdicts.get(verdict, []))
        if rules:
            lines += [
                "",
                f"## {verdict[0].upper()}{verdict[1:]}",
                "",
                *_with_reasons(rules, unasked if verdict is NOTHING else why),
            ]
    uncalled = ", ".join(f"`{name}`" for name in sorted(every - {*counts}))
    lines += ["", "## Called by no sample", "", uncalled]
    return "\n".join(lines)


RIGHT, IN_PART, REFUSED, NOTHING, BROKEN = VERDICTS = (
    "right in every batch",
    "right, or refused",
    "refused",
    "nothing to ask",
    "broken",
)


def _verdict(statuses: Mapping[str, int]) -> str:
    if statuses.get("broken") or statuses.get("error"):
        return BROKEN
    if statuses.get("pass"):
        return IN_PART if statuses.get("refused rightly") else RIGHT
    return REFUSED if statuses.get("refused rightly") else NOTHING


def _by_rule(reports: Sequence[Report]) -> tuple[dict[str, Counter[str]], ...]:
    """For each rule: its trials by status, why calls were refused, and why there was nothing to ask."""
    counts: dict[str, Counter[str]] = {}
    why: dict[str, Counter[str]] = {}
    unasked: dict[str, Counter[str]] = {}
    for report in reports:
        for op, statuses in report.rules.items():
            rule = registry.get(overload_named(op))
            name = op if rule is None else rule.name
            counts[name] = counts.get(name, Counter()) + Counter(statuses)
            why[name] = why.get(name, Counter()) + Counter(report.refusals.get(op, {}))
            unasked[name] = unasked.get(name, Counter()) + Counter(report.unasked.get(op, {}))
    return counts, why, unasked


def _with_reasons(rules: Sequence[str], why: Mapping[str, Counter[str]]) -> list[str]:
    """The rules by reason, those of most rules first."""
    by_reason: dict[str, list[str]] = {}
    for rule in rules:
        reasons = why.get(rule)
        reason = _shortened(reasons.most_common(1)[0][0]) if reasons else ""
        by_reason.setdefault(reason, []).append(rule)
    ordered = sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"- {reason}: {', '.join(f'`{name}`' for name in names)}" for reason, names in ordered]


def _shortened(reason: str) -> str:
    """A reason without the operator's name, shapes and numbers, in which those of one kind differ."""
    text = re.sub(r"\(`.*", "", reason.partition(": ")[2] if ": " in reason[:60] else reason)
    text = re.sub(r"x\[[^\]]*\]", "a slice", text)
    text = re.sub(r"of shape \([^)]*\)|\[[^\]]*\]|\bx\b|\d+", "…", text.partition(". ")[0]).strip()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
