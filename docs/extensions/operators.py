"""Writes docs/operators.md from the rule book: ``python docs/extensions/operators.py``.

A family of operators is a section. It begins with the law of the family, and lists its rules by category: first the
operators that follow the category's law and nothing more, then each rule that says more, in its own words.
"""

from __future__ import annotations

import importlib
import itertools
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import masked_dispatch  # registers every rule
from op_registry.dimensions.movements import Unknown
from op_registry.laws.categories import COMPOSITE, REFUSED
from op_registry.laws.inside import rules_inside_functions
from op_registry.report.explain import gaps_of, law_of_file, never_reason, words_of
from op_registry.rule import Category, Rule
from op_registry.sparse.lowering import lowering_of, ways_of
from op_registry.sparse.record import Sparse

PAGE = Path(__file__).parents[1] / "operators.md"
WIDTH = 120
DENSELY = "stored densely"
ROLE = re.compile(r":\w+:(`[^`]*`)")
CODE = re.compile(r"``?[^`]+``?")
EQUATION = re.compile(r"[^\s`]*->[^\s`;]*[^\s`;,]|[^\s`]*->")
# The roles of an equation's letters, which the equation shows.
ROLES = re.compile(r"; (?:batch|contracted|each|indexed|scanned) (?:[\w*()]+(?:, |(?=;|$)))+(?=;|$)")
# At the beginning of a line, these would begin a list or a heading.
MARKS = re.compile(r" (?=(?:[-+*#>]|\d+\.) )")

INTRODUCTION = """\
# What each operator means

`python docs/extensions/operators.py` writes this page from the rules. It lists every operator that has a rule, by
families. [Semantics](semantics.md) defines the principles and families, and [the glossary](glossary.md) explains the
terms. `md.explain(torch.sort)` prints the same about one function, and more: which operators the function calls, and
how each of them runs in each storage.

Names are those of torch's operators (`torch.ops.aten`). In-place forms, forms with `out=` and forms that take lists of
tensors (`_foreach_…`) follow the operator of which they are forms. An operator that is not on this page is defined by
torch through other operators, and each of these follows its own rule; or it is refused.

A section begins with its law. Below the law of each category, the first items list the operators with these laws and
nothing more. Then each item adds what a rule itself says. The letter n stands for the number of valid elements of a
slice. In brackets stand the dimensions that the operator works on, exceptions to the laws, and what happens to sparse
and packed operands. In an equation, letters are dimensions. A letter that the result lacks is contracted, a capital is
a dimension along which a slice counts as a whole, and `*` stands for any number of dimensions. *Stays sparse* holds for
the calls that a lowering takes. Operands of other calls, and those that are *stored densely*, need the permission of
[`md.densify`](storage.md).
"""
PYTHON = """\
## Functions that torch writes in Python

A function that torch writes in Python follows the rules of the operators that it calls. In these functions and modules,
an operator has another rule than elsewhere, so that [the whole function follows the rule of its
family](semantics.md#functions-that-torch-writes-in-python).
"""


