"""_foreach_ forms: the single-tensor form on each element, in lists that may mix plain and masked tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.dispatch.run_rule import Kernel, has_masked
from masked_dispatch.torch_internals import DispatchKeySet, redispatch
from op_registry.schema import single_form


def foreach_kernel(op: OpOverload) -> Kernel:
    """The single-tensor form on each element, in lists that may mix plain and masked tensors."""
    single = single_form(op)
    assert single is not None
    name = op._schema.name.partition("::_foreach_")[2].removesuffix("_")
    arguments = [a.name for a in op._schema.arguments]
    listed = {a.name for a in op._schema.arguments if str(a.type).startswith("List[") or a.name == "scalars"}
    first = next(name for name in arguments if name in listed)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        given = dict(zip(arguments, args, strict=False)) | kwargs
        if isinstance(given.get("scalars"), Tensor):
            given["scalars"] = given["scalars"].tolist()  # one number for each element, as torch reads them too
        results = []
        for i in range(len(given[first])):
            one = {k: v[i] if k in listed else v for k, v in given.items()}
            results.append(_call_single(single, name, one))
        return None if op._schema.is_mutable else results

    return kernel


def _call_single(single: Any, name: str, given: dict[str, Any]) -> Any:
    """Call with the single form's own names: addcmul's scalars become value=, the rest goes by position."""
    values = dict(given)
    keywords = {}
    if name in ("addcmul", "addcdiv"):
        for key in ("value", "scalars"):
            if key in values:
                keywords["value"] = values.pop(key)
    if name in ("add", "sub") and "alpha" in values:
        keywords["alpha"] = values.pop("alpha")
    return single(*values.values(), **keywords)
