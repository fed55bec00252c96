"""``python -m masked_dispatch``: what is installed, whether it works with this torch, and a demonstration."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from masked_dispatch.command_line import demonstration, doctor

EXIT_CODES = (
    "exit codes: 0 all is well; 1 (doctor, demo) something does not hold, or did not come out as claimed; 2 an unknown "
    "command or option"
)
EXAMPLES = {
    "info": "python -m masked_dispatch info --json",
    "doctor": "python -m masked_dispatch doctor",
    "demo": "python -m masked_dispatch demo",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m masked_dispatch",
        description=__doc__,
        epilog=f"example:\n  {EXAMPLES['demo']}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command")
    for name, what in (
        ("info", "versions, devices, the number of rules, and which optional libraries are there"),
        ("doctor", "whether the library works with the torch that is installed, on every device, within a minute"),
        ("demo", "what the library does, in a few seconds and without any file; each part checks what it claims"),
    ):
        command = commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=f"example:\n  {EXAMPLES[name]}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--json", action="store_true", help="print the results as one JSON document")
    return parser


def _info(as_json: bool) -> int:
    facts = doctor.info()
    print(_document("info", facts) if as_json else doctor.as_text(facts))
    return 0


def _doctor(as_json: bool) -> int:
    done = []
    for part in doctor.parts():
        done.append(part)
        if not as_json:
            print(doctor.as_line(part), flush=True)
    print(_document("doctor", doctor.as_document(done)) if as_json else doctor.verdict(done))
    return 1 if any(part.broken for part in done) else 0


def _demo(as_json: bool) -> int:
    done = []
    for number, part in enumerate(demonstration.parts(), 1):
        done.append(part)
        if not as_json:
            print(f"{number}. {part.title}\n{part.text}\n{'' if part.holds else 'NOT AS CLAIMED'}", flush=True)
    wrong = [part.title for part in done if not part.holds]
    if as_json:
        print(_document("demo", {"holds": not wrong, "parts": [asdict(part) for part in done]}))
    else:
        print(f"not as claimed: {', '.join(wrong)}" if wrong else f"all {len(done)} parts came out as claimed")
    return 1 if wrong else 0


def _document(command: str, fields: dict[str, object]) -> str:
    return json.dumps({"command": command, **fields}, indent=1, ensure_ascii=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    options = _parser().parse_args(argv)
    if options.command is None:
        _parser().print_help()
        return 2
    return {"info": _info, "doctor": _doctor, "demo": _demo}[options.command](options.json)


if __name__ == "__main__":
    sys.exit(main())
