"""``python -m op_registry``: coverage, check, explain, mutants."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from op_registry.conformance import mutant_table, runner
from op_registry.conformance.masks import KINDS
from op_registry.conformance.samples import database, in_each_dtype, operator_named, operators_of, variants
from op_registry.conformance.subjects import find_subject
from op_registry.conformance.trial import storage_of
from op_registry.conformance.trials import ALL_LAWS, MODES, STORAGES, Settings, run_operator
from op_registry.conformance.verdict import Verdict
from op_registry.report import conformance as reporting
from op_registry.report import coverage, database_calls
from op_registry.report import sparse_coverage as stored_coverage
from op_registry.report.explain import explain
from op_registry.report.names import UnknownName, nearest

TIERS = {
    # A few samples of different shapes, three partial masks, float32, every law but inductor.
    "quick": Settings(most=4, masks=("unstored", "stored", "half", "slices", "empty"), also_stored=("csr", "bsr")),
    # Every sample, every mask, every dtype; on storages other than dense as many samples as quick has.
    "full": Settings(most=None, dtypes="all", modes=("aot_eager",), also_stored=("csr", "bsr", "hybrid")),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m op_registry", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    coverage = commands.add_parser("coverage", help="how each operator of torch's database is served")
    coverage.add_argument("--verbose", action="store_true", help="one line for every entry as well")
    coverage.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="measure, and write the accepted listing (tests/report/coverage.expect) and "
        "op_registry/report/database.tsv",
    )
    coverage.add_argument("--measure", action="store_true", help="run every entry's samples to find what they call")

    explain = commands.add_parser("explain", help="what an operator means: its law, rule, storage, oracle and samples")
    explain.add_argument("name", help="aten.cumsum, aten.add_.Tensor, mylib.gelu_fast, torch.cumsum, F.softmax …")
    explain.add_argument("--import", dest="modules", action="append", default=[], help="a module that registers rules")
    explain.add_argument("--no-samples", action="store_true", help="don't run the operator's samples in sparse layouts")

    check = commands.add_parser("check", help="run the laws on operators")
    check.add_argument("--op", action="append", help="an entry of the database, or an operator; all entries without it")
    check.add_argument("--law", action="append", choices=ALL_LAWS, help="only this law (may be repeated)")
    check.add_argument("--sample", type=int, help="only this sample, by its number")
    check.add_argument("--mask", action="append", choices=KINDS, help="only this kind of mask (may be repeated)")
    check.add_argument("--dtype", help="dtypes, by comma; 'preferred' or 'all'")
    check.add_argument("--mode", action="append", choices=MODES, help="modes that P7 compares with eager")
    check.add_argument(
        "--storage", action="append", help="storages for P4, P3 and P5; also those that an --import registers"
    )
    check.add_argument("--seed", type=int, default=0)
    check.add_argument("--tier", choices=tuple(TIERS), default="quick")
    check.add_argument("--most", type=int, help="samples for each operator (0: all)")
    check.add_argument("--subject", help="what is tested: an entry point, records, zeros, or module:attribute")
    check.add_argument("--import", dest="modules", action="append", default=[], help="a module that registers rules")
    check.add_argument("--workers", type=int, help="processes; 0 runs in this one")
    check.add_argument("--timeout", type=float, default=120.0, help="seconds for each operator")
    check.add_argument("--results", type=Path, help="file of results, by which a broken-off run is taken up again")
    check.add_argument(
        "--by-family", type=Path, metavar="FILE", help="write failures and refusals by family (Markdown)"
    )
    check.add_argument(
        "--table", type=Path, metavar="FILE", help="write which entries are right, by family and dtype (Markdown)"
    )
    check.add_argument(
        "--table-of-storages",
        type=Path,
        metavar="FILE",
        help="write how many trials of P4 stayed sparse (op_registry/report/sparse_coverage.tsv)",
    )
    check.add_argument("--variants", action="store_true", help="in-place and out= forms of the entries as well")
    check.add_argument("--slice", metavar="K/N", help="the K-th of N equal parts of the operators, for rotation")

    mutants = commands.add_parser("mutants", help="rules made wrong on purpose, and which law sees each")
    mutants.add_argument("--only", choices=("strangers", "rules"), help="a stranger's operators, or the built-in rules")
    mutants.add_argument("--way", action="append", help="only this way of being wrong (may be repeated)")
    mutants.add_argument("--workers", type=int, help="processes; 0 runs in this one")
    return parser


def _settings(given: argparse.Namespace) -> Settings:
    tier = TIERS[given.tier]
    most = tier.most if given.most is None else (given.most or None)
    return Settings(
        subject=given.subject,
        laws=tuple(given.law) if given.law else tier.laws,
        most=most,
        most_stored=tier.most_stored if given.most is None else most,
        masks=tuple(given.mask) if given.mask else tier.masks,
        dtypes=given.dtype or tier.dtypes,
        modes=tuple(given.mode) if given.mode else tier.modes,
        storages=tuple(given.storage) if given.storage else tier.storages,
        also_stored=tuple(given.storage) if given.storage else tier.also_stored,
        seed=given.seed,
        sample=given.sample,
        each_overload_once=not given.op,
        modules=tuple(given.modules),
    )


def _check(given: argparse.Namespace) -> int:
    for module in given.modules:
        _import(module)
    for name in given.op or ():
        _check_operator(name)
    _check_subject(given.subject, given.storage or ())
    settings = _settings(given)
    if given.op and (given.workers == 0 or len(given.op) == 1):
        verdict = Verdict(tuple(run_operator(o, settings) for name in given.op for o in operators_of(name)))
        print(verdict)
        return 0 if verdict else 1
    everything = [*database(), *variants()] if given.variants else list(database())
    names = [operator_named(name).name for name in given.op] if given.op else everything
    if settings.dtypes == "all":
        names = [piece for name in names for piece in in_each_dtype(name)]
    if given.slice:
        part, _, parts = given.slice.partition("/")
        names = names[int(part) % int(parts) :: int(parts)]
    reports = reporting.by_operator(
        runner.run(names, settings, workers=given.workers, timeout=given.timeout, results=given.results, progress=True)
    )
    print(reporting.summary(reports))
    if given.by_family is not None:
        given.by_family.write_text(reporting.summary(reports) + "\n" + reporting.by_family(reports) + "\n")
    if given.table is not None:
        given.table.write_text(reporting.table(reports) + "\n")
    if given.table_of_storages is not None:
        given.table_of_storages.write_text(stored_coverage.written(reporting.storage_shares(reports)) + "\n")
    return 1 if any(r.failures for r in reports) else 0


def _mutants(given: argparse.Namespace) -> int:
    text, accounted_for = mutant_table.report(
        given.only != "rules", given.only != "strangers", given.way, given.workers
    )
    print(text)
    return 0 if accounted_for else 1


def _explain(given: argparse.Namespace) -> int:
    for module in given.modules:
        _import(module)
    print(explain(given.name, samples=not given.no_samples))
    return 0


def _coverage(given: argparse.Namespace) -> int:
    calls = coverage.measure() if given.measure or given.write is not None else None
    if given.write is not None and calls is not None:
        given.write.write_text(coverage.expectation(calls) + "\n")
        database_calls.KNOWN.write_text(
            database_calls.written(calls, f"python -m op_registry coverage --write {given.write}")
        )
        return 0
    print(coverage.report(given.verbose, calls))
    return 0


def _import(module: str) -> None:
    """Import a module that registers rules; UnknownName where there is none."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another one
        raise UnknownName(f"no module is called {module} (--import), as seen from {Path.cwd()}") from None


def _check_operator(name: str) -> None:
    """UnknownName for an operator that there is not, with the nearest names."""
    try:
        operator_named(name)
    except (LookupError, AttributeError) as error:
        plain = name.partition("@")[0].partition("+")[0]
        raise UnknownName(f"{error.args[0]}{'' if plain in database() else nearest(plain, database())}") from None


def _check_subject(name: str | None, storages: Sequence[str]) -> None:
    """UnknownName for a subject that there is not, or a storage that it does not know."""
    try:
        subject = find_subject(name)
    except (LookupError, ModuleNotFoundError, AttributeError, TypeError) as error:
        raise UnknownName(f"--subject {name}: {error.args[0]}" if name else str(error.args[0])) from None
    for storage in storages:
        if not subject.can_store(storage_of(storage)[0]):
            raise UnknownName(f"there is no storage {storage}; there are {', '.join(STORAGES)}")


COMMANDS = {"coverage": _coverage, "check": _check, "explain": _explain, "mutants": _mutants}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. The exit status is 1 where a law is broken, and 2 where a name is unknown, said in one line."""
    given = _parser().parse_args(argv)
    try:
        return COMMANDS[given.command](given)
    except UnknownName as error:
        print(f"python -m op_registry {given.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
