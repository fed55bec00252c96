"""The registry: which rule an aten overload has, and who is notified when that changes.

``registry.add(rule)`` refuses a second rule for an overload and says where the first one is; ``replace`` is the
deliberate form; ``overlay()`` gives rules that hold inside a ``with`` block, for the thread or task that opened it.

``version`` names the state that the caller sees: a compiled graph is valid for one version only, and leaving an overlay
restores the version from before it. Compilers keep graphs on disk, so a version also means the same in every process:
it is a digest of the files that rules are written in (digests.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType

from torch._ops import OpOverload

from op_registry.digests import digest_of, source_digest
from op_registry.rule import OVERRIDE, Rule, Run, written_at

Listener = Callable[[OpOverload], None]


class Layer:
    """Rules by overload, and a digest of all that has been registered or amended in it."""

    def __init__(self, version: str = "") -> None:
        # None: the overload has no rule, whatever lies below.
        self.rules: dict[OpOverload, Rule | None] = {}
        self.version = version


class Overlay(Layer):
    """The rules of one ``with registry.overlay() as mine:`` block."""

    def __init__(self, registry: Registry) -> None:
        super().__init__()
        self._registry = registry

    def add(self, rule: Rule) -> Rule:
        """As :meth:`Registry.add`, for this overlay."""
        return self._registry._add(rule, self)

    def replace(self, rule: Rule | OpOverload, run: Run | None = None) -> Rule:
        """As :meth:`Registry.replace`, for this overlay."""
        return self._registry._replace(rule, run, self)

    def withdraw(self, op: OpOverload) -> None:
        """Let an overload have no rule inside this overlay: it decomposes, or is refused."""
        self._registry._withdraw(op, self)


# The overlays in force, outermost first: what an autograd node remembers of where it was recorded.
Scope = tuple[Overlay, ...]


class Registry:
    """Rules by overload. Overlays add and replace without touching what lies below.

    ever_overlaid   every overload that any overlay has given a rule; the others need no lookup in overlays
    """

    def __init__(self) -> None:
        self._base = Layer(source_digest(str(Path(__file__).parent)))
        self._scope: ContextVar[Scope] = ContextVar("op_registry.overlays", default=())
        self._listeners: list[Listener] = []
        self._book: Mapping[OpOverload, Rule | None] = self._base.rules
        self.ever_overlaid: set[OpOverload] = set()

    def __contains__(self, op: OpOverload) -> bool:
        return self.get(op) is not None

    def __iter__(self) -> Iterator[OpOverload]:
        above = (op for overlay in self.scope for op in overlay.rules)
        return (op for op in dict.fromkeys((*self._base.rules, *above)) if self.get(op) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def scope(self) -> Scope:
        """The overlays that hold for the caller, outermost first."""
        return self._scope.get()

    @property
    def version(self) -> str:
        """A name for the rules that hold for the caller, the same in every process for the same sources."""
        above = [overlay.version for overlay in self.scope if overlay.rules]
        return digest_of(self._base.version, *above) if above else self._base.version

    def get(self, op: OpOverload) -> Rule | None:
        """The rule written for exactly this overload, if there is one; `resolve` also knows derived forms."""
        for overlay in reversed(self.scope):
            if op in overlay.rules:
                return overlay.rules[op]
        return self._base.rules.get(op)

    def written(self, op: OpOverload) -> Rule | None:
        """The rule that the rule book has for an overload, whatever has been replaced; for others, the rule in force.

        Built-in lowerings are composed of built-in rules: replacing the rule of `sum` must not change `trace`.
        """
        return self._book.get(op) or self.get(op)

    def close_book(self) -> None:
        """Declare the rules that are registered so far to be the rule book."""
        self._book = MappingProxyType(dict(self._base.rules))

    def add(self, rule: Rule) -> Rule:
        """Register `rule` for each of its overloads; a second rule for one of them is refused."""
        return self._add(rule, self._innermost)

    def replace(self, rule: Rule | OpOverload, run: Run | None = None) -> Rule:
        """Give overloads that have a rule a new meaning: ``replace(rule)``, or ``replace(op, function)`` for one.

        The new rule has the lowerings, traits and gaps that it states itself, none of the old one's.
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

    def _replace(self, rule: Rule | OpOverload, run: Run | None, layer: Layer) -> Rule:
        if isinstance(rule, OpOverload):
            if run is None:
                raise TypeError("registry.replace(op, function) needs the function that is to run")
            replaced = self.get(rule)
            category = replaced.category if replaced and not replaced.category.closed else OVERRIDE
            rule = Rule((rule,), category, run, takes_op=False, where=written_at(3))
        for op in rule.ops:
            if self.get(op) is None:
                raise KeyError(f"{op} has no rule to replace; use registry.add(...)")
        return self._set(rule, layer)

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
            if isinstance(self._book, MappingProxyType):  # the book's version covers its own rules
                layer.version = digest_of(layer.version, rule.fingerprint())
            for op in rule.ops:
                self._notify(op)

        changed(rule)
        rule.listeners.append(changed)
        return rule

    def _notify(self, op: OpOverload) -> None:
        for listener in self._listeners:
            listener(op)

    def listen(self, listener: Listener) -> None:
        """Call `listener(op)` for every overload that has a rule, and whenever one is given or changes its rule."""
        self._listeners.append(listener)
        for op in self:
            listener(op)

    @contextlib.contextmanager
    def overlay(self) -> Iterator[Overlay]:
        """Rules added or replaced inside the block hold until its end, for the thread or task that opened it.

        They also hold for the backward of what runs inside the block, whenever and in whichever thread that runs. An
        asyncio task or a ``contextvars`` copy made inside sees them too. Overlays may end in any order.
        """
        mine = Overlay(self)
        self._scope.set((*self.scope, mine))
        try:
            yield mine
        finally:
            self._scope.set(tuple(overlay for overlay in self.scope if overlay is not mine))

    @contextlib.contextmanager
    def within(self, scope: Scope) -> Iterator[None]:
        """Let exactly the overlays of `scope` hold inside the block: for backwards, which run anywhere and later."""
        token = self._scope.set(scope)
        try:
            yield
        finally:
            self._scope.reset(token)


registry = Registry()
