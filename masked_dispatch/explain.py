"""``masked_dispatch.explain(torch.cumsum, x, 1)``: what happens to a call, operator by operator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import resolve_name

from masked_dispatch.storage.densified import Densification


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


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """What happens to ``function(*args, **kwargs)``: operators, rules, lowerings, and what is stored densely and why.

    function  anything that is called with tensors: of torch's, an operator, a module, your own

    The call is made, since what it reaches may depend on values and on what is stored: without derivatives, under the
    `densify` policy in force, and on copies. Tensors among the arguments (in lists, tuples and dicts too) are cloned,
    a module is deep-copied and random generators are reset afterwards, so that nothing of the caller's changes; what
    else `function` writes to, it writes to. With sparsely stored arguments each operator runs twice, to find out which
    of its lowerings takes the call. An error of the call is part of the explanation and is not raised.

    Raises TypeError if `function` can't be called.
    """
    if not callable(function):
        raise TypeError(
            f"explain takes a function and its arguments, as explain(torch.cumsum, x, 1); {type(function).__name__} "
            "is not callable"
        )
    from masked_dispatch.call_observer import Observer  # expensive to import

    observer, error = Observer(), ""
    copies: dict[int, Tensor] = {}
    called = copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function
    with torch.no_grad():
        given, named = _copied(args, copies), _copied(kwargs, copies)
        with _random_numbers_kept({t.device for t in copies.values()}):
            try:
                observer.run(called, *given, **named)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
    name = resolve_name(function) or getattr(function, "__name__", None) or type(function).__name__
    return Explanation(name, tuple(observer.steps), error)


def _copied(value: Any, copies: dict[int, Tensor]) -> Any:
    """Arguments with every tensor cloned; one that is passed twice stays one."""
    if isinstance(value, Tensor):
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone()
        return copies[id(value)]
    if isinstance(value, dict):
        return {key: _copied(v, copies) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_copied(v, copies) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _random_numbers_kept(devices: set[torch.device]) -> Any:
    """A context after which the random generators of the CPU and of `devices`, of one type, are as before."""
    others = [d for d in devices if d.type not in ("cpu", "meta")]
    if not others:
        return torch.random.fork_rng(devices=())
    return torch.random.fork_rng(devices=[d.index or 0 for d in others], device_type=others[0].type)
