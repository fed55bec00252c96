"""In-place, out= and _foreach_ forms, derived from the schema: only the functional form needs a rule."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket


def _packet(qualified: str) -> OpOverloadPacket | None:
    namespace, _, name = qualified.partition("::")
    return getattr(getattr(torch.ops, namespace), name, None)


def _signature(op: OpOverload, without: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in without]


def written_arguments(op: OpOverload) -> tuple[str, ...]:
    """The names of the arguments that the overload writes to."""
    return tuple(a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def is_inplace(op: OpOverload) -> bool:
    """Whether the overload writes to its first argument only, and returns it: add_, copy_, __iand__ …"""
    return bool(op._schema.arguments) and written_arguments(op) == (op._schema.arguments[0].name,) and not is_out(op)


def is_out(op: OpOverload) -> bool:
    """Whether the overload writes to keyword-only arguments that receive its results.

    It returns them, except lists: ``unbind_copy.int_out(…, Tensor(a!)[] out) -> ()``.
    """
    written = written_arguments(op)
    keyword_only = all(a.kwarg_only for a in op._schema.arguments if a.name in written)
    return bool(written) and keyword_only and len(op._schema.returns) in (0, len(written))


def writes_a_factory(op: OpOverload) -> bool:
    """Whether the overload is a factory that writes to `out`, and takes no other tensor: zeros.out, arange.out.

    This excludes factories whose result is uninitialised, quantized or a torch.sparse tensor.
    """
    name = op._schema.name.removeprefix("aten::")
    tensors = [a.name for a in op._schema.arguments if "Tensor" in str(a.type)]
    strided = not name.startswith(("_", "empty", "sparse_", "from_file"))
    return op.namespace == "aten" and strided and is_out(op) and tensors == ["out"]


def is_like_factory(op: OpOverload) -> bool:
    """Whether it makes a tensor with the shape of another one, without reading that one's values."""
    return op._schema.name.endswith("_like")


def is_foreach(op: OpOverload) -> bool:
    """Whether the overload is the list form of an operator."""
    return op._schema.name.startswith("aten::_foreach_")


def is_inplace_of_lists(op: OpOverload) -> bool:
    """Whether the overload writes to the tensors of a list: _foreach_add_."""
    return is_foreach(op) and op._schema.is_mutable and not is_out(op)


def is_view(op: OpOverload) -> bool:
    """Whether the result aliases an argument that is not written to."""
    return not written_arguments(op) and any(r.alias_info is not None for r in op._schema.returns)


def changes_metadata(op: OpOverload) -> bool:
    """Whether the overload is an in-place form that changes shape or strides only: transpose_, squeeze_ …"""
    return torch.Tag.inplace_view in op.tags


def functional_form(op: OpOverload) -> OpOverload | None:
    """The overload that computes what `op` writes, if any: add.Tensor for add_.Tensor and add.out."""
    if not op._schema.is_mutable:
        return None
    found = _functional_forms.get(op)
    if found is None:
        found = _functional_form(op)
        if found is not None:  # a library may define it later
            _functional_forms[op] = found
    return found


_functional_forms: dict[OpOverload, OpOverload] = {}


def _functional_form(op: OpOverload) -> OpOverload | None:
    if is_out(op):
        names = [op._schema.name]
        without = frozenset(written_arguments(op))
    elif is_inplace(op):
        names = [re.sub(r"::__i(\w+)__$", r"::__\1__", op._schema.name).removesuffix("_")]
        if op._schema.name.endswith("__"):
            names = [re.sub(r"::__i(\w+)__$", r"::__\1__", op._schema.name)]
        names.append(names[0] + "_functional")
        without = frozenset()
    else:
        return None
    wanted = _signature(op, without)
    for name in names:
        packet = _packet(name)
        for overload in packet.overloads() if packet is not None else ():
            candidate: OpOverload = getattr(packet, overload)
            if not candidate._schema.is_mutable and sorted(_signature(candidate)) == sorted(wanted):
                return candidate
    return None


def functional_call(op: OpOverload) -> Callable[..., Any]:
    """The functional form as a function with the signature of `op`.

    That includes op's defaults (bernoulli_(p=0.5) is bernoulli(p)) and its order (polygamma_(x, n) is polygamma(n, x)).
    """
    base = functional_form(op)
    assert base is not None, f"{op} has no functional form"
    required = {a.name for a in base._schema.arguments if not a.has_default_value()}
    names = [a.name for a in op._schema.arguments]
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value() and a.name in required}
    if not defaults and names[0] == base._schema.arguments[0].name:
        return base

    def call(*args: Any, **kwargs: Any) -> Any:
        return base(**(defaults | dict(zip(names, args, strict=False)) | kwargs))

    return call


@functools.cache
def single_form(op: OpOverload) -> OpOverloadPacket | None:
    """The single-tensor operator that a _foreach_ overload applies to each tensor: add_ for _foreach_add_."""
    if not is_foreach(op):
        return None
    name = op._schema.name.replace("::_foreach_", "::")
    if name.endswith(("::norm", "::powsum")):
        return torch.ops.aten.linalg_vector_norm if name.endswith("::norm") else None
    if is_inplace_of_lists(op) or op._overloadname.startswith("Scalar"):
        # maximum has neither an in-place form nor one with a number; clamp_min has both.
        name = name.replace("::maximum", "::clamp_min").replace("::minimum", "::clamp_max")
    return _packet(name)


def mutable_forms(op: OpOverload) -> list[OpOverload]:
    """The in-place and out= overloads of `op`, ``op_`` and ``op_functional`` whose functional form is `op`."""
    name = op._schema.name
    packets = [_packet(n) for n in dict.fromkeys((name, f"{name}_", name.removesuffix("_functional")))]
    overloads: list[OpOverload] = [getattr(p, name) for p in packets if p is not None for name in p.overloads()]
    return [candidate for candidate in overloads if functional_form(candidate) is op]


def misfit(function: Callable[..., Any], first: Sequence[Any], given: Sequence[torch.Argument]) -> str | None:
    """The function with its signature, if it cannot be called with these arguments of the operator."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # of a function written in C, which says nothing about its arguments
        return None
    try:
        signature.bind(
            *first, *(a.name for a in given if not a.kwarg_only), **{a.name: a for a in given if a.kwarg_only}
        )
    except TypeError:
        return f"{getattr(function, '__name__', function)}{signature}"
    return None
