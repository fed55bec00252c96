"""The result of :func:`masked_dispatch.explain`: records of operator calls, which print as text."""

from __future__ import annotations

from dataclasses import dataclass

from torch._ops import OpOverload

from masked_dispatch.densification import Densification


@dataclass(frozen=True)
class Step:
    """One operator call with masked arguments.

    op         the overload
    depth      nesting depth in composite operators
    arguments  each argument, with shape, layout, stored elements and bytes of tensors
    served     the category and source location of its rule, or how else it is served
    lowering   the lowering that took the call, with its source location; "" if nothing was stored sparsely or none did
    densified  operands that were stored densely for it, with bytes and the reason
    result     like an argument; "" if the call raised
    error      what it raised, or ""
    composite  whether it called the steps after it that are one level deeper
    """

    op: OpOverload
    depth: int
    arguments: tuple[str, ...]
    served: str
    lowering: str = ""
    densified: tuple[Densification, ...] = ()
    result: str = ""
    error: str = ""
    composite: bool = False

    def __str__(self) -> str:
        lines = [f"{self.op}({', '.join(self.arguments)})", f"  {self.served}"]
        if self.lowering:
            lines.append(f"  stays sparse: {self.lowering}")
        lines += [f"  densifies: {densification}" for densification in self.densified]
        raised = self.error.partition(":" if self.composite else "\n")[0]
        lines.append(f"  raises {raised}" if self.error else f"  -> {self.result}")
        return "\n".join("  " * (self.depth + 1) + line for line in lines)


@dataclass(frozen=True)
class Explanation:
    """What happened in a call, or what an operator means. Prints as text.

    name     the function
    steps    the operator calls with masked arguments, in order; a composite operator comes before the calls it makes
    error    what the call raised, or ""
    note     what has to be known about it, or ""
    meaning  what the function means on masked tensors, if nothing was called
    """

    name: str
    steps: tuple[Step, ...]
    error: str = ""
    note: str = ""
    meaning: str = ""

    @property
    def densified(self) -> tuple[Densification, ...]:
        """Everything that was stored densely during the call."""
        return tuple(densification for step in self.steps for densification in step.densified)

    def __str__(self) -> str:
        if self.meaning:
            return self.meaning
        calls = f"{len(self.steps)} operator call{'' if len(self.steps) == 1 else 's'} on masked tensors"
        dense = f", {len(self.densified)} stored densely" if self.densified else ""
        ends = f", raises {self.error.partition(':')[0]}" if self.error else ""
        lines = [
            f"{self.name}: {calls}{dense}{ends}",
            *([f"  ({self.note})"] if self.note else []),
            *map(str, self.steps),
        ]
        if self.error and not any(step.error for step in self.steps):
            lines.append(f"  raises {self.error}")
        return "\n".join(lines)

    __repr__ = __str__
