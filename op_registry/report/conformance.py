"""The results of `check`: counts by law, failures with their repro lines, and tables of rules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from op_registry.conformance.laws import LAWS
from op_registry.conformance.mutants import Fate, alarms
from op_registry.conformance.samples import database, overload_named, overloads_called
from op_registry.conformance.trials import OF_DEVICES
from op_registry.conformance.verdict import Outcome, Report, answer_of
from op_registry.registry import registry
from op_registry.report.coverage import DTYPES, by_family, family_of, grouped
from op_registry.rule import packet_name
from op_registry.schema import is_inplace, is_out


def by_operator(reports: Sequence[Report]) -> list[Report]:
    """One report for each operator, merged from those for its dtypes."""
    merged: dict[str, Report] = {}
    for report in reports:
        name = report.operator.partition("@")[0]
        merged.setdefault(name, Report(name)).add(report)
    return list(merged.values())


def summary(reports: Sequence[Report]) -> str:
    """Counts by law and by operator, calls without an oracle, and the first failure of each law with its repro line."""
    totals: dict[str, Counter[str]] = {}
    for report in reports:
        for law, counts in report.counts.items():
            totals.setdefault(law, Counter()).update(counts)
    lines = ["law   passed   failed  refused     gaps  not asked"]
    for law in sorted(totals):
        c = totals[law]
        passed, failed = c["pass"] + c["refused rightly"], c["broken"] + c["error"]
        lines.append(f"{law}  {passed:8d} {failed:8d} {c['refused']:8d} {c['gap']:8d} {c['not asked']:10d}")
    ended = Counter(map(_worst, reports))
    tried = len(reports) - ended["untried"]
    lines.append(
        f"{len(reports)} operators: {ended['right']} right in every trial{_share(ended['right'], tried)}, "
        f"{ended['refused']} refuse some, {ended['failing']} fail some, {ended['gap']} have named gaps, "
        f"{ended['untried']} had nothing to try"
    )
    reasons: Counter[str] = Counter()
    for report in reports:
        reasons.update(report.reasons)
    no_oracle = Counter({reason: count for reason, count in reasons.items() if reason.startswith("no oracle")})
    if no_oracle:
        lines.append(f"P2 had no oracle in {sum(no_oracle.values())} trials, for {len(no_oracle)} reasons:")
        lines += [f"    {count:5d}  {reason.removeprefix('no oracle: ')}" for reason, count in no_oracle.most_common()]
    lines += storage_lines(reports)
    lines += silent_lines(reports)
    undecided = Counter(law for r in reports for law in r.counts if answer_of(r, law).decision == "undecided")
    if undecided:
        lines.append("undecided: " + ", ".join(f"{law} of {n} operators" for law, n in sorted(undecided.items())))
    for report in reports:
        shown: dict[str, Outcome] = {}
        for outcome in report.failures:
            shown.setdefault(outcome.law, outcome)
        for law, outcome in shown.items():
            number = sum(o.law == law for o in report.failures)
            more = f" (and {number - 1} more)" if number > 1 else ""
            lines.append(f"{report.operator} {law}: {outcome.message}{more}\n    {outcome.repro}")
    return "\n".join(lines)


def as_values(reports: Sequence[Report], holds: bool) -> dict[str, Any]:
    """The same as values: for each operator and law, the decision, the trials by status, and those that failed."""
    return {"holds": holds, "operators": [_values(report) for report in reports]}


def _values(report: Report) -> dict[str, Any]:
    answers = [answer_of(report, law) for law in LAWS if law in report.counts or law in report.exemptions]
    laws = {
        answer.law: {
            "decision": answer.decision,
            "reason": answer.reason,
            "trials": report.counts.get(answer.law, {}),
            "failures": [
                {"message": outcome.message, "sample": outcome.description, "repeat": outcome.repro}
                for outcome in answer.failures
            ],
        }
        for answer in answers
    }
    return {"operator": report.operator, "laws": laws, "seconds": round(report.seconds, 3)}


def _worst(report: Report) -> str:
    """The worst that happened to an operator: failing, refused, gap, right, or untried."""
    if report.failures:
        return "failing"
    for status in ("refused", "gap"):
        if report.count(status):
            return status
    return "right" if report.count("pass") or report.count("densified") else "untried"


def _share(part: int, of: int) -> str:
    return f" ({100 * part / of:.2f} % of {of})" if of else ""


def silent_lines(reports: Sequence[Report]) -> list[str]:
    """Why P7, or a comparison with the CPU, had nothing to compare, by the number of operators; named gaps of P7."""
    lines = []
    for law in ("P7", *OF_DEVICES):
        unasked = (r for r in reports if r.silences.get(law) and not r.asked(law))
        silent = grouped((next(iter(r.silences[law])).partition(":")[0], r.operator) for r in unasked)
        lines += [f"{law} compared nothing of {len(n)} ({', '.join(n)}): {why}" for why, n in silent.items()]
    gaps = [o for r in reports for o in r.outcomes if o.law == "P7" and o.status == "gap"]
    return lines + [f"gap in P7: {o.message}\n    {o.repro}" for o in gaps]


def storage_lines(reports: Sequence[Report]) -> list[str]:
    """For each storage of P4, how many operators never, sometimes and always needed dense storage."""
    counted: dict[str, Counter[str]] = {}
    for report in reports:
        for storage, statuses in report.storages.items():
            sparse, dense = statuses.get("pass", 0), statuses.get("densified", 0)
            if sparse or dense:
                how = "never" if not dense else "sometimes" if sparse else "always"
                counted.setdefault(storage, Counter())[how] += 1
    return [
        f"stored as {storage}: {c['never']} operators never had to be stored densely, {c['sometimes']} sometimes, "
        f"{c['always']} always"
        for storage, c in counted.items()
    ]


def storage_shares(reports: Sequence[Report]) -> dict[str, dict[str, tuple[int, int, int]]]:
    """For each operator and layout, how many trials of P4 stayed sparse, how many ran, and how many were refused."""

    def share(c: Mapping[str, int]) -> tuple[int, int, int]:
        stayed = c.get("pass", 0)
        return stayed, stayed + c.get("densified", 0), c.get("refused", 0)

    return {r.operator: {layout: share(counts) for layout, counts in r.storages.items()} for r in reports}


def family_of_entry(name: str) -> str:
    """The family of rules that an entry calls most often."""
    entry = name.partition("@")[0].partition("+")[0]
    overloads = overloads_called(entry) if entry in database() else ()
    families = Counter(f for op in overloads if (f := family_of(op)))
    return families.most_common(1)[0][0] if families else "no rule"


def table(reports: Sequence[Report]) -> str:
    """Markdown: for each family and dtype, how many of the tested entries are right in every trial."""

    def cell(reports: Sequence[Report], dtype: str) -> str:
        verdicts = [right for report in reports if (right := _is_right(report, dtype)) is not None]
        return f"{sum(verdicts)} of {len(verdicts)}" if verdicts else ""

    tried = [r for r in reports if any(_is_right(r, dtype) is not None for dtype in DTYPES)]
    of_family = [(family_of_entry(report.operator), report) for report in tried]
    return by_family(of_family, ("family", *DTYPES), cell, "**all**").markdown()


def _is_right(report: Report, dtype: str) -> bool | None:
    """Whether every trial with a dtype passed; None if there was none."""
    counts = report.dtypes.get(dtype, {})
    wrong = any(counts.get(status) for status in ("broken", "error", "refused", "gap"))
    return not wrong if wrong or counts.get("pass") else None


# --------------------------------------------------------------------------------------- --table-of-padding: P9 by rule

COMMAND_OF_PADDING = "python -m op_registry check --law P9 --table-of-padding docs/results/padding.md"
# How many characters of a reason a line shows.
SHOWN = 110
# How the names of in-place and out= forms end.
OF_FORMS = ("_", "(out=)")


def page_of_padding(reports: Sequence[Report]) -> str:
    """The page, in Markdown."""
    counts, why, unasked = _by_rule(reports)
    trials = sum(sum(c.values()) - c["not asked"] for c in counts.values())
    rules, forms = (
        _by_verdict({n: c for n, c in counts.items() if n.endswith(OF_FORMS) == of}) for of in (False, True)
    )
    every = {rule.name for rule in registry.rules()}
    lines = [
        "# A padded batch is its samples: by rule",
        "",
        f"Written by `{COMMAND_OF_PADDING}`; [conformance.md](../conformance.md) says what P9 asks.",
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
    return grouped((_verdict(statuses), name) for name, statuses in counts.items())


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
    tables: tuple[dict[str, Counter[str]], ...] = ({}, {}, {})
    for report in reports:
        for table, of_report in zip(tables, (report.rules, report.refusals, report.unasked), strict=True):
            for op, counts in of_report.items():
                table.setdefault(_name(op), Counter()).update(counts)
    return tables


def _with_reasons(rules: Sequence[str], why: Mapping[str, Counter[str]]) -> list[str]:
    """The rules by reason, those of most rules first."""
    with_reasons = ((rule, why.get(rule)) for rule in rules)
    by_reason = grouped((_shortened(r.most_common(1)[0][0]) if r else "", rule) for rule, r in with_reasons)
    ordered = sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"- {reason}: {', '.join(f'`{name}`' for name in names)}" for reason, names in ordered]


def _shortened(reason: str) -> str:
    """A reason without the operator's name, shapes and numbers, in which those of one kind differ."""
    text = re.sub(r"\(`.*", "", reason.partition(": ")[2] if ": " in reason[:60] else reason)
    text = re.sub(r"x\[[^\]]*\]", "a slice", text)
    text = re.sub(r"of shape \([^)]*\)|\[[^\]]*\]|\bx\b|\d+", "…", text.partition(". ")[0]).strip()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


# -------------------------------------------------------------------------------------------------------------- mutants


def mutants_as_values(fates: Sequence[Fate], uncalled: Sequence[str]) -> dict[str, Any]:
    """The fate of each mutant, and the mutants that are not accounted for."""
    return {
        "fates": [
            {**asdict(fate.mutant), "state": fate.state, "law": fate.law, "message": fate.message} for fate in fates
        ],
        "uncalled": list(uncalled),
        "not_accounted_for": alarms(fates),
    }
