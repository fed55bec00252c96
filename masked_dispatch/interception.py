"""The one module that touches torch's private dispatch surface (checked on torch 2.11–2.13).

What it relies on, each with a test in tests/test_torch_assumptions.py:

* a wrapper subclass may carry the ``PreDispatch`` key, and kernels registered there receive the exact overload, above
  functorch, autocast and autograd, before CompositeImplicit operators decompose;
* the key falls through for tensors that do not carry it, so plain tensors never meet these kernels outside of tracing;
* a kernel may hand a call on by removing the key from the keyset that it *received* (rebuilding one drops keys that
  torch needs, and crashes);
* autograd nodes accept hooks that replace the gradients that they hand on.

Should torch withdraw the key: the same rules can be entered from ``__torch_function__`` (as `exporting_shim` below does while
export traces), at 1.3 µs more per call and without what C++ composites call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.library import Library

PRE_DISPATCH = DispatchKeySet(DispatchKey.PreDispatch)
_PRE_DISPATCH_BITS = PRE_DISPATCH.raw_repr()
_ABOVE_PYTHON_BITS = (
    DispatchKeySet(DispatchKey.AutogradFunctionality).raw_repr() | DispatchKeySet(DispatchKey.ADInplaceOrView).raw_repr()
)
_from_bits = DispatchKeySet.from_raw_repr

# The current functorch level, or None outside of any transform.
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
no_torch_function = torch._C._disabled_torch_function_impl


def under_transform() -> bool:
    """Whether a functorch transform (vmap, grad, jvp …) is running."""
    return transform_level() is not None


def in_forward_mode() -> bool:
    """Whether forward-mode AD is on, outside of functorch."""
    return forward_ad._current_level >= 0


def redispatch(op: OpOverload, keyset: DispatchKeySet, args: Any, kwargs: Any) -> Any:
    """The call as torch would have gone on with it, had there been no kernel at PreDispatch."""
    return op.redispatch(_from_bits(keyset.raw_repr() & ~_PRE_DISPATCH_BITS), *args, **kwargs)


def register_kernel(library: Library, op: OpOverload, kernel: Callable[..., Any]) -> None:
    """Register `kernel(keyset, *args, **kwargs)` for `op` at PreDispatch."""
    library.impl(op.name().partition("::")[2], kernel, "PreDispatch", with_keyset=True)


@contextlib.contextmanager
def tracking_views_and_versions() -> Iterator[None]:
    """Inside ``__torch_dispatch__``: let inner tensors become proper views and bump their version counters.

    Below autograd both are switched off, and what a rule saved for backward would not notice being overwritten.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    inplace_or_view = DispatchKeySet(DispatchKey.ADInplaceOrView).raw_repr()
    with torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), _from_bits(excluded.raw_repr() & ~inplace_or_view)
    ):
        yield


@contextlib.contextmanager
def metadata_only() -> Iterator[None]:
    """Apply an operator to the wrapper itself: shape and strides change, nothing is computed."""
    with torch._C._DisableTorchDispatch():
        yield


def running_node() -> Any:
    """The autograd node that the engine is executing in this thread, or None."""
    return torch._C._current_autograd_node()


def tracing_before_dispatch() -> bool:
    """Whether torch.export or make_fx(pre_dispatch=True) is tracing: its modes run before kernels at PreDispatch."""
    return bool(torch._ops._len_torch_dispatch_stack_pre_dispatch())


def make_data_pointer_raise(tensor: torch.Tensor) -> None:
    """A wrapper has no memory of its own; let data_ptr() and dlpack say so instead of handing out address 0."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)


def composite_overloads() -> Iterator[OpOverload]:
    """Every aten overload that torch itself defines by others and that takes a tensor."""
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            continue
        packet, _, overload = name[len("aten::") :].partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is not None and any("Tensor" in str(a.type) for a in op._schema.arguments):
            yield op
