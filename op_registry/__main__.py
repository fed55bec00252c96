"""``python -m op_registry``: coverage, check, explain, mutants, fuzz."""

from __future__ import annotations

import argparse
import functools
import importlib
import io
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from op_registry.conformance import mutant_dimensions as mutant_extents
from op_registry.conformance import mutants, trials
from op_registry.conformance.law import storage_of
from op_registry.conformance.laws import LAWS
from op_registry.conformance.masks import DESCRIPTIONS, ONE_HOLE
from op_registry.conformance.mutant_ways import WAYS
from op_registry.conformance.own_operators import RegisteredOperator
from op_registry.conformance.reference_device import NAMES as DEVICES
from op_registry.conformance.reference_device import WITHOUT_LAWS, DeviceMissing, device_called
from op_registry.conformance.samples import (
    at_least_one,
    database,
    operator_named,
    operators_of,
    part,
    pieces_of,
    variants,
)
from op_registry.conformance.subject import find_subject
from op_registry.conformance.trials import MODES, OF_DEVICES, STORAGES, Settings, run_operator
from op_registry.conformance.verdict import Verdict
from op_registry.fuzz import command as fuzzing
from op_registry.report import conformance, coverage, explain, python_level
from op_registry.report.names import UnknownName, nearest

TIERS = {
    # A few samples of different kinds, six partial masks, float32; every law, P7 without inductor.
    "quick": Settings(
        most=4,
        masks=("unstored", "stored", "half", "half_values", "slices", "empty", "shared", "itself", ONE_HOLE),
        also_stored=("csr", "bsr"),
    ),
    # P7 alone, on a call of each entry's own function: how much of the database compiles.
    "compiled": Settings(laws=("P7",), whole_entries=True),
    # Every sample, mask and dtype; on storages other than dense as many samples as in quick.
    "full": Settings(most=None, dtypes="all", modes=("aot_eager",), also_stored=("csr", "bsr", "hybrid")),
}


