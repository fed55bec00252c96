"""The names by which users refer to operators: ``aten.add_.Tensor``, ``mylib.gelu_fast``, ``torch.cumsum``.

One of torch's C++ functions dispatches the aten operator of the same name. A Python function has no operator of its
own: its sample calls show which ones it calls (python_level.py).
"""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import resolve_name

from op_registry.registry import registry

Operator = OpOverload | OpOverloadPacket

# Common abbreviations.
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

# Attributes that dispatch nothing in Python, although aten has operators of the same name for TorchScript or autograd.
DISPATCH_NOTHING = ("_version", "data", "device", "grad", "is_leaf", "output_nr", "retains_grad")

CFunction = (
    types.BuiltinFunctionType
    | types.MethodDescriptorType
    | types.WrapperDescriptorType
    | types.MethodWrapperType
    | types.GetSetDescriptorType
)
WRITTEN_IN_C = get_args(CFunction)


class UnknownName(LookupError):
    """Nothing has this name; the message is one line, with the nearest names."""


@dataclass(frozen=True)
class Named:
    """What a name refers to.

    name       the full name: ``aten.cumsum``, ``torch.nn.functional.softmax``
    operator   the overload, or the packet of all overloads; None if no operator has this name
    function   a Python function, or None
    """

    name: str
    operator: Operator | None = None
    function: Callable[..., Any] | None = None


def named(name: object) -> Named:
    """What `name` refers to: a name, or an operator, a function or a class of torch itself.

    Raises :class:`UnknownName` if nothing has this name, or if the function or class is not torch's.
    """
    if not isinstance(name, str):
        return _of_object(name)
    plain = name.strip().replace("::", ".").removeprefix("torch.ops.")
    for short, whole in SHORT.items():
        if plain.startswith(short):
            plain = whole + plain.removeprefix(short)
    if plain.startswith("torch."):
        return _of_torch(plain)
    operator = operator_named(plain)
    if operator is not None:
        return Named(operator_name(operator), operator)
    if "." not in plain:
        for namespace in ("torch", "torch.nn.functional", "torch.Tensor", "torch.linalg"):
            if hasattr(_attribute(namespace), plain):
                return _of_torch(f"{namespace}.{plain}")
    raise unknown(name)


def _of_object(value: Any) -> Named:
    """What a function or a class of torch refers to, by a public name of it; an operator by its own."""
    if isinstance(value, (OpOverload, OpOverloadPacket)):
        return Named(operator_name(value), value)
    own_name = getattr(value, "__qualname__", "")
    path = resolve_name(value) or f"{getattr(value, '__module__', None)}.{own_name}"
    for owner in ("torch", "torch.nn", "torch.masked"):
        if getattr(_attribute(owner), own_name, None) is value:
            path = f"{owner}.{own_name}"
    if not path.startswith("torch."):
        raise UnknownName(f"{path} is not torch's own")
    return _described(path, value)


def operator_named(name: str) -> Operator | None:
    """An operator under torch.ops: ``aten.add_.Tensor``, ``add_.Tensor``, ``mylib.gelu_fast``; None if not found."""
    parts = name.split(".")
    for path in (("aten", *parts), tuple(parts)):
        attribute: Any = torch.ops
        for part in path:
            attribute = getattr(attribute, part, None) if part.isidentifier() else None
        if isinstance(attribute, (OpOverload, OpOverloadPacket)):
            return attribute
    return None


def operator_name(op: Operator) -> str:
    """``aten.add.Tensor``, or ``aten.add`` for the packet."""
    return str(op) if isinstance(op, OpOverload) else op._qualified_op_name.replace("::", ".")


def overloads_of(op: Operator) -> list[OpOverload]:
    """An overload, or all overloads of a packet."""
    return [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]


def _attribute(path: str) -> Any:
    attribute: Any = torch
    for part in path.split(".")[1:]:
        attribute = getattr(attribute, part)
    return attribute


def _of_torch(path: str) -> Named:
    """What an attribute path that starts with ``torch.`` refers to."""
    try:
        attribute = _attribute(path)
    except (AttributeError, RuntimeError):
        raise unknown(path) from None
    return _described(path, attribute)


def _described(path: str, attribute: Any) -> Named:
    """What an attribute of torch is, whose full name is `path`."""
    if isinstance(attribute, (OpOverload, OpOverloadPacket)):
        return Named(operator_name(attribute), attribute)
    if isinstance(attribute, property):
        return Named(path, function=attribute.fget)
    if isinstance(attribute, type) and issubclass(attribute, torch.nn.Module):
        return Named(path, function=attribute.forward)
    inner = inspect.unwrap(attribute) if callable(attribute) else attribute
    if isinstance(inner, WRITTEN_IN_C):
        return Named(path, operator_of(inner))
    if path.startswith("torch.Tensor.") and path.rpartition(".")[2] in OF_OTHER_NAMES:
        return Named(path, operator_named(OF_OTHER_NAMES[path.rpartition(".")[2]]))
    if callable(attribute) and not isinstance(attribute, type):
        return Named(path, function=attribute)
    kind = "module" if isinstance(attribute, types.ModuleType) else type(attribute).__name__
    raise UnknownName(f"{path} is a {kind}: it is no operator, and calls none")


def operator_of(c_function: CFunction) -> OpOverloadPacket | None:
    """The aten operator that one of torch's C++ functions dispatches: the one of the same name, if there is one."""
    name = OF_OTHER_NAMES.get(c_function.__name__, c_function.__name__)
    if isinstance(c_function, types.GetSetDescriptorType) and name in DISPATCH_NOTHING:
        return None
    operator = operator_named(f"aten.{name}")
    return operator if isinstance(operator, OpOverloadPacket) else None


def unknown(name: str) -> UnknownName:
    """The error for an unknown name."""
    return UnknownName(
        f"nothing is called {name}: it is neither an operator under torch.ops nor a function in torch (an operator of "
        f"your own is there once the module that defines it is imported: --import MODULE){_nearest(name)}"
    )


def _nearest(name: str) -> str:
    """The names most like this one, as the end of a sentence."""
    if "." in name or "::" in name:
        return nearest(name.replace("::", "."), _names(name))
    full_names = {n.rpartition(".")[2]: n for n in _names(name)}
    near = difflib.get_close_matches(name, list(full_names), n=4, cutoff=0.6)
    return f"; did you mean {', '.join(full_names[n] for n in near)}?" if near else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """The names in `known` most like this one, as the end of a sentence."""
    near = difflib.get_close_matches(name, list(known), n=4, cutoff=0.6)
    return f"; did you mean {', '.join(near)}?" if near else ""


def _attribute_names(path: str) -> list[str]:
    """The names of the attributes of a path that starts with ``torch``; none if it does not exist."""
    try:
        return [n for n in dir(_attribute(path)) if not n.startswith("__")]
    except (AttributeError, RuntimeError):
        return []


def _names(like: str) -> Iterator[str]:
    """Names among which to look for the nearest to `like`, depending on its form."""
    if like.startswith("torch."):
        namespace = like.rpartition(".")[0]
        for path in dict.fromkeys((namespace, "torch", "torch.nn.functional", "torch.Tensor")):
            yield from (f"{path}.{n}" for n in _attribute_names(path))
        return
    yield from (f"aten.{n}" for n in dir(torch.ops.aten) if not n.startswith("__"))
    yield from {str(op).rpartition(".")[0] for op in registry if op.namespace != "aten"}
    if "." not in like:
        yield from (f"torch.{n}" for n in dir(torch) if not n.startswith("_"))
