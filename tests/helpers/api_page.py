"""docs/api.md, from what is public and its docstrings. ``python tests/helpers/api_page.py`` writes it."""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import Any

import torch

import masked_dispatch as md
from masked_dispatch.api import known_words
from masked_dispatch.tensor.named_pieces import NamedPieces
from repository import ROOT

PAGE = ROOT / "docs/api.md"
HEAD = """# API reference

Everything that is public: `dir(masked_dispatch)` is `masked_dispatch.__all__` is this page, and so for each module
below. `help(md.name)` says the rest: shapes, dtypes, errors. `md` is `masked_dispatch`. What operators mean is in
[semantics.md](semantics.md); rule authors' words are in [write-a-rule.md](write-a-rule.md).

## What may change before 1.0

- *Kept:* the names on this page and what their arguments mean. A name that has to go warns for one minor version first.
- *Kept:* what is valid and what its value is ([semantics.md](semantics.md)). A mended bug may change an answer; the
  changelog says so.
- *Kept:* files. Each says its version, and a later version of the library reads it.
- *May change in any minor version*, with a line in the changelog: the text of `repr`, of errors and of reports; which
  operators stay sparse, what `md.storage.choose` chooses, and other questions of speed and memory; the fields of the
  JSON that commands print; names that begin with an underscore, and modules that `dir` does not show.
- *May change:* `op_registry`, the registry and its vocabulary for rule authors, more than `masked_dispatch`.
- Versions of torch outside of those named in the README are untested.
"""


def public_modules() -> dict[str, ModuleType]:
    """The public modules by the name under which people write them."""
    inside = {f"md.{name}": getattr(md, name) for name in md.__all__ if inspect.ismodule(getattr(md, name))}
    return {"md": md, **inside}


def own_methods() -> dict[str, Any]:
    """The methods and properties of MaskedTensor that torch.Tensor does not have."""
    found = {
        name: inspect.getattr_static(md.MaskedTensor, name)
        for name in dir(md.MaskedTensor)
        if not name.startswith("_") and (name in vars(NamedPieces) or not hasattr(torch.Tensor, name))
    }
    # Names of pandas and numpy.ma raise an AttributeError that says the word used here.
    return {name: value for name, value in found.items() if type(value).__module__ != known_words.__name__}


def first_sentence(documented: object) -> str:
    """The first sentence of a docstring, on one line, without Sphinx' roles."""
    text = " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())
    sentence = re.split(r"(?<=\.) (?=[A-Z`])", text)[0].rstrip(":;")
    return re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", sentence).replace("``", "`")


def call(name: str, function: Any) -> str:
    """The name with the names and defaults of its arguments."""
    try:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    except (TypeError, ValueError):
        return name
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return f"{name}{inspect.Signature(bare)}".replace("Ellipsis", "...")


def line(name: str, value: Any) -> str:
    """The entry of a name."""
    shown = name if isinstance(value, property) or inspect.isclass(value) or not callable(value) else call(name, value)
    return f"- `{shown}`: {first_sentence(value)}"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for prefix, module in public_modules().items():
        names = [name for name in sorted(module.__all__) if not inspect.ismodule(getattr(module, name))]
        parts.append(f"## {prefix}\n\n{first_sentence(module) if module is not md else 'The library.'}\n")
        parts.append("\n".join(line(f"{prefix}.{name}", getattr(module, name)) for name in names) + "\n")
    methods = own_methods()
    parts.append(
        "## md.MaskedTensor\n\nWhat it has beside everything that `torch.Tensor` has; `x` is a masked tensor.\n"
    )
    parts.append("\n".join(line(f"x.{name}", value) for name, value in methods.items()) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