EXIT_CODES = "exit codes: 0 nothing is wrong; 1 a law is broken, or a mutant not accounted for; 2 unknown name"
EXAMPLES = {
    "coverage": "python -m op_registry coverage --json > coverage.json",
    "explain": "python -m op_registry explain torch.cumsum",
    "check": "python -m op_registry check --op softmax --law P3",
    "mutants": 'python -m op_registry mutants --op mean --way "mask lost"',
    "fuzz": "python -m op_registry fuzz --n 200 --law P5",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m op_registry",
        description=__doc__,
        epilog=f"example:\n  {EXAMPLES['explain']}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command")

    def command(name: str, what: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=f"example:\n  {EXAMPLES[name]}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.add_argument("--json", action="store_true", help="print the results as one JSON document")
        return made

    coverage = command("coverage", "how each operator of torch's database is supported")
    coverage.add_argument("--verbose", action="store_true", help="also print a line for every entry")
    coverage.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="measure, and write the accepted listing (tests/report/coverage.expect) and "
        "op_registry/report/database.tsv; with --python-level, tests/report/python_level.expect alone",
    )
    coverage.add_argument(
        "--python-level",
        action="store_true",
        help="test the laws on the functions, modules and distributions that torch writes in Python: a minute",
    )
    coverage.add_argument(
        "--measure", action="store_true", help="run every entry's samples to find which operators they call"
    )

    explain = command("explain", "what an operator does on masked tensors: its law, rule, storage, oracle and samples")
    explain.add_argument("name", help="aten.cumsum, aten.add_.Tensor, mylib.gelu_fast, torch.cumsum, F.softmax ...")
    explain.add_argument("--import", dest="modules", action="append", default=[], help="a module that registers rules")
    explain.add_argument("--no-samples", action="store_true", help="don't run the operator's samples in sparse layouts")

    check = command("check", "run the laws on operators")
    check.add_argument(
        "--op", action="append", help="an entry of the database, or an operator (may be repeated; default: all entries)"
    )
    check.add_argument("--law", action="append", choices=LAWS, help="only this law (may be repeated)")
    check.add_argument("--sample", type=int, help="only this sample, by its number")
    masks = "; ".join(f"{kind}: {description}" for kind, description in DESCRIPTIONS.items())
    check.add_argument(
        "--mask", action="append", choices=DESCRIPTIONS, help=f"only this kind of mask (may be repeated). {masks}"
    )
    check.add_argument("--dtype", help="dtypes, separated by commas; or 'preferred', or 'all'")
    check.add_argument("--mode", action="append", choices=MODES, help="the mode that P7 compares with eager")
    check.add_argument(
        "--storage", action="append", help="a storage for P4, P3, P5 and later, also one registered by an --import"
    )
    check.add_argument("--seed", type=int, default=0)
    check.add_argument("--tier", choices=tuple(TIERS), default="quick")
    check.add_argument("--most", type=int, help="the most samples for each operator (0: all)")
    check.add_argument(
        "--subject", help="the masked tensor to test: an entry point, records, zeros or module:attribute"
    )
    check.add_argument("--import", dest="modules", action="append", default=[], help="a module that registers rules")
    check.add_argument("--workers", type=int, help="number of processes; 0 runs in this one")
    check.add_argument("--timeout", type=float, default=120.0, help="seconds for each operator")
    check.add_argument("--results", type=Path, help="file of results, with which an interrupted run resumes")
    check.add_argument(
        "--table", type=Path, metavar="FILE", help="write how many entries pass, by family and dtype (Markdown)"
    )
    check.add_argument(
        "--table-of-storages",
        type=Path,
        metavar="FILE",
        help="write how many trials of P4 stayed sparse (op_registry/report/sparse_coverage.tsv)",
    )
    check.add_argument(
        "--table-of-padding", type=Path, metavar="FILE", help="write which rules are right under P9, and which refuse"
    )
    check.add_argument("--variants", action="store_true", help="also run the in-place and out= forms of the entries")
    check.add_argument(
        "--slice", type=part, default="0/1", metavar="K/N", help="only the K-th of N equal parts of the operators"
    )
    check.add_argument("--draw", type=at_least_one, metavar="N", help="only N of the operators, drawn by the seed")
    check.add_argument(
        "--device",
        choices=DEVICES,
        help="with --law, run these laws on this device (reference: a device written in Python, which refuses operands "
        "on the CPU); without, compare one sample of each entry there with the CPU, forward and gradient, in one "
        "process, or in --workers. A device that this machine lacks is skipped",
    )

    wrong = command("mutants", "make built-in rules wrong on purpose, and print which laws notice it")
    wrong.add_argument(
        "--op", action="append", help="an entry of the database: only the rules that it calls (may be repeated)"
    )
    wrong.add_argument(
        "--only", choices=("rules", "extents"), default="rules", help="the rules, or what becomes of extents"
    )
    wrong.add_argument("--way", action="append", help="only this way of being wrong (may be repeated)")
    wrong.add_argument("--workers", type=int, help="number of processes; 0 runs in this one")

    fuzzing.add_arguments(command("fuzz", "run random programs of several operators under a law"))
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    tier = TIERS[options.tier]
    most = tier.most if options.most is None else (options.most or None)
    return Settings(
        subject=options.subject,
        laws=tuple(options.law) if options.law else OF_DEVICES if options.device else tier.laws,
        most=most,
        most_stored=tier.most_stored if options.most is None else most,
        masks=tuple(options.mask) if options.mask else tier.masks,
        dtypes=options.dtype or tier.dtypes,
        modes=tuple(options.mode) if options.mode else tier.modes,
        storages=tuple(options.storage) if options.storage else tier.storages,
        also_stored=tuple(options.storage) if options.storage else tier.also_stored,
        seed=options.seed,
        sample=options.sample,
        whole_entries=tier.whole_entries,
        each_overload_once=not options.op and not tier.whole_entries,
        modules=tuple(options.modules),
        device=options.device,
    )


def _check(options: argparse.Namespace) -> int:
    for module in options.modules:
        _import(module)
    for name in options.op or ():
        _check_operator(name)
    _check_subject(options.subject, options.storage or ())
    settings = _settings(options)
    if options.device in WITHOUT_LAWS and not set(settings.laws) <= set(OF_DEVICES):
        raise UnknownName(f"--device {options.device} has no values that a law could compare: leave out --law")
    try:
        device_called(options.device or "cpu")
    except DeviceMissing as reason:
        skipped = f"no device {options.device} on this machine ({reason})"
        _print(options, lambda: f"skipped: {skipped}", lambda: {"device": options.device, "skipped": skipped})
        return 0
    if options.op and (options.workers == 0 or len(options.op) == 1):
        verdict = Verdict(tuple(run_operator(o, settings) for name in options.op for o in operators_of(name)))
        _print(options, lambda: str(verdict), lambda: conformance.as_values(verdict.reports, bool(verdict)))
        return 0 if verdict else 1
    everything = [*database(), *variants()] if options.variants else list(database())
    names = [operator_named(name).name for name in options.op] if options.op else everything
    if settings.dtypes == "all":
        names = [piece for name in names for piece in pieces_of(name)]
    names = names[options.slice]
    if not names:
        raise UnknownName("no operator is in this part (--slice), and a check of nothing does not succeed")
    if options.draw is not None:
        names = random.Random(options.seed).sample(names, min(options.draw, len(names)))
    workers = 1 if options.device and options.workers is None else options.workers
    reports = conformance.by_operator(
        trials.run(names, settings, workers=workers, timeout=options.timeout, results=options.results)
    )
    broken = any(report.failures for report in reports)
    _print(options, lambda: conformance.summary(reports), lambda: conformance.as_values(reports, not broken))
    if options.table is not None:
        options.table.write_text(conformance.table(reports) + "\n")
    if options.table_of_padding is not None:
        options.table_of_padding.write_text(conformance.page_of_padding(reports) + "\n")
    if options.table_of_storages is not None:
        options.table_of_storages.write_text(coverage.table_of_shares(conformance.storage_shares(reports)))
    return 1 if broken else 0


