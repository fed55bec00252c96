"""Finds the masked tensor to test by name, so that op_registry imports no tensor subclass."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import sys
from pathlib import Path

from op_registry.conformance.subject import Subject

GROUP = "op_registry.subjects"
SHIPPED = {
    "records": "op_registry.conformance.record_subject:records",
    "zeros": "op_registry.conformance.record_subject:zeros",
}


def find_subject(name: str | None = None) -> Subject:
    """The subject called `name`: an entry point, ``module:attribute``, ``records`` or ``zeros``.

    Without a name: the environment variable OP_REGISTRY_SUBJECT, else the entry point ``default``. LookupError if there
    is none. Bare records are not the default, because rules may obey laws on them that a masked tensor breaks.
    """
    name = name or os.environ.get("OP_REGISTRY_SUBJECT")
    declared = declared_subjects()
    if name is None and "default" not in declared:
        raise LookupError(
            f"no masked tensor to test: nothing declares the entry point 'default' in the group {GROUP!r}. Install the "
            "library that does (pip install -e . in a checkout), or choose one: subject='module:attribute' (--subject "
            "on the command line, OP_REGISTRY_SUBJECT in the environment), or subject='records' for the rules on bare "
            "records, which have dense storage and no compiled mode."
        )
    name = name or "default"
    if name not in declared and ":" not in name:
        raise LookupError(
            f"no subject is called {name!r}; use one of {', '.join(sorted(declared))}, or module:attribute"
        )
    module, _, attribute = declared.get(name, name).partition(":")
    declared_object = getattr(importlib.import_module(module), attribute)
    subject = declared_object() if isinstance(declared_object, type) else declared_object
    if not isinstance(subject, Subject):
        raise TypeError(f"{name} is {subject!r}, not an op_registry.conformance.Subject")
    return subject


def declared_subjects() -> dict[str, str]:
    """``module:attribute`` by name: the installed entry points, and those of the checkout that this file is in.

    A checkout on PYTHONPATH has no entry points, but its pyproject.toml declares them.
    """
    return SHIPPED | _declared_in_checkout() | _installed()


@functools.cache  # reading the metadata of every installed distribution takes longer than many a trial
def _installed() -> dict[str, str]:
    return {p.name: p.value for p in importlib.metadata.entry_points(group=GROUP)}


@functools.cache
def _declared_in_checkout() -> dict[str, str]:
    project = Path(__file__).parents[2] / "pyproject.toml"
    if sys.version_info < (3, 11) or not project.is_file():
        return {}  # Python 3.10 has no tomllib: install the checkout there, or pass a name
    import tomllib

    declared = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("entry-points", {})
    return dict(declared.get(GROUP, {}))
