"""Error texts: each says what is wrong, with which values, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.torch_internals import schema_of
from op_registry.registration import writes

CALLED_DIRECTLY = (
    "MaskedTensor is not called directly: masked_dispatch.masked_tensor(data, mask) copies into a new leaf, "
    "masked_dispatch.as_masked_tensor(data, mask) shares memory and is differentiable"
)


def written_through_view(target: Any) -> str:
    """For a write through a view that would change which positions of the base are there."""
    return (
        f"what is written to a view of shape {tuple(target.shape)} has other positions than the view, and its base "
        "cannot learn of them through it. Write into the tensor itself, x[index] = value; join steps with torch.stack; "
        "or write value.without_extent()."
    )


def extent_not_in_view(target: Any) -> str:
    """For a view of a tensor of which a write has changed which positions are there."""
    return (
        f"a view of shape {tuple(target.shape)} has other dimensions than its base, and a write has changed which "
        "positions of the base are there. Take the view again, after the write."
    )


def extent_not_carried(tensor: Tensor, how: str) -> str:
    """For whatever would lose which positions of a padded batch are there."""
    return (
        f"a masked tensor of shape {tuple(tensor.shape)} knows which of its positions are there, and {how} does not "
        "carry that yet. Pass x.without_extent(), in which padding counts as missing, and say again what is there with "
        "masked_dispatch.padded."
    )


def no_such_name(
    module: str,
    name: str,
    words: Mapping[str, str] | None = None,
    names: Iterable[str] = (),
    torch: str | None = None,
) -> NoReturn:
    """Raise the AttributeError of a public module for a name that it lacks.

    words  for names of other libraries: the code to write here
    names  the module's own names; the error for any other name lists them
    torch  the function of torch with this name
    """
    if words is not None and name in words:
        instead = f"; here it is written {words[name]}"
    elif torch is not None:
        instead = f"; {torch}"
    else:
        instead = f"; it has {', '.join(names)}" if names else ""
    raise AttributeError(f"module {module!r} has no attribute {name!r}{instead}", name=name)


def likely_category(op: OpOverload) -> tuple[str, str]:
    """The category an operator most likely belongs to, and the line that would register it."""
    name = str(op).replace(".default", "")
    if torch.Tag.pointwise in op.tags:
        return "elementwise", f"op_registry.authoring.elementwise(torch.ops.{name})"
    schema = schema_of(op)
    arguments = {a.name for a in schema.arguments}
    tensors = sum(str(a.type) in ("Tensor", "Optional[Tensor]") for a in schema.arguments)
    if torch.Tag.reduction in op.tags or {"dim", "keepdim"} <= arguments:
        return "reduction", f"op_registry.authoring.reduction(torch.ops.{name}, identity=0)"
    if "dim" in arguments and tensors == 1:
        return "reduction, if it gives one number for each slice, or scan, if one for each element", (
            f"op_registry.authoring.reduction(torch.ops.{name}, identity=0)  # or scan(…); 0, if a 0 changes nothing"
        )
    if tensors == 1 and len(arguments) == 1:
        return "elementwise", f"op_registry.authoring.elementwise(torch.ops.{name})"
    return "a function of its own", (
        f"@op_registry.authoring.masked_rule(torch.ops.{name}, category=…)\n"
        f"    def {schema.name.partition('::')[2]}({', '.join(a.name for a in schema.arguments)}): ..."
    )


def no_rule(op: OpOverload, called_with: str) -> str:
    """Why an operator without a rule is refused, and the alternatives."""
    if schema_of(op).is_mutable:
        advice = writes(op)
    else:
        category, line = likely_category(op)
        advice = f"likely category: {category}; to register it:\n    {line}"
    return (
        f"{op} has no masked meaning: no rule is registered for it and torch has no decomposition of it.\n"
        f"  called with: {called_with or 'masked tensors'}\n"
        f"  {advice}\n"
        "  or fill first, if invalid elements may take a value: x.to_tensor(value)"
    )


def passed_to_torch_func(tensor: Tensor) -> str:
    """Why a masked tensor may not be passed to a torch.func transform directly."""
    return (
        f"a masked tensor of shape {tuple(tensor.shape)} was passed to a transform of torch.func (vmap, grad, jvp …; "
        "associative_scan runs one), which wraps it without its mask: derivatives would be those of the plain "
        "operators. Use the transform of the same name from masked_dispatch.functional, or pass x.get_data() and "
        "x.get_mask() and mask inside."
    )


def linearized(tensor: Tensor) -> str:
    """Why torch.func.linearize does not support masked tensors."""
    return (
        f"a masked tensor of shape {tuple(tensor.shape)} is used in a function that torch.func.linearize records: the "
        "graph would have neither its mask nor its derivative. Use masked_dispatch.functional.jvp."
    )


def returned_to_torch_func(tensor: Tensor) -> str:
    """Why a masked tensor may not leave a transform of torch.func."""
    return (
        f"a masked tensor of shape {tuple(tensor.shape)} that was made inside a transform of torch.func (vmap, grad, "
        "jvp …) leaves it; torch.func would return silent zeros, or a dead tensor. Use the transform of the same name "
        "from masked_dispatch.functional, or return x.to_tensor(fill) (and x.get_mask())."
    )


def tangent_stored_otherwise(gradient: Tensor) -> str:
    """Why the gradient of a compiled region's sparse result must have the layout of the result."""
    kind = f"one stored as {gradient.storage_layout}" if hasattr(gradient, "storage_layout") else "a plain tensor"
    return (
        "a compiled function returned a sparsely stored masked tensor, and its gradient, of shape "
        f"{tuple(gradient.shape)}, is {kind}: the graph takes gradients in the layout of its results. If you passed "
        "it to backward(), pass grad.mask_like(y). If the loss does not depend on the result, return y.detach(), or "
        "do not return it."
    )