def _mutants(options: argparse.Namespace) -> int:
    if options.only == "extents":
        text, every = mutant_extents.table()
        print(text)
        return 0 if every else 1
    for way in set(options.way or ()) - set(WAYS):
        raise UnknownName(f"no way of being wrong is called {way!r} (--way){nearest(way, WAYS)}")
    for name in set(options.op or ()) - set(database()):
        raise UnknownName(f"no entry of torch's database is called {name!r} (--op){nearest(name, database())}")
    jobs, uncalled = (mutants.jobs_of(options.op), []) if options.op else mutants.all_jobs()
    fates = mutants.run(jobs, options.way, options.workers)
    summary = functools.partial(mutants.summary, fates, uncalled)
    _print(options, summary, lambda: conformance.mutants_as_values(fates, uncalled))
    return 1 if mutants.alarms(fates) else 0


def _fuzz(options: argparse.Namespace) -> int:
    for module in options.modules:
        _import(module)
    _check_subject(options.subject, ())
    text, values = fuzzing.run(options)
    _print(options, lambda: text, lambda: values)
    return 1 if values["broken"] else 0


def _explain(options: argparse.Namespace) -> int:
    for module in options.modules:
        _import(module)
    name, samples = options.name, not options.no_samples
    _print(options, lambda: explain.explain(name, samples=samples), lambda: explain.as_values(name, samples))
    return 0


def _python_level(options: argparse.Namespace) -> int:
    entries = python_level.entries()
    if options.write is not None:
        options.write.write_text(python_level.expectation(entries) + "\n")
    else:
        text = functools.partial(python_level.report, entries, options.verbose)
        _print(options, text, lambda: python_level.as_values(entries), " --python-level")
    return 1 if any(entry.state == "wrong" for entry in entries) else 0


def _coverage(options: argparse.Namespace) -> int:
    if options.python_level:
        return _python_level(options)
    calls = coverage.measure() if options.measure or options.write is not None else None
    if options.write is not None and calls is not None:
        options.write.write_text(coverage.expectation(calls) + "\n")
        coverage.KNOWN.write_text(
            coverage.table_of_calls(calls, f"python -m op_registry coverage --write {options.write}")
        )
        return 0
    _print(options, lambda: coverage.report(options.verbose, calls), lambda: coverage.as_values(calls))
    return 0


def _print(
    options: argparse.Namespace, text: Callable[[], str], values: Callable[[], dict[str, Any]], way: str = ""
) -> None:
    """Print the results of a command as text, or the same as one JSON document. `way` is how the command was run."""
    if options.json:
        head = {"command": f"{options.command}{way}", "torch": torch.__version__}
        print(json.dumps({**head, **values()}, indent=1, ensure_ascii=False))
    else:
        print(text())


def _import(module: str) -> None:
    """Import a module that registers rules; UnknownName if it does not exist."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and a module that it imports does not
        raise UnknownName(f"no module is called {module} (--import); the current directory is {Path.cwd()}") from None


def _check_operator(name: str) -> None:
    """UnknownName for an unknown operator, with the nearest names."""
    try:
        operator = operator_named(name)
    except (LookupError, AttributeError) as error:
        plain = name.partition("@")[0].partition("+")[0]
        raise UnknownName(f"{error.args[0]}{'' if plain in database() else nearest(plain, database())}") from None
    if isinstance(operator, RegisteredOperator) and operator.op.namespace != "aten" and operator.rule is None:
        raise UnknownName(f"{operator.name} has no rule: register one, and name its module, --import MODULE")


def _check_subject(name: str | None, storages: Sequence[str]) -> None:
    """UnknownName for an unknown subject, or a storage that it does not support."""
    try:
        subject = find_subject(name)
    except (LookupError, ModuleNotFoundError, AttributeError, TypeError) as error:
        raise UnknownName(f"--subject {name}: {error.args[0]}" if name else str(error.args[0])) from None
    for storage in storages:
        if not subject.can_store(storage_of(storage)[0]):
            raise UnknownName(f"unknown storage {storage}; use one of {', '.join(STORAGES)}")


COMMANDS = {"coverage": _coverage, "check": _check, "explain": _explain, "mutants": _mutants, "fuzz": _fuzz}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. The exit status is 1 if a law is broken, and 2 with a one-line error if a name is unknown."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # some texts have characters that not every terminal has
    options = _parser().parse_args(argv)
    if options.command is None:
        _parser().print_help()
        return 2
    try:
        return COMMANDS[options.command](options)
    except UnknownName as error:
        print(f"python -m op_registry {options.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
