"""``masked_dispatch.explain(torch.cumsum, x, 1)``: what happens in a call, operator by operator.

``masked_dispatch.explain(torch.cumsum)``: what it means.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import resolve_name

from masked_dispatch.autograd.sparse import unwrap_any
from masked_dispatch.compiler_internals import uncompiled
from masked_dispatch.densification import Densification, storage_of
from masked_dispatch.seeing.event import Event
from masked_dispatch.seeing.recorder import OWN, Recorder
from masked_dispatch.seeing.watching import recording_calls
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry.records.dense import map_tensors
from op_registry.report import explain as report
from op_registry.report.names import UnknownName
from op_registry.resolve import Meaning
from op_registry.schema import written_arguments
from op_registry.sparse.record import Sparse

UNCOMPILED = (
    "explained as it runs uncompiled; what a compiled graph stores densely is in the log of "
    'masked_dispatch.densification, and refused under densify("never")'
)


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Explain ``function(*args, **kwargs)``: its operators, their rules and lowerings, and what is stored densely, and
    why. Without arguments, explain what a function of torch means.

    function  a function of tensors: a torch function, an operator, a module, your own function

    ``explain(torch.sort)``, without arguments, calls nothing. It says which operators the function is or calls. For
    each of them, it prints the law of the operator's category, what the operator's own rule adds to the law, which
    dimensions the operator works on, and how it runs in each storage. `function` can be a function or class of torch,
    or an operator of torch.ops, your own too.

    With arguments, the call runs, because the operators it reaches may depend on values and on storage. It runs without
    derivatives, under the current `densify` policy, and on copies. Tensors among the arguments (in lists, tuples and
    dicts too) are cloned, a module is deep-copied and random generators are reset afterwards, so that these do not
    change for the caller; other side effects of `function` happen. With sparsely stored arguments each operator runs
    twice, to find out which lowering takes the call. An error of the call becomes part of the explanation and is not
    raised. Compiled functions, also inside of `function`, are explained as they run uncompiled, and the explanation
    says so.

    Raises TypeError if `function` can't be called.
    """
    if not callable(function):
        raise TypeError(
            f"explain takes a function and its arguments, as explain(torch.cumsum, x, 1); {type(function).__name__} "
            "is not callable"
        )

    if not args and not kwargs and (meaning := _meaning(function)):
        return Explanation(meaning.partition(" ")[0], (), meaning=meaning)
    recorder, error = StepRecorder(), ""
    is_compiled, function = uncompiled(function) is not function, uncompiled(function)
    copies: dict[int, Tensor] = {}
    called = copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function
    with torch.no_grad():
        copied_args, copied_kwargs = _copied(args, copies), _copied(kwargs, copies)
        with _random_state_restored({t.device for t in copies.values()}), recording_calls(recorder):
            try:
                called(*copied_args, **copied_kwargs)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
    name = resolve_name(function) or getattr(function, "__name__", None) or type(function).__name__
    note = UNCOMPILED if is_compiled or recorder.under_compile else ""
    return Explanation(name, tuple(recorder.steps.values()), error, note)


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


# ----------------------------------------------------------------------------------------------- the recorded operators


class StepRecorder(Recorder):
    """Records operators alone, each with the texts of its arguments and its result, and the lowering that takes it."""

    def __init__(self) -> None:
        super().__init__()
        # By the number of the call.
        self.steps: dict[int, Step] = {}

    def shows(self, meaning: Meaning) -> bool:
        return super().shows(meaning) and meaning.kind != "each of a list"

    def begin(self, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Event | None:
        event = super().begin(op, args, kwargs)
        if event is not None:
            with self._counting():
                arguments = (*map(describe, args), *(f"{name}={describe(value)}" for name, value in kwargs.items()))
                depth = sum(opened.module == 0 for opened in self._stack.open) - 1
                lowering = "" if event.shows else _lowering(event.meaning, args, kwargs)
                self.steps[event.call.number] = Step(
                    op, depth, arguments, served(event.meaning), lowering, composite=event.shows
                )
        return event

    def end(self, event: Event, result: object) -> None:
        super().end(event, result)
        with self._counting():
            self._complete(event, result=describe(result))

    def failed(self, event: Event, error: BaseException) -> None:
        super().failed(event, error)
        self._complete(event, error=event.call.error)

    def _complete(self, event: Event, **ending: Any) -> None:
        number = event.call.number
        self.steps[number] = dataclasses.replace(self.steps[number], densified=event.call.densified, **ending)

    def stored_densely(self, record: Sparse) -> None:
        """A densification that bypassed the policy is no step's."""


def _lowering(meaning: Meaning, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The lowering that takes a call; "" if nothing is stored sparsely or none does."""
    sparse: list[SparseMaskedTensor] = []
    map_tensors(sparse.append, [*args, *kwargs.values()], SparseMaskedTensor)
    if not sparse or meaning.rule is None or meaning.base is None:
        return ""
    targets = written_arguments(meaning.op) if meaning.base is not meaning.op else ()
    records = [map_tensors(unwrap_any, a, Tensor) for a in args]
    named = {k: map_tensors(unwrap_any, v, Tensor) for k, v in kwargs.items() if k not in targets}
    return report.taken_by(meaning.base, meaning.rule, records, named)


def served(meaning: Meaning) -> str:
    """How an overload is served, in a line."""
    if meaning.op.namespace == OWN:
        return "an operator of this library, not of torch"
    if meaning.rule is None:
        how = {"decomposes": "decomposes", "each of a list": "the operator on each element of its lists"}
        return how.get(meaning.kind, "missing: no rule and no decomposition")
    rule = f"{meaning.rule.category.name} [{meaning.rule.where}]"
    return rule if meaning.base is meaning.op else f"{rule}, {meaning.base} written back"


def describe(value: object) -> str:
    """An argument or a result: kind, dtype, shape and bytes of a tensor, never its elements."""
    if isinstance(value, MaskedTensor):
        kind = str(value.dtype).removeprefix("torch.")
        if isinstance(value, SparseMaskedTensor):
            return f"masked {kind} of {storage_of(value)} ({value.stored_bytes:,} bytes)"
        return f"masked {kind} of shape {tuple(value.shape)} ({value.stored_bytes:,} bytes)"
    if isinstance(value, Tensor):
        return f"plain {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(describe, value[:4])) + (", ..." if len(value) > 4 else "")
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


# ------------------------------------------------------------------------------------------------ the caller's own call


def _meaning(function: Callable[..., Any]) -> str:
    """What a function, a class or an operator of torch means; "" for others, whose calls alone can be explained."""
    if isinstance(function, torch.nn.Module):
        return ""
    try:
        return report.explain(function, samples=False)
    except UnknownName:
        return ""


def _copied(value: object, copies: dict[int, Tensor]) -> Any:
    """Arguments with every tensor cloned; a tensor that is passed twice is cloned once."""
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


def _random_state_restored(devices: set[torch.device]) -> contextlib.AbstractContextManager[None]:
    """A context that restores the random generators of the CPU and of `devices`, which are of one type."""
    others = [d for d in devices if d.type not in ("cpu", "meta")]
    if not others:
        return torch.random.fork_rng(devices=())
    return torch.random.fork_rng(devices=[d.index or 0 for d in others], device_type=others[0].type)
