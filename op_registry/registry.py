"""The registry: which rule an aten overload has, and who is notified when that changes.

``registry.add(rule)`` refuses a second rule for an overload and reports where the first one is; ``replace`` changes a
rule deliberately; ``overlay()`` holds rules for a ``with`` block, in the thread or task that opened it.

``version`` identifies the state that the caller sees: a compiled graph is valid for one version only, and leaving an
overlay restores the previous version. Compilers store graphs on disk, so a version is the same in every process: it is
a digest of the source files of the rules (digests.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, MappingProxyType

import torch
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.digests import digest_of, source_digest
from op_registry.errors import MaskedSemanticsError
from op_registry.rule import OVERRIDE, InsideRule, Rule, Run, written_at

Listener = Callable[[OpOverload], None]
# A Python function that calls an operator, by its code, or a module or package of them, by name.
Caller = CodeType | str


class Layer:
    """Rules by overload, and a digest of everything registered or changed in them."""

    def __init__(self, version: str = "") -> None:
        # None: the overload has no rule here, even if a layer below has one.
        self.rules: dict[OpOverload, Rule | None] = {}
        self.version = version


class Overlay(Layer):
    """The rules of ``with registry.overlay() as mine:``; ``registry.overlay(mine)`` puts them in force again."""

    def __init__(self, registry: Registry) -> None:
        super().__init__()
        self._registry = registry

    def add(self, rule: Rule) -> Rule:
        """Like :meth:`Registry.add`, in this overlay."""
        return self._registry._add(rule, self)

    def replace(self, rule: Rule | OpOverload | OpOverloadPacket, run: Run | None = None) -> Rule:
        """Like :meth:`Registry.replace`, in this overlay."""
        return self._registry._replace(rule, run, self)

    def withdraw(self, op: OpOverload) -> None:
        """Remove the rule of an overload inside this overlay: it then decomposes, or is refused."""
        self._registry._withdraw(op, self)


# The overlays in force, outermost first. Autograd nodes store the scope in which they were recorded.
Scope = tuple[Overlay, ...]


class Registry:
    """Rules by overload. Overlays add and replace rules without changing the layers below.

    ever_overlaid   every overload that any overlay has given a rule; others need no lookup in overlays
    """

    def __init__(self) -> None:
        self._base = Layer(source_digest(str(Path(__file__).parent)))
        self._scope: ContextVar[Scope] = ContextVar("op_registry.overlays", default=())
        self._listeners: list[Listener] = []
        self._book: Mapping[OpOverload, Rule | None] = self._base.rules
        self.ever_overlaid: set[OpOverload] = set()
        self._inside: dict[OpOverload, dict[Caller, InsideRule]] = {}

    def __contains__(self, op: OpOverload) -> bool:
        return self.get(op) is not None

    def __iter__(self) -> Iterator[OpOverload]:
        above = (op for overlay in self.scope for op in overlay.rules)
        return (op for op in dict.fromkeys((*self._base.rules, *above)) if self.get(op) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def rules(self) -> Iterator[Rule]:
        """Every rule in force for the caller, once."""
        in_force: dict[OpOverload, Rule | None] = dict(self._base.rules)
        for overlay in self.scope:
            in_force.update(overlay.rules)
        return iter({id(rule): rule for rule in in_force.values() if rule is not None}.values())

    @property
    def scope(self) -> Scope:
        """The overlays in force for the caller, outermost first."""
        return self._scope.get()

    @property
    def version(self) -> str:
        """A digest of the rules in force for the caller, the same in every process for the same sources."""
        scope = self._scope.get()
        above = [overlay.version for overlay in scope if overlay.rules] if scope else None
        return digest_of(self._base.version, *above) if above else self._base.version

    def get(self, op: OpOverload) -> Rule | None:
        """The rule registered for exactly this overload, if any; `resolve` also handles derived forms."""
        for overlay in reversed(self.scope):
            if op in overlay.rules:
                return overlay.rules[op]
        return self._base.rules.get(op)

    def written(self, op: OpOverload) -> Rule | None:
        """The built-in rule of an overload, even if it has been replaced; for other overloads, the rule in force.

        Built-in lowerings are composed of built-in rules: replacing the rule of `sum` must not change `trace`.
        """
        return self._book.get(op) or self.get(op)

    def close_book(self) -> None:
        """Declare the rules registered so far to be the built-in ones."""
        self._book = MappingProxyType(dict(self._base.rules))

    def add(self, rule: Rule) -> Rule:
        """Register `rule` for each of its overloads; a second rule for one of them is refused."""
        return self._add(rule, self._innermost)

    def replace(self, rule: Rule | OpOverload | OpOverloadPacket, run: Run | None = None) -> Rule:
        """Give overloads that have a rule a new meaning: ``replace(rule)``, or ``replace(op, function)`` for one.

        The new rule only has its own lowerings, traits and gaps, and inherits none from the old rule.
        """
        return self._replace(rule, run, self._innermost)

    @property
    def _innermost(self) -> Layer:
        return self.scope[-1] if self.scope else self._base

    def _add(self, rule: Rule, layer: Layer) -> Rule:
        for op in rule.ops:
            first = self.get(op)
            if first is not None:
                raise ValueError(
                    f"{op} already has a rule, {first.category.name} at {first.where}; the second one is at "
                    f"{rule.where}. Use registry.replace(...) to change a meaning, or registry.overlay() to do so "
                    "locally."
                )
        return self._set(rule, layer)

    def _replace(self, rule: Rule | OpOverload | OpOverloadPacket, run: Run | None, layer: Layer) -> Rule:
        if not isinstance(rule, Rule):
            op = self._overload_with_rule(rule)
            if run is None:
                raise TypeError("registry.replace(op, function) needs a function")
            replaced = self.get(op)
            category = replaced.category if replaced and not replaced.category.closed else OVERRIDE
            rule = Rule((op,), category, run, takes_op=False, where=written_at(3))
        for op in rule.ops:
            if self.get(op) is None:
                # Not a KeyError, which shows its message in quotes.
                raise LookupError(
                    f"{op} has no rule to replace; register one with masked_rule, or registry.add(rule). "
                    f"`python -m op_registry explain {op.name().partition('::')[2]}` shows what is registered."
                )
        return self._set(rule, layer)

    def _overload_with_rule(self, op: OpOverload | OpOverloadPacket) -> OpOverload:
        """The overload that is meant: of a packet, the only one that has a rule, or the default."""
        if isinstance(op, OpOverload):
            return op
        if not isinstance(op, OpOverloadPacket):
            raise TypeError(f"registry.replace(op, function) takes an operator, such as torch.ops.mylib.f, not {op!r}")
        found = [overload for name in op.overloads() if self.get(overload := getattr(op, name)) is not None]
        if len(found) > 1:
            raise TypeError(f"{op} has several overloads with a rule: pass one of {', '.join(map(str, found))}")
        return found[0] if found else getattr(op, op.overloads()[0])

    def _withdraw(self, op: OpOverload, overlay: Overlay) -> None:
        self.ever_overlaid.add(op)
        overlay.rules[op] = None
        overlay.version = digest_of(overlay.version, str(op))
        self._notify(op)

    def _set(self, rule: Rule, layer: Layer) -> Rule:
        if isinstance(layer, Overlay):
            self.ever_overlaid.update(rule.ops)
        layer.rules.update(dict.fromkeys(rule.ops, rule))

        def changed(rule: Rule) -> None:
            if isinstance(self._book, MappingProxyType):  # the version of the sources covers the built-in rules
                layer.version = digest_of(layer.version, rule.fingerprint())
            for op in rule.ops:
                self._notify(op)

        changed(rule)
        rule.listeners.append(changed)
        return rule

    def inside(self, op: OpOverload) -> Mapping[Caller, InsideRule]:
        """The rules that `op` has inside single Python functions, by the function; see op_registry/laws/inside.py."""
        return MappingProxyType(self._inside.get(op, {}))

    def ops_inside(self) -> tuple[OpOverload, ...]:
        """Every overload that has a rule inside some function."""
        return tuple(self._inside)

    def add_inside(self, caller: Caller, rule: InsideRule) -> None:
        """Register the rule of one overload inside a function; a second one for the same function is refused."""
        (op,) = rule.ops
        first = self._inside.get(op, {}).get(caller)
        if first is not None:
            raise ValueError(f"{first} is already registered; the second rule is at {rule.where}.")
        self._inside.setdefault(op, {})[caller] = rule

        def changed(rule: Rule) -> None:
            if isinstance(self._book, MappingProxyType):
                self._base.version = digest_of(self._base.version, rule.fingerprint())
            self._notify(op)

        changed(rule)
        rule.listeners.append(changed)

    def remove_inside(self, rule: InsideRule) -> None:
        """Let the operator of `rule` have its ordinary meaning inside the function again."""
        (op,) = rule.ops
        self._inside[op] = {caller: other for caller, other in self._inside[op].items() if other is not rule}
        self._base.version = digest_of(self._base.version, f"without {rule.fingerprint()}")
        self._notify(op)

    def _notify(self, op: OpOverload) -> None:
        for listener in self._listeners:
            listener(op)

    def listen(self, listener: Listener) -> None:
        """Call `listener(op)` whenever the rule of an overload is set or changes."""
        self._listeners.append(listener)

    @contextlib.contextmanager
    def overlay(self, prepared: Overlay | None = None) -> Iterator[Overlay]:
        """Rules added or replaced inside the block hold until its end, for the thread or task that opened it.

        With `prepared`, an ``Overlay(registry)``, its rules hold too.

        They also hold in the backward of what runs inside the block, at any time and in any thread, and in
        asyncio tasks and ``contextvars`` copies created inside. Overlays may end in any order.
        """
        opened = Overlay(self) if prepared is None else prepared
        is_outermost = opened not in self.scope
        if is_outermost:
            refuse_while_exporting("An overlay of the registry")
            self._scope.set((*self.scope, opened))
        try:
            yield opened
        finally:
            if is_outermost:
                self._scope.set(tuple(overlay for overlay in self.scope if overlay is not opened))

    @contextlib.contextmanager
    def within(self, scope: Scope) -> Iterator[None]:
        """Put exactly the overlays of `scope` in force inside the block, for backwards, which run in any thread."""
        token = self._scope.set(scope)
        try:
            yield
        finally:
            self._scope.reset(token)


def refuse_while_exporting(scope: str) -> None:
    """Raise if torch.export is running: its programs record operators, and not the scope in which each was called."""
    if torch.compiler.is_exporting():
        raise MaskedSemanticsError(
            f"{scope} is entered inside of a module that is being exported, and the exported program would run "
            "without it. Enter it around the export of the whole module, with masked_dispatch.export, which writes the "
            "rules in force into the program."
        )


registry = Registry()
