"""``python -m op_registry explain aten.cumsum``: what an operator means, by which rule, and where it is written."""

from __future__ import annotations

import inspect

import torch
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.resolve import resolve
from op_registry.rule import packet_name, takes_tensor


def packet_named(name: str) -> OpOverload | OpOverloadPacket:
    """``aten.cumsum``, ``cumsum``, ``aten::add_.Tensor``, ``mylib.gelu_fast`` under torch.ops."""
    parts = name.replace("::", ".").split(".")
    if not hasattr(torch.ops.aten, parts[0]) and len(parts) > 1:
        namespace, parts = getattr(torch.ops, parts[0]), parts[1:]
    else:
        namespace = torch.ops.aten
    found = namespace
    try:
        for part in parts:
            found = getattr(found, part)
    except AttributeError:
        raise LookupError(f"torch.ops has no operator {name}") from None
    assert isinstance(found, (OpOverload, OpOverloadPacket))
    return found


def explain(name: str) -> str:
    """A paragraph for each meaning among the overloads of an operator."""
    op = packet_named(name)
    overloads = [op] if isinstance(op, OpOverload) else [o for n in op.overloads() if takes_tensor(o := getattr(op, n))]
    said: dict[str, list[str]] = {}
    for overload in overloads:
        meaning = resolve(overload)
        text = str(meaning.rule) if meaning.rule is not None else f"{packet_name(overload)}: {meaning.kind}"
        if meaning.rule is not None:
            notes = inspect.getdoc(meaning.rule.run)
            text += f"\n    {notes}" if notes and not meaning.rule.takes_op else ""
            text += "".join(f"\n    {gap}" for gap in meaning.rule.gaps)
        how = {"rule": "", "written back": " (written back)", "each of a list": " (each of a list)"}.get(
            meaning.kind, ""
        )
        said.setdefault(text, []).append(f"{overload._overloadname}{how}")
    return "\n".join(f"{text}\n    serves {', '.join(names)}" for text, names in said.items())
