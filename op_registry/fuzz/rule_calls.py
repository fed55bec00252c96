"""Steps derived from the schemas of the operators that have a rule, in-place forms included."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch._ops import OpOverload

from op_registry.fuzz.calls import Call
from op_registry.registry import registry

# We leave out rules of these categories: they have no result to compare, values that torch leaves open (an inverse of a
# singular matrix, say), or many operands.
LEFT_OUT = (
    "refused",
    "composite",
    "plumbing",
    "factory",
    "random",
    "derivative",
    "recurrent",
    "pooling",
    "opaque",
    "whole slices",
)
# Operators that return uninitialised memory, change the shape of their operand in place, return tensors that share
# memory without torch's knowledge (unsafe_), have a result exponential in a size (histogramdd), or (those whose names
# begin with an underscore) trust their callers to check the arguments.
UNSUITABLE = (
    "_",
    "empty",
    "resize",
    "set_",
    "as_strided",
    "squeeze_",
    "unsqueeze_",
    "t_",
    "transpose_",
    "swap",
    "detach_",
    "unsafe_",
    "histogramdd",
)

# Code for an argument of each type.
CODE_OF_TYPE = {
    "number": "{f}",
    "float": "{f}",
    "Scalar": "{f}",
    "bool": "{flag}",
    "List[int]": "{dims}",
    "Optional[List[int]]": "{dims}",
}
DIMENSIONS = ("dim", "dim0", "dim1", "dim2", "axis")


@functools.cache
def calls_of_rules() -> tuple[Call, ...]:
    """A call, or several with different arguments, for each suitable rule; ordered by name."""
    overloads = sorted((op for op in registry if _suitable(op)), key=str)
    return tuple(call for op in overloads for call in _calls_of(op))


def _suitable(op: OpOverload) -> bool:
    rule = registry.get(op)
    name = op._schema.name.partition("::")[2]
    return rule is not None and rule.category.name not in LEFT_OUT and not name.startswith(UNSUITABLE)


def _calls_of(op: OpOverload) -> Iterator[Call]:
    written = op._schema.is_mutable
    if not written:
        yield from _call(op, False)
    in_place = _in_place_form(op)
    if in_place is not None:
        yield from _call(in_place, True)


def _in_place_form(op: OpOverload) -> OpOverload | None:
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name if op._schema.is_mutable else f"{name}_", None)
    overload = op._schema.overload_name or "default"
    if packet is None or overload not in packet.overloads() or f"{name}_".startswith(UNSUITABLE):
        return None
    form: OpOverload = getattr(packet, overload)
    first = form._schema.arguments[0]
    only_the_first = [a for a in form._schema.arguments if a.alias_info is not None and a.alias_info.is_write] == [
        first
    ]
    return form if only_the_first else None


def _call(op: OpOverload, writes: bool) -> Iterator[Call]:
    positional: list[str] = []
    keywords: list[str] = []
    kinds = ""
    for argument in op._schema.arguments:
        code = _code(argument, len(kinds))
        if code is None and argument.has_default_value():
            continue
        if code is None:
            return
        if str(argument.type) == "Tensor":
            kinds += "i" if argument.name in ("index", "indices") else "f"
        elif str(argument.type) == "List[Tensor]":
            kinds += "ff"
        # After an argument that was left out, the others need their names.
        if argument.kwarg_only or len(positional) + len(keywords) < op._schema.arguments.index(argument):
            keywords.append(f"{argument.name}={code}")
        else:
            positional.append(code)
    if not kinds or len(kinds) > 3 or not op._schema.returns:
        return
    called = f"torch.ops.{op!s}({', '.join([*positional, *keywords])})"
    random = torch.Tag.nondeterministic_seeded in op.tags
    if writes:
        yield Call(called, kinds, writes=True, random=random)
    elif len(op._schema.returns) == 1:
        one_of_a_list = "[0]" if str(op._schema.returns[0].type) == "List[Tensor]" else ""
        yield Call(called + one_of_a_list, kinds, random=random)
    else:
        for number in range(len(op._schema.returns)):
            yield Call(f"{called}[{number}]", kinds, random=random)


def _code(argument: torch.Argument, operands: int) -> str | None:
    """Code for an argument; None if no value is obvious, or if the default is good enough."""
    kind = str(argument.type)
    if kind == "Tensor":
        return f"{{{operands}}}"
    if kind == "List[Tensor]":
        return f"[{{{operands}}}, {{{operands + 1}}}]"
    if kind in ("int", "Optional[int]") and argument.name in DIMENSIONS:
        return "{d}"
    if kind == "int" and not argument.has_default_value():
        return "{n}"
    if argument.has_default_value() and argument.name not in ("dim", "keepdim", "dims"):
        return None
    return CODE_OF_TYPE.get(kind)
