"""The results of a run as text: counts by law, failures with their repro lines, and tables by family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from op_registry.conformance.report import Outcome, Report
from op_registry.conformance.samples import database, overloads_called
from op_registry.conformance.verdict import answer_of
from op_registry.report.coverage import DTYPES, family_of


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
    lines += modes_lines(reports)
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


def modes_lines(reports: Sequence[Report]) -> list[str]:
    """Why P7 had nothing to compare, by the number of operators; and its named gaps, each with its error."""
    silent: dict[str, list[str]] = {}
    for report in reports:
        if report.silences.get("P7") and not report.asked("P7"):
            silent.setdefault(next(iter(report.silences["P7"])).partition(":")[0], []).append(report.operator)
    lines = [f"P7 compared nothing of {len(names)} ({', '.join(names)}): {why}" for why, names in silent.items()]
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
    right: dict[str, Counter[str]] = {}
    tried: dict[str, Counter[str]] = {}
    for report in reports:
        family = family_of_entry(report.operator)
        for dtype in DTYPES:
            counts = report.dtypes.get(dtype, {})
            wrong = counts.get("broken", 0) + counts.get("error", 0) + counts.get("refused", 0) + counts.get("gap", 0)
            if wrong or counts.get("pass"):
                tried.setdefault(family, Counter())[dtype] += 1
                right.setdefault(family, Counter())[dtype] += not wrong

    def row(name: str, of: Counter[str], right: Counter[str]) -> str:
        return f"| {name} | " + " | ".join(f"{right[d]} of {of[d]}" if of[d] else "" for d in DTYPES) + " |"

    lines = ["| family | " + " | ".join(DTYPES) + " |", "|---" * (len(DTYPES) + 1) + "|"]
    lines += [row(family, tried[family], right[family]) for family in sorted(tried)]
    total = (sum(counters.values(), Counter()) for counters in (tried, right))
    return "\n".join([*lines, row("**all**", *total)])
