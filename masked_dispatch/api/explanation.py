"""What happened to a call, as values that print as text; :func:`masked_dispatch.explain` makes them."""

from __future__ import annotations

from dataclasses import dataclass

from torch._ops import OpOverload

from masked_dispatch.densification import Densification


@dataclass(frozen=True)
class Step:
    """One operator call that a masked tensor took part in.

    op         the overload
    depth      how many composite operators it is a piece of
    arguments  each argument, with shape, layout, stored elements and bytes of tensors
    served     by a rule of which category, and where that is written; or how else
    lowering   which sparse run took the call, and where it is written; "" where nothing was stored sparsely or none did
    densified  operands that were stored densely for it, with bytes and the reason
    result     as the arguments; "" where the call raised
    error      what it raised, or ""
    composite  whether it was taken apart into the steps behind it that are one deeper
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
        lines += [f"  densifies: {found}" for found in self.densified]
        raised = self.error.partition(":" if self.composite else "\n")[0]
        lines.append(f"  raises {raised}" if self.error else f"  → {self.result}")
        return "\n".join("  " * (self.depth + 1) + line for line in lines)


@dataclass(frozen=True)
class Explanation:
    """What happened to a call. Prints as text.

    name   the function
    steps  the operator calls that a masked tensor took part in, in order; pieces stand behind the composite
    error  what the call raised, or ""
    """

    name: str
    steps: tuple[Step, ...]
    error: str = ""

    @property
    def densified(self) -> tuple[Densification, ...]:
        """Everything that was stored densely on the way."""
        return tuple(found for step in self.steps for found in step.densified)

    def __str__(self) -> str:
        made = f"{len(self.steps)} operator call{'' if len(self.steps) == 1 else 's'} on masked tensors"
        dense = f", {len(self.densified)} stored densely" if self.densified else ""
        ends = f", raises {self.error.partition(':')[0]}" if self.error else ""
        lines = [f"{self.name}: {made}{dense}{ends}", *map(str, self.steps)]
        if self.error and not any(step.error for step in self.steps):
            lines.append(f"  raises {self.error}")
        return "\n".join(lines)

    __repr__ = __str__
