"""The registry: which rule an aten overload has, and who is told when that changes.

``registry.add(rule)`` refuses a second rule for an overload and says where the first one is; ``replace`` is the
deliberate form; ``overlay()`` gives rules that hold inside a ``with`` block. ``version`` names the present state: a
compiled graph is valid for one version only, and leaving an overlay restores the version from before it. Compilers
keep graphs on disk, so a version also means the same in every process: it is a digest of the files that rules are
written in.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from torch._ops import OpOverload

from op_registry.rule import Category, Rule, Run, written_at

Listener = Callable[[OpOverload], None]


def digest_of(*parts: str) -> str:
    """A short name for `parts`, the same in every process."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


@functools.cache
def source_digest(path: str) -> str:
    """A digest of a source file, or of every source file below a folder; of the name alone where there is none."""
    root = Path(path)
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root] if root.is_file() else []
    return digest_of(root.name, *(f.read_text(encoding="utf-8", errors="replace") for f in files))


class Registry:
    """Rules by overload. Layers let an overlay add and replace without touching what lies below."""

    def __init__(self) -> None:
        self._rules: dict[OpOverload, Rule] = {}
        self._listeners: list[Listener] = []
        self.version = source_digest(str(Path(__file__).parent))

    def __contains__(self, op: OpOverload) -> bool:
        return op in self._rules

    def __iter__(self) -> Iterator[OpOverload]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def get(self, op: OpOverload) -> Rule | None:
        """The rule written for exactly this overload, if there is one; `resolve` also knows derived forms."""
        return self._rules.get(op)

    def add(self, rule: Rule) -> Rule:
        """Register `rule` for each of its overloads; a second rule for one of them is refused."""
        for op in rule.ops:
            first = self._rules.get(op)
            if first is not None:
                raise ValueError(
                    f"{op} already has a rule, {first.category.name} at {first.where}; the second one is at "
                    f"{rule.where}. Use registry.replace(...) to change a meaning, or registry.overlay() to do so "
                    "locally."
                )
        self._set(rule)
        return rule

    def replace(self, rule: Rule | OpOverload, run: Run | None = None) -> Rule:
        """Give overloads that have a rule a new meaning: ``replace(rule)``, or ``replace(op, function)`` for one."""
        if isinstance(rule, OpOverload):
            if run is None:
                raise TypeError("registry.replace(op, function) needs the function that is to run")
            category = (
                self._rules[rule].category if rule in self._rules else Category("override", "as its own text says")
            )
            rule = Rule((rule,), category, run, takes_op=False, where=written_at(2))
        for op in rule.ops:
            if op not in self._rules:
                raise KeyError(f"{op} has no rule to replace; use registry.add(...)")
        self._set(rule)
        return rule

    def _set(self, rule: Rule) -> None:
        for op in rule.ops:
            self._rules[op] = rule
        self.version = digest_of(
            self.version, str(rule), repr(rule.traits), source_digest(rule.run.__code__.co_filename)
        )
        for op in rule.ops:
            self._tell(op)

    def _tell(self, op: OpOverload) -> None:
        for listener in self._listeners:
            listener(op)

    def listen(self, listener: Listener) -> None:
        """Call `listener(op)` for every overload that has a rule, and again whenever one gets, changes or loses it."""
        self._listeners.append(listener)
        for op in list(self._rules):
            listener(op)

    @contextlib.contextmanager
    def overlay(self) -> Iterator[Registry]:
        """Rules added or replaced inside the block hold until its end; then rules and version are as before."""
        rules, version = dict(self._rules), self.version
        try:
            yield self
        finally:
            touched = [op for op in {*self._rules, *rules} if self._rules.get(op) is not rules.get(op)]
            self._rules, self.version = rules, version
            for op in touched:
                self._tell(op)


registry = Registry()