def page() -> str:
    families: dict[str, list[Rule]] = defaultdict(list)
    for rule in filter(lambda rule: rule.is_built_in, masked_dispatch.registry.rules()):
        families[rule.where.split("/")[2].partition(".")[0]].append(rule)
    sections = (_family(name, families[name]) for name in sorted(families))
    parts = [INTRODUCTION, *itertools.chain.from_iterable(sections), PYTHON, *_inside()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


def _family(name: str, rules: list[Rule]) -> Iterator[str]:
    yield f"## {name.replace('_', ' ').capitalize()}\n"
    by_file: dict[str, list[Rule]] = defaultdict(list)
    for rule in sorted(rules, key=lambda rule: "backward.py" in rule.where):
        by_file[rule.where.partition(":")[0]].append(rule)
    for of_file in by_file.values():
        title = _title(of_file[0])
        if len(by_file) > 1 and title.lower() != name:
            yield f"### {_markdown(title)}\n"
        for law in law_of_file(of_file[0]):
            yield _wrapped(_markdown(law))
        by_category: dict[str, list[Rule]] = defaultdict(list)
        for rule in of_file:
            by_category[rule.category.name].append(rule)
        for of_category in by_category.values():
            yield from _category(of_category[0].category, of_category)


def _title(rule: Rule) -> str:
    """How the docstring of a rule's file begins."""
    docstring = importlib.import_module(rule.where.partition(".")[0].replace("/", ".")).__doc__ or ""
    return re.split(r"[.:,;](?:\s|$)", docstring.strip().replace("`", ""), maxsplit=1)[0]


def _category(category: Category, rules: list[Rule]) -> Iterator[str]:
    facts = [_facts(rule) for rule in rules]
    dense = f" *Stored densely*: {category.why_dense}." if any(fact.endswith(DENSELY) for fact in facts) else ""
    yield _wrapped(f"**{category.name.capitalize()}**: {_markdown(category.law)}.{dense}")
    plain: dict[str, list[str]] = defaultdict(list)
    spoken: dict[tuple[str, str], list[str]] = defaultdict(list)
    for rule in rules:
        words = " ".join(words_of(rule))
        if words:
            spoken[words, _facts(rule)] += _names(rule)
        else:
            plain[_facts(rule)] += _names(rule)
    yield from (_item(names, "", facts) for facts, names in plain.items())
    yield from (_item(names, words, facts) for (words, facts), names in spoken.items())
    yield ""


def _names(rule: Rule) -> list[str]:
    return list(dict.fromkeys(op._schema.name.removeprefix("aten::").replace("::", ".") for op in rule.ops))


def _facts(rule: Rule) -> str:
    """Which dimensions the operator works on, what happens to sparse operands, and exceptions to laws."""
    if rule.category is REFUSED:
        return f"{rule.traits.reason}. {rule.traits.instead or ''}".strip()
    dims = str(rule.dims or "").removesuffix("; other dimensions are batch").removeprefix("nothing is stated: ")
    dims = ROLES.sub("", dims) if "->" in dims else dims
    if isinstance(rule.category.dims, Unknown) and rule.dims is rule.category.dims:
        dims = ""
    exceptions = dict.fromkeys(f"exception to {gap.law}: {gap.why}" for gap in gaps_of(rule.ops[0], rule))
    return "; ".join(filter(None, (dims, *exceptions, _stored(rule))))


def _stored(rule: Rule) -> str:
    """What happens to sparse operands."""
    ways = ways_of(lowering_of(rule, Sparse))
    reasons = [never_reason(way) for way in ways]
    if rule.category is COMPOSITE or None in reasons:
        return "" if rule.category is COMPOSITE else "stays sparse"
    return f"{DENSELY}: {reasons[0]}" if reasons else DENSELY


def _inside() -> Iterator[str]:
    rules = rules_inside_functions()
    for law in dict.fromkeys(law for rule in rules for law in law_of_file(rule)):
        yield _wrapped(_markdown(law))
    by_words: dict[str, tuple[list[str], list[str]]] = {}
    for rule in rules:
        conditions = ", ".join(f"{name}={value!r}" for name, value in rule.when.items())
        function = f"{rule.function_name}({conditions})" if conditions else rule.function_name
        functions, names = by_words.setdefault(" ".join(words_of(rule)), ([], []))
        functions.append(function)
        names += _names(rule)
    for words, (functions, names) in by_words.items():
        yield _item(functions, f"{_listed(names)}: {words}", "")
    yield ""


def _item(names: Iterable[str], words: str, facts: str) -> str:
    said = " ".join(filter(None, (_markdown(words), f"({_markdown(facts)})" if facts else "")))
    return _wrapped(f"- {_listed(names)}{': ' if words else ' '}{said}", "  ").rstrip("\n")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _markdown(text: str) -> str:
    text = ROLE.sub(r"\1", " ".join(text.split()))
    text = EQUATION.sub(lambda equation: f"`{equation[0]}`", text)
    pieces = CODE.split(text)
    codes = CODE.findall(text)
    escaped = [piece.replace("*", r"\*").replace("<", r"\<") for piece in pieces]
    return "".join(itertools.chain.from_iterable(itertools.zip_longest(escaped, codes, fillvalue="")))


def _wrapped(text: str, indent: str = "") -> str:
    unbroken = MARKS.sub("\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(unbroken, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