def data_assigned(tensor: Tensor, value: object) -> str:
    """Why ``x.data = y`` is refused for a `y` that `x` cannot take over."""
    given = f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else "no tensor"
    return (
        f"x.data = y takes a densely stored masked tensor of the shape, dtype and device of x ({tuple(tensor.shape)}, "
        f"{tensor.dtype}, {tensor.device}), and x stored densely; y is a {type(value).__name__} ({given}). Use "
        "x.copy_(y) under torch.no_grad() to write values and mask, or x.get_data() to access the stored values."
    )


def data_assigned_in_graph(tensor: Tensor) -> str:
    """Why ``x.data = y`` is refused in a compiled region and inside transforms."""
    return (
        f"x.data = y of a masked tensor of shape {tuple(tensor.shape)} inside a compiled region or a transform would "
        "replace an input of the graph. Use x.copy_(y) under torch.no_grad()."
    )


def deep_copied_result(tensor: Tensor) -> str:
    """Why only leaves are deep-copied."""
    return (
        "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment; this "
        f"one is the result of {type(tensor.grad_fn).__name__}. Copy x.detach() instead."
    )


def data_pointer_requested(tensor: Tensor) -> str:
    """Why a masked tensor has no data_ptr()."""
    return (
        f"a masked tensor of shape {tuple(tensor.shape)} has no single address: it is data and a mask. "
        "Use x.get_data().data_ptr(), or x.to_tensor(fill).data_ptr()."
    )


def copied_mask_shared(tensor: Tensor) -> str:
    """Why a view of another dtype cannot be put into shared memory."""
    return (
        f"share_memory_() of a view of another dtype ({tensor.dtype}, shape {tuple(tensor.shape)}), whose mask is a "
        "copy: what other processes write to its base would not show here. Share the base, or a clone."
    )


def sent_with_its_graph(tensor: Tensor) -> str:
    """Why only leaves are sent to other processes, as in torch."""
    return (
        "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support crossing "
        f"process boundaries. This one is the result of {type(tensor.grad_fn).__name__}: send x.detach()."
    )


def pattern_is_shared(tensor: Tensor, layout: object) -> str:
    """Why a write to a sparsely stored tensor in shared memory is refused."""
    return (
        f"an in-place operation would store other elements in a masked tensor of shape {tuple(tensor.shape)} that is "
        f"stored as {layout} and lies in shared memory: its indices cannot change there. Write only to elements that "
        "are stored (values may become invalid), write to x.clone(), or share x.to_dense()."
    )


def memory_requested(tensor: Tensor) -> str:
    """Why a masked tensor has no storage() of its own."""
    return (
        f"a masked tensor of shape {tuple(tensor.shape)} has no memory of its own: it is data and a mask. torch.save "
        "keeps both. A file format of plain tensors, such as safetensors, takes x.to_tensor(fill) and x.get_mask() "
        "under two names, and as_masked_tensor(data, mask) puts them together again. For the memory itself use "
        "x.get_data().storage()."
    )


def memory_shown(size: int, device: torch.device) -> str:
    """The text that prints for the storage of a wrapper, which has no memory."""
    return (
        f"[torch.storage.UntypedStorage(device={device}) of size {size}, without memory of its own: the values of a "
        "masked tensor lie in x.get_data().untyped_storage()]"
    )


