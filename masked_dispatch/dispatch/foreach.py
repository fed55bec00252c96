"""_foreach_ forms: the single-tensor form on each element of lists, which may mix plain and masked tensors."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from masked_dispatch.dispatch.run_rule import Kernel, has_masked
from masked_dispatch.dispatch.writes import say_what_is_dropped
from masked_dispatch.torch_internals import DispatchKeySet, redispatch, schema_of
from masked_dispatch.update_policy import already_asked
from op_registry.schema import single_form


def foreach_kernel(op: OpOverload) -> Kernel:
    """The single-tensor form on each element, in lists that may mix plain and masked tensors."""
    single = single_form(op)
    assert single is not None
    schema = schema_of(op)
    name = schema.name.partition("::_foreach_")[2].removesuffix("_")
    copies = schema.name == "aten::_foreach_copy_"
    names = [a.name for a in schema.arguments]
    lists = {a.name for a in schema.arguments if str(a.type).startswith("List[") or a.name == "scalars"}
    first_list = next(name for name in names if name in lists)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if isinstance(arguments.get("scalars"), Tensor):
            arguments["scalars"] = arguments["scalars"].tolist()  # one number for each element, as in torch
        elements = [
            {k: v[i] if k in lists else v for k, v in arguments.items()} for i in range(len(arguments[first_list]))
        ]
        if copies:  # check all targets before writing to the first
            say_what_is_dropped(op, [(element["self"], element["src"]) for element in elements])
        with already_asked() if copies else contextlib.nullcontext():
            results = [_call_single(single, name, element) for element in elements]
        return None if schema.is_mutable else results

    return kernel


def _call_single(single: OpOverloadPacket, name: str, arguments: dict[str, Any]) -> Any:
    """Call with the single form's argument names: addcmul's scalars become value=, the others are positional."""
    positional = dict(arguments)
    keywords = {}
    if name in ("addcmul", "addcdiv"):
        for key in ("value", "scalars"):
            if key in positional:
                keywords["value"] = positional.pop(key)
    if name in ("add", "sub") and "alpha" in positional:
        keywords["alpha"] = positional.pop("alpha")
    return single(*positional.values(), **keywords)
