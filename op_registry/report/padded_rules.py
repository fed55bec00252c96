"""P9 by rule, as a page: on ragged batches, which rules are right, which refuse, and of which nothing can be asked.

In-place and out= forms have no rule of their own: they are counted apart, those of all overloads of a name together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from op_registry.conformance.report import Report
from op_registry.conformance.samples import overload_named
from op_registry.registry import registry
from op_registry.rule import packet_name
from op_registry.schema import is_inplace, is_out

COMMAND = "python -m op_registry check --law P9 --table-of-padding docs/results/padding.md"
# How many characters of a reason a line shows.
SHOWN = 110
# How the names of in-place and out= forms end.
OF_FORMS = ("_", "(out=)")


def page(reports: Sequence[Report]) -> str:
    """The page, in Markdown."""
    counts, why, unasked = _by_rule(reports)
    trials = sum(sum(c.values()) - c["not asked"] for c in counts.values())
    rules, forms = (_by_verdict({n: c for n, c in counts.items() if _is_form(n) == of}) for of in (False, True))
    every = {rule.name for rule in registry.rules()}
    lines = [
        "# A padded batch is its samples: by rule",
        "",
        f"Written by `{COMMAND}`; [conformance.md](../conformance.md) says what P9 asks.",
        f"{trials:,} ragged batches, right-, left- and centre-padded, lengths from 0, with and without missing values.",
        "",
        "| | rules | in-place and out= forms |",
        "|---|---|---|",
        *(f"| {verdict} | {len(rules.get(verdict, []))} | {len(forms.get(verdict, []))} |" for verdict in VERDICTS),
        "| called by no sample: derivatives, and forms that torch calls on other devices "
        f"| {len(every - {*counts})} | |",
    ]
    for verdict in VERDICTS[1:]:
        reasons = unasked if verdict is NOTHING else why
        for title, names in (("", rules.get(verdict)), (": in-place and out= forms", forms.get(verdict))):
            if names:
                lines += [
                    "",
                    f"## {verdict[0].upper()}{verdict[1:]}{title}",
                    "",
                    *_with_reasons(sorted(names), reasons),
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


def _by_verdict(counts: Mapping[str, Mapping[str, int]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, statuses in counts.items():
        found.setdefault(_verdict(statuses), []).append(name)
    return found


def _is_form(name: str) -> bool:
    return name.endswith(OF_FORMS)


def _name(op: str) -> str:
    """The name of an overload's rule; of an in-place form ``add_``, and of an out= form ``add(out=)``."""
    overload = overload_named(op)
    rule = registry.get(overload)
    if is_inplace(overload) or is_out(overload):
        name = packet_name(overload)
        return f"{name}{OF_FORMS[1]}" if is_out(overload) else name
    return op if rule is None else rule.name


def _by_rule(reports: Sequence[Report]) -> tuple[dict[str, Counter[str]], ...]:
    """For each rule: its trials by status, why calls were refused, and why there was nothing to ask."""
    counts: dict[str, Counter[str]] = {}
    why: dict[str, Counter[str]] = {}
    unasked: dict[str, Counter[str]] = {}
    for report in reports:
        for op, statuses in report.rules.items():
            name = _name(op)
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
