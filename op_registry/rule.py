"""A rule: what one aten operator means on masked tensors, as a value that prints as a sentence.

Facets hang on a rule after it is made: lowerings to other storage, an oracle of its own, samples of its own, and gaps
(exact, perishable exceptions that conformance runs as strict expected failures).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

Run = Callable[..., Any]


@dataclass(frozen=True)
class Category:
    """A law that many operators share.

    name   what coverage and error messages call it
    law    the law in a sentence, as the semantics page has it
    run    the generic dense run, called as ``run(op, *args, **kwargs)`` with records for tensors; None where each
           operator brings its own
    """

    name: str
    law: str
    run: Run | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.law}"


@dataclass(frozen=True)
class Gap:
    """A named exception to a law, with its reason; `law` and `where` say exactly which check must fail."""

    law: str
    why: str
    where: str = ""

    def __str__(self) -> str:
        return f"gap in {self.law}{f' ({self.where})' if self.where else ''}: {self.why}"


@dataclass(eq=False)
class Rule:
    """What `ops` mean on masked tensors.

    ops        the aten overloads that the rule serves, all functional or all views
    category   the law it follows
    run        called with the operator's own arguments, records in place of tensors
    takes_op   whether `run` wants the overload as its first argument (category runs do)
    traits     what a category needs to know of the operator: identity=…, derivative=…
    where      file and line in which the rule was written
    """

    ops: tuple[OpOverload, ...]
    category: Category
    run: Run
    takes_op: bool
    where: str
    traits: dict[str, Any] = field(default_factory=dict)
    lowerings: dict[type, list[Run]] = field(default_factory=dict)
    oracles: list[Run] = field(default_factory=list)
    sample_makers: list[Run] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)

    @property
    def name(self) -> str:
        return packet_name(self.ops[0])

    def __str__(self) -> str:
        overloads = ", ".join(op._overloadname for op in self.ops)
        return f"{self.name} ({overloads}) is {self.category} [{self.where}]"

    def bind(self, op: OpOverload) -> Run:
        """The run for one overload, to be called with that overload's arguments."""
        if not self.takes_op:
            return self.run
        run, traits = self.run, self.traits

        def bound(*args: Any, **kwargs: Any) -> Any:
            return run(op, *args, **kwargs)

        def bound_with_traits(*args: Any, **kwargs: Any) -> Any:
            return run(op, *args, _traits=traits, **kwargs)

        chosen = bound_with_traits if traits else bound
        chosen.__name__ = chosen.__qualname__ = f"{packet_name(op)}_rule"
        return chosen

    def lowering(self, layout: type) -> Callable[[Run], Run]:
        """Decorator: how the operator runs on another storage record.

        A run that does not take a call raises NotLowered; the one that was registered before it is asked next.
        """

        def keep(run: Run) -> Run:
            self.lowerings.setdefault(layout, []).insert(0, run)
            return run

        return keep

    def oracle(self, function: Run) -> Run:
        """Decorator: a slow, obviously right implementation to compare with instead of the category's."""
        self.oracles.append(function)
        return function

    def samples(self, maker: Run) -> Run:
        """Decorator: sample arguments, for operators that OpInfo does not know."""
        self.sample_makers.append(maker)
        return maker

    def gap(self, law: str, *, why: str, where: str = "") -> Rule:
        """Name an exception: conformance expects exactly this failure and shouts when it is gone."""
        self.gaps.append(Gap(law, why, where))
        return self


def packet_name(op: OpOverload | OpOverloadPacket) -> str:
    """`aten::add.Tensor` → `add`; other namespaces keep theirs: `mylib::gelu_fast`."""
    qualified = op._schema.name if isinstance(op, OpOverload) else op._qualified_op_name
    return qualified.removeprefix("aten::")


def is_functional(op: OpOverload) -> bool:
    """Whether the overload writes to none of its arguments."""
    return not op._schema.is_mutable


def overloads_of(op: OpOverload | OpOverloadPacket) -> tuple[OpOverload, ...]:
    """The overload itself, or a packet's functional overloads that take a tensor."""
    if isinstance(op, OpOverload):
        return (op,)
    overloads = (getattr(op, name) for name in op.overloads())
    return tuple(o for o in overloads if is_functional(o) and takes_tensor(o) and in_dispatcher(o))


def in_dispatcher(op: OpOverload) -> bool:
    """Whether the overload can be dispatched at all: some, like eq.Tensor_list, live in TorchScript only."""
    try:
        op._can_decompose()
    except RuntimeError:
        return False
    return True


def takes_tensor(op: OpOverload) -> bool:
    """Whether any argument is a tensor, an optional tensor or a list of them."""
    return any("Tensor" in str(a.type) for a in op._schema.arguments)


def written_at(depth: int) -> str:
    """file:line of the caller `depth` frames up, for a rule to say where it stands."""
    frame = sys._getframe(depth)
    path = frame.f_code.co_filename.replace("\\", "/").split("/")
    return f"{'/'.join(path[-3:])}:{frame.f_lineno}"
