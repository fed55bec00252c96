"""What people call an operator: ``aten.add_.Tensor``, ``mylib.gelu_fast``, ``torch.cumsum``, ``F.linear``.

A function of torch's that is written in C++ dispatches the aten operator of its own name. One that is written in
Python has no operator of its own; :mod:`op_registry.report.python_source` reads which ones it calls.
"""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.registry import registry

Operator = OpOverload | OpOverloadPacket

# What is left out in speech.
SHORT = {
    "F.": "torch.nn.functional.", "nn.": "torch.nn.", "Tensor.": "torch.Tensor.", "functional.": "torch.nn.functional.",
    "linalg.": "torch.linalg.", "fft.": "torch.fft.", "special.": "torch.special.", "masked.": "torch.masked.",
}  # fmt: skip

# Methods and attributes of a tensor that dispatch an operator of another name.
OF_OTHER_NAMES = {
    "T": "numpy_T", "H": "matrix_H", "__add__": "add", "__radd__": "add", "__iadd__": "add_", "__sub__": "sub",
    "__isub__": "sub_", "__rsub__": "rsub", "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul_",
    "__truediv__": "div", "__div__": "div", "__itruediv__": "div_", "__idiv__": "div_", "__floordiv__": "floor_divide",
    "__mod__": "remainder", "__imod__": "remainder_", "__pow__": "pow", "__ipow__": "pow_", "__matmul__": "matmul",
    "__neg__": "neg", "__pos__": "positive", "__abs__": "abs", "__invert__": "bitwise_not", "__eq__": "eq",
    "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge", "__bool__": "is_nonzero",
    "__float__": "item", "__int__": "item", "__complex__": "item", "__index__": "item", "__long__": "item",
    "__nonzero__": "is_nonzero", "__getitem__": "index", "__setitem__": "index_put_",
    "bool": "to", "byte": "to", "char": "to", "double": "to", "float": "to", "half": "to", "bfloat16": "to",
    "int": "to", "long": "to", "short": "to", "cfloat": "to", "cdouble": "to", "chalf": "to", "cpu": "to",
    "cuda": "to", "xpu": "to", "ipu": "to", "mtia": "to",
}  # fmt: skip

# Attributes that are there in Python, and of which aten has an operator of the same name for TorchScript or autograd.
DISPATCH_NOTHING = ("_version", "data", "device", "grad", "is_leaf", "output_nr", "retains_grad")

WRITTEN_IN_C = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.GetSetDescriptorType,
)  # fmt: skip


class UnknownName(LookupError):
    """Nothing is called so; the message is one line and has the nearest names."""


@dataclass(frozen=True)
class Named:
    """What a name stands for.

    name       as torch knows it: ``aten.cumsum``, ``torch.nn.functional.softmax``
    operator   the overload, or the packet of all overloads; None where no operator has this name
    function   a Python function, or None
    """

    name: str
    operator: Operator | None = None
    function: Callable[..., Any] | None = None


def named(name: str) -> Named:
    """What `name` stands for; :class:`UnknownName` where nothing is called so."""
    plain = name.strip().replace("::", ".").removeprefix("torch.ops.")
    for short, whole in SHORT.items():
        if plain.startswith(short):
            plain = whole + plain.removeprefix(short)
    if plain.startswith("torch."):
        return _of_torch(plain)
    found = operator_named(plain)
    if found is not None:
        return Named(said(found), found)
    if "." not in plain:
        for place in ("torch", "torch.nn.functional", "torch.Tensor", "torch.linalg"):
            if hasattr(_walk(place), plain):
                return _of_torch(f"{place}.{plain}")
    raise unknown(name)


def operator_named(name: str) -> Operator | None:
    """``aten.add_.Tensor``, ``add_.Tensor``, ``mylib.gelu_fast`` under torch.ops; None where there is none."""
    parts = name.split(".")
    for start in (("aten", *parts), tuple(parts)):
        found: Any = torch.ops
        for part in start:
            found = getattr(found, part, None) if part.isidentifier() else None
        if isinstance(found, (OpOverload, OpOverloadPacket)):
            return found
    return None


def said(op: Operator) -> str:
    """``aten.add.Tensor``, or ``aten.add`` for the packet."""
    return str(op) if isinstance(op, OpOverload) else op._qualified_op_name.replace("::", ".")


def _walk(path: str) -> Any:
    found: Any = torch
    for part in path.split(".")[1:]:
        found = getattr(found, part)
    return found


def _of_torch(path: str) -> Named:
    """Something that torch shows in Python."""
    try:
        found = _walk(path)
    except (AttributeError, RuntimeError):
        raise unknown(path) from None
    if isinstance(found, (OpOverload, OpOverloadPacket)):
        return Named(said(found), found)
    if isinstance(found, property):
        return Named(path, function=found.fget)
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        return Named(path, function=found.forward)
    inner = inspect.unwrap(found) if callable(found) else found
    if isinstance(inner, WRITTEN_IN_C):
        return Named(path, operator_of(inner))
    if callable(found) and not isinstance(found, type):
        return Named(path, function=found)
    kind = "module" if isinstance(found, types.ModuleType) else type(found).__name__
    raise UnknownName(f"{path} is a {kind}: it is no operator, and calls none")


def operator_of(written_in_c: Any) -> OpOverloadPacket | None:
    """The aten operator that a C++ function of torch's dispatches: the one of its name, if there is one."""
    name = OF_OTHER_NAMES.get(written_in_c.__name__, written_in_c.__name__)
    if isinstance(written_in_c, types.GetSetDescriptorType) and name in DISPATCH_NOTHING:
        return None
    found = operator_named(f"aten.{name}")
    return found if isinstance(found, OpOverloadPacket) else None


def unknown(name: str) -> UnknownName:
    """The error for a name that nothing has."""
    return UnknownName(
        f"nothing is called {name}: neither an operator under torch.ops nor a function of torch's{_nearest(name)}"
    )


def _nearest(name: str) -> str:
    """The names most like this one, as the end of a sentence."""
    if "." in name or "::" in name:
        return nearest(name.replace("::", "."), _names(name))
    whole = {n.rpartition(".")[2]: n for n in _names(name)}
    near = difflib.get_close_matches(name, list(whole), n=4, cutoff=0.6)
    return f"; did you mean {', '.join(whole[n] for n in near)}?" if near else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Those of `known` that are most like a name, as the end of a sentence."""
    near = difflib.get_close_matches(name, list(known), n=4, cutoff=0.6)
    return f"; did you mean {', '.join(near)}?" if near else ""


def _shown(path: str) -> list[str]:
    """What something of torch's shows, nothing where there is no such thing."""
    try:
        return [n for n in dir(_walk(path)) if not n.startswith("__")]
    except (AttributeError, RuntimeError):
        return []


def _names(like: str) -> Iterator[str]:
    """Names that may have been meant by one that has its form."""
    if like.startswith("torch."):
        place = like.rpartition(".")[0]
        for path in dict.fromkeys((place, "torch", "torch.nn.functional", "torch.Tensor")):
            yield from (f"{path}.{n}" for n in _shown(path))
        return
    yield from (f"aten.{n}" for n in dir(torch.ops.aten) if not n.startswith("__"))
    yield from {str(op).rpartition(".")[0] for op in registry if op.namespace != "aten"}
    if "." not in like:
        yield from (f"torch.{n}" for n in dir(torch) if not n.startswith("_"))
