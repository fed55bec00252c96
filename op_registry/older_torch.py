"""What older releases of torch lack: the one place that names them, so that each function goes with its release.

Everything asks for a kernel or a name, never for a version, and says which release makes it unnecessary. When that is
the oldest of masked_dispatch.versions.TESTED, remove it here and where it is used. (The releases from which a
replacement in torch is needed, or no longer, are in masked_dispatch/replacements.py.)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch._functorch import eager_transforms

if not hasattr(torch.ops.aten, "_foreach_powsum"):
    raise ImportError(
        f"op_registry and masked_dispatch need torch 2.11 or newer, and this is torch {torch.__version__}: it lacks "
        "operators that the rules name, such as aten._foreach_powsum. Install a newer torch."
    )

# torch 2.13: unnecessary (vmap has a rule for view(dtype)).
VMAP_VIEWS_DTYPES: bool = torch._C._dispatch_has_kernel_for_dispatch_key("aten::view.dtype", "FuncTorchBatched")


def _where_takes_unsigned() -> bool:
    choice = torch.zeros(1, dtype=torch.uint16, device="cpu")
    try:
        torch.where(choice == 0, choice, choice)
    except NotImplementedError:
        return False
    return True


# torch 2.13: unnecessary (torch.where on the CPU takes uint16, uint32 and uint64).
WHERE_TAKES_UNSIGNED = _where_takes_unsigned()


def _in_inference_mode() -> bool:
    return torch.is_inference_mode_enabled()


_in_inference_mode._dynamo_marked_constant = True  # type: ignore[attr-defined]


def outside_inference_mode(transformed: Callable[..., Any]) -> Callable[..., Any]:
    """A transform of torch.func, or what it returned, to be called outside of inference mode."""
    # torch 2.12: unnecessary (transforms leave the mode themselves; before, derivatives in it are zeros, silently).
    if not _in_inference_mode():
        return transformed

    def outside(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False):
            return transformed(*args, **kwargs)

    return outside


def derivatives_are_lost() -> bool:
    """Whether a transform of torch.func that differentiates runs in inference mode, and so gives zeros, silently."""
    # torch 2.12: unnecessary (transforms leave the mode themselves).
    if not _in_inference_mode() or hasattr(eager_transforms, "_disable_inference_mode"):
        return False
    functorch = torch._C._functorch
    levels = functorch.get_interpreter_stack() or []
    return any(level.key() in (functorch.TransformType.Grad, functorch.TransformType.Jvp) for level in levels)


def next_functions(node: Any) -> tuple[Any, ...]:
    """The edges of the node of an autograd function; none if the graph that it belonged to is gone."""
    # torch 2.13: unnecessary (the node in Python keeps the one in C++; before, the engine crashes if asked for it).
    try:
        return node.next_functions
    except RuntimeError:
        return ()


def with_contiguous_strides(indices: Tensor) -> Tensor:
    """The indices of a compressed tensor, in a form that torch's check of its invariants takes for contiguous."""
    # torch 2.12: unnecessary (without elements, strides of 0 are contiguous).
    return indices if indices.numel() else indices.new_empty(indices.shape)


def warn_of_unchecked_sparse_tensors() -> None:
    """Let torch warn, once and unheard, of unchecked sparse tensors: ours are made without checks on purpose."""
    # torch 2.13: unnecessary (calls that say check_invariants warn of nothing).
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_coo_tensor(size=(0,), device="cpu", check_invariants=False)  # type: ignore[call-arg]


def all_gather_single() -> Callable[..., Any]:
    """The function of torch.distributed that gathers into one tensor."""
    # torch 2.13: unnecessary (it has the newer name).
    return getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def reduce_scatter_single() -> Callable[..., Any]:
    """The function of torch.distributed that reduces and scatters one tensor."""
    # torch 2.13: unnecessary (it has the newer name).
    return getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


def trace_where_called(rules: Any, folders: tuple[str, ...], replace: Callable[..., Any]) -> None:
    """Let Dynamo trace functions of files that it leaves alone, in these folders, where traced code calls them."""
    # torch 2.12: unnecessary (it has a list of such folders; before, for torch's own files alone).
    listed: set[str] | None = getattr(rules, "BUILTIN_INLINE_WHEN_CALLED", None)
    if listed is not None:
        listed.update(folders)
        return

    def is_torch_inline_allowed(original: Callable[[str], bool], file: str) -> bool:
        return file.startswith(folders) or original(file)

    replace(rules, "is_torch_inline_allowed", is_torch_inline_allowed, lambda file: False, always=True)


def records_new_tensor(variable: type) -> bool:
    """Whether Dynamo has no method of its own for x.new_tensor(data), and so records the call."""
    # torch 2.12: unnecessary (it has the method).
    return not hasattr(variable, "method_new_tensor")


def take_apart_operands_of(kind: type, replace: Callable[..., Any]) -> None:
    """Let Dynamo, which is loaded, see the inner tensors of operands of `kind` when it checks those of cond."""
    from torch._higher_order_ops import utils

    # torch 2.13: unnecessary (it takes wrappers apart).
    if "__tensor_flatten__" in utils._collect_fake_inputs.__code__.co_names:
        return

    def example(operand: Any) -> Any:
        return getattr(getattr(operand, "node", operand), "meta", {}).get("example_value")

    def parts(original: Callable[[Any], list[Any]], operand: Any) -> list[Any]:
        value = example(operand)
        if not isinstance(value, kind):
            return original([operand])
        names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return [getattr(value, name) for name in names]

    def collect(original: Callable[[Any], list[Any]], operands: Sequence[Any]) -> list[Any]:
        return [part for operand in operands for part in parts(original, operand)]

    def concerns(operands: Sequence[Any]) -> bool:
        return any(isinstance(example(operand), kind) for operand in operands)

    replace(utils, "_collect_fake_inputs", collect, concerns)