def called_on_memory(tensor: Tensor, method: str) -> str:
    """Why apply_(), map_() and map2_() do not call a Python function on the elements of a masked tensor."""
    return (
        f"x.{method}() calls a Python function on every element in memory, but the invalid elements of a masked "
        f"tensor, here of shape {tuple(tensor.shape)}, must not be read. Write the function in torch operators; or "
        f"call it on plain data and mask the result: as_masked_tensor(x.to_tensor(fill).{method}(…), x.get_mask())."
    )


# This omits the tensor's shape, whose sizes are tensors while torch.jit.trace records.
TRACED_BY_JIT = (
    "torch.jit.trace records a function of a masked tensor, and its graph would have neither the mask nor the rules. "
    "Use torch.compile(f), or torch.export of a function that takes data and mask, makes as_masked_tensor(data, mask) "
    "inside and returns y.to_tensor(fill) (and y.get_mask())."
)


def run_by_torchscript(name: str) -> str:
    """Why a method that TorchScript has compiled does not take masked tensors."""
    return (
        f"{name} of a TorchScript module is called with a masked tensor. TorchScript differentiates by the formulas "
        "of plain tensors, which divide by sizes, not by the number of valid elements. Call the Python module that "
        "was compiled, or torch.compile it; or pass x.to_tensor(fill), and put the mask on the result: "
        "as_masked_tensor(y, mask)."
    )


def mask_is_masked(mask: Tensor) -> str:
    """Why a mask is a plain tensor."""
    return (
        f"the mask is itself a masked tensor of shape {tuple(mask.shape)}, whose invalid entries are neither True nor "
        "False. Say which they are: x.mask_with((x < 2).to_tensor(False)). To take over the mask of another tensor use "
        "x.mask_like(other), or pass other.get_mask()"
    )


def more_elements_than_int64(sizes: tuple[int, ...], elements: int) -> str:
    """Why a result is too large even for sparse storage."""
    return (
        f"the result has sizes {sizes}, {elements:,} elements, more than int64 can number, and torch makes no such "
        "tensor, stored sparsely or not: concatenate, repeat or expand less, or keep the parts in a list"
    )


def invalid_elements_exported(tensor: Tensor, method: str, invalid: int) -> str:
    """Why numpy(), NumPy's functions, tolist() and DLPack need every element to be valid."""
    operators = (
        " An operator with an array, x + array, asks for it too: write x + torch.as_tensor(array)."
        if method == "np.asarray()"
        else ""
    )
    return (
        f"{method} of a masked tensor of shape {tuple(tensor.shape)} with {invalid} invalid elements, which have no "
        "values. Choose their value with x.to_tensor(fill), or keep the mask: "
        "x.to_numpy(), a masked array of NumPy, which matplotlib draws with gaps; or masked_dispatch.interop."
        f"to_numpy_masked(x, fill_value), to_pandas(x) or to_arrow(x).{operators}"
    )


def new_sparse_tensor_requested(layout: torch.layout) -> str:
    """Why new_tensor(…, layout=…) is refused."""
    return (
        f"x.new_tensor(data, layout={layout}) would give a torch.sparse tensor, which has no place for a mask. Leave "
        f"the layout out, and store the result sparsely: x.new_tensor(data).to_layout({layout})."
    )


def alias_of_another_type(like: Tensor, other: Tensor) -> str:
    """Why x.new(tensor) is refused for another dtype or device, as torch does."""
    return (
        f"x.new(tensor) shares the tensor's memory, so that has to be {like.dtype} on {like.device}, like x; it is "
        f"{other.dtype} on {other.device}. To copy it, use x.new_tensor(tensor)."
    )


def passed_to_export(tensor: Tensor) -> str:
    """Why torch.export takes no masked arguments, and what to use instead."""
    return (
        f"torch.export was given a masked tensor of shape {tuple(tensor.shape)} as an argument, and an exported "
        "program takes plain tensors. Use program = masked_dispatch.export(module, args), which takes (data, mask) in "
        "place of it and runs without this library; for ONNX torch.onnx.export(program, f='model.onnx', dynamo=True)."
    )


EXPORTED_BY_ANOTHER_VERSION = (
    "this exported program makes masked tensors by operators of masked_dispatch, and was exported by another "
    "version of the library, or under other rules (windows, an overlay of the registry), so its operators may mean "
    "something else now. Export it again; a program of masked_dispatch.export, or one after run_decompositions(), "
    "does not depend on the library."
)


BATCH_OF_TANGENTS = (
    "torch.autograd.functional.jacobian(vectorize=True, strategy='forward-mode') batches tangents in a way that "
    "autograd functions cannot take. Use masked_dispatch.functional.jacfwd(f)(x), or strategy='reverse-mode'."
)
