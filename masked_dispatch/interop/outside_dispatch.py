"""Masked tensors in parts of torch, Python and other libraries that dispatch does not reach.

Functions of torch that are written in Python are replaced where their lines would mean something else, each masked by
itself. Code that imported such a function by name before this library keeps torch's.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import Tensor, nn
from torch import _lobpcg as lobpcg_module
from torch import _lowrank as low_rank_module
from torch._ops import OpOverload
from torch.nn.utils import convert_parameters

from masked_dispatch.autograd.sparse import unwrap_any
from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.interop.crossing import as_masked, knows_padding, without_extent
from masked_dispatch.process import when_imported
from masked_dispatch.replacements import replace, replace_entry
from masked_dispatch.tensor.checks import contains_masked, is_given_masked
from masked_dispatch.tensor.file_format import parts_of_extent
from masked_dispatch.tensor.mask_sharing import ViewFamily
from masked_dispatch.tensor.masked_tensor import MaskedTensor, family_around, with_extent
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, stored_around, stored_parts
from masked_dispatch.tensor.storage import StoredPieces
from masked_dispatch.torch_internals import (
    TORCHSCRIPT_CALLABLES,
    default_collate_fn_map,
    plain_eager,
    python_function_of,
)
from op_registry import MaskedSemanticsError
from op_registry.extents.joins import extent_of_samples
from op_registry.laws.categories import known_all_valid
from op_registry.ops.attention.modules import OPERATOR
from op_registry.ops.reductions.torch_masked import OPERATORS
from op_registry.records.dense import Dense, map_tensors
from op_registry.records.tracing import may_be_read


def install() -> None:
    """Replace what is replaced, and register with the others; the package calls this once, on import."""
    attention = replace(F, lines_of_torch.__name__, multi_head_attention_forward, has_masked_operand)
    attention.__prepare_scriptable__ = lambda: lines_of_torch  # TorchScript compiles torch's function
    for name, operator in OPERATORS.items():
        replace(torch.masked, name, reduced_by(operator), is_of_masked)
    modules: tuple[Any, ...] = (lobpcg_module, low_rank_module)
    for module in modules:
        replace(module, "has_torch_function", lambda original, arguments: True, lambda given: is_given_masked(*given))
        replace(module, "handle_torch_function", run_overridden, is_given_masked)
    for owner, methods in METHODS.items():
        for name, slices in methods.items():
            replace(owner, name, taking_whole(getattr(owner, name), slices), is_given_masked)
    for owner, name, serving in OTHERS:
        replace(owner, name, serving, is_given_masked)
    for kind in TORCHSCRIPT_CALLABLES:
        replace(kind, "__call__", call_python, lambda self, *args, **kwargs: contains_masked((args, kwargs)))
    exporting: Any = (convert_parameters, nn.utils)
    for module in exporting:
        replace(module, "vector_to_parameters", give_parts, lambda vec, *_, **__: isinstance(vec, MaskedTensor))
    what = "torch.utils.data._utils.collate.default_collate_fn_map[torch.Tensor]"
    replace_entry(default_collate_fn_map, Tensor, what, stacked, lambda batch, **_: is_given_masked(*batch))
    ForkingPickler.register(MaskedTensor, send)
    ForkingPickler.register(SparseMaskedTensor, send)
    ForkingPickler.register(ViewFamily, send_family)
    ForkingPickler.register(StoredPieces, send_stored)
    tell_when_imported()


# --------------------------------------------------------------------------------------- F.multi_head_attention_forward

# torch implements the function of nn.MultiheadAttention in Python: dispatch only sees its operators. For masked tensors
# in eager mode and in compiled regions, which keep a call of the function whole, we call the operator of
# op_registry/ops/attention/modules.py, if it computes the same.

lines_of_torch = F.multi_head_attention_forward
_arguments = inspect.signature(lines_of_torch).parameters
_defaults = {name: a.default for name, a in _arguments.items() if a.default is not a.empty}


def has_masked_operand(*args: Any, **kwargs: Any) -> bool:
    """Return whether a call in eager mode or in a compiled region has a masked query, key or value."""
    if not any(isinstance(a, MaskedTensor) for a in args[:3]):
        return False
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()  # (an exported program keeps torch's lines)
    return plain_eager()


def multi_head_attention_forward(lines_of_torch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace torch's function of this name."""
    # (A signature's own `bind` takes six times as long, 1.5 % of a call on a small batch.)
    passed = {**dict(zip(_arguments, args, strict=False)), **kwargs}
    given = {**_defaults, **passed}
    fits = len(passed) == len(args) + len(kwargs) and given.keys() == _arguments.keys()
    if not fits or not is_one_operator(given):
        return lines_of_torch(*args, **kwargs)
    dropout_p = given["dropout_p"] if given["training"] else 0.0
    query, key, value, *others = (given[name] for name in _OPERANDS)
    keys, values = None if key is query else key, None if value is key else value
    return OPERATOR(query, keys, values, *others, dropout_p, given["is_causal"]), None


_PROJECTIONS = ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias")
_OPERANDS = ("query", "key", "value", "num_heads", *_PROJECTIONS)
_WITHOUT = ("bias_k", "bias_v", "key_padding_mask", "static_k", "static_v")
_NOT = ("add_zero_attn", "use_separate_proj_weight", "need_weights")


def is_one_operator(given: dict[str, Any]) -> bool:
    """Return whether the operator supports these arguments; False for wrong ones, so that torch raises the error."""
    query, key, value, width = (given[name] for name in ("query", "key", "value", "embed_dim_to_check"))
    # With `is_causal=True`, torch trusts the flag and ignores the mask's values.
    causal = given["attn_mask"] is not None
    if causal != given["is_causal"] or any(given[name] for name in _NOT) or any(given[n] is not None for n in _WITHOUT):
        return False
    return (
        query.ndim == key.ndim == 3
        and 0 not in query.shape
        and 0 not in key.shape
        and query.shape[1:] == key.shape[1:]
        and key.shape == value.shape
        and query.shape[-1] == width
        and width % given["num_heads"] == 0
        and given["in_proj_weight"].shape == (3 * width, width)
        and given["out_proj_weight"].shape == (width, width)
    )


# --------------------------------------------------------------------------------------------------------- torch.masked

# The reductions are Python functions; each replacement calls the operator of its name: `torch.masked.mean(x, mask=m)`.


def reduced_by(operator: OpOverload) -> Callable[..., Tensor]:
    """Return a replacement for torch's function that calls the operator."""
    return lambda original, *args, **kwargs: operator(*args, **kwargs)


def is_of_masked(input: Tensor, *args: Any, mask: Tensor | None = None, **kwargs: Any) -> bool:
    """Return whether the input or `mask=` is a masked tensor."""
    return isinstance(input, MaskedTensor) or isinstance(mask, MaskedTensor)


# ---------------------------------------------------------------- torch.lobpcg, torch.svd_lowrank and torch.pca_lowrank

# These functions multiply the matrix by random or trial vectors. Such a product is valid wherever a row of the matrix
# has a valid element, so their individual operators would count invalid elements as zeros, or not, depending on the
# mask. Each first asks `has_torch_function` whether another library overrides it, and then calls
# `handle_torch_function`. We replace both, only in the two modules of these functions. If every element is valid,
# torch's function runs on the data.


def run_overridden(
    original: Callable[..., Any], function: Callable[..., Any], relevant: Iterable[object], *args: Any, **kwargs: Any
) -> Any:
    """Replace torch's handle_torch_function: refuse invalid elements, otherwise call torch's function on the data."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, MaskedTensor) and not is_all_valid(argument):
            raise MaskedSemanticsError(
                f"torch.{function.__name__} has no meaning on a partly valid matrix (shape {tuple(argument.shape)}): "
                "it multiplies the matrix by vectors, and would count invalid elements as zeros. Choose the values "
                "of invalid elements first, x.to_tensor(value), or leave out the rows that have some, "
                "x[x.get_mask().all(-1)]."
            )
    data = [data_if_masked(a) for a in args]
    return map_tensors(as_masked, function(*data, **{name: data_if_masked(a) for name, a in kwargs.items()}), Tensor)


def is_all_valid(tensor: MaskedTensor) -> bool:
    """Return whether every element is valid; False if a graph stores a mask, whose values are unknown."""
    if tensor.storage_layout is not torch.strided:
        return not tensor.is_meta and int(tensor.count()) == tensor.numel()
    return known_all_valid(Dense(tensor._data, tensor._validity))


def data_if_masked(value: object) -> object:
    """Return the data of a fully valid masked tensor; return other values unchanged."""
    return value.get_data() if isinstance(value, MaskedTensor) else value


# -------------------------------------------------------------------------------------------------- torch.distributions

# Each slice of a parameter or value is valid as a whole, or not at all. A draw of a multivariate normal distribution,
# its covariance and its entropy depend on the whole matrix. The individual operators of torch's Python code would sum
# over the valid elements of a matrix: the result would be another covariance, or a draw from another distribution. The
# replaced methods below therefore invalidate a whole slice (the row of a mean, a matrix) if one of its elements is
# invalid. The inner operators could not apply this rule, as nothing in their operands shows that a distribution calls
# them. torch.compile traces the replacements like any Python. Plain arguments stay unchanged.

Dims = tuple[int, ...]
ROW: Dims = (-1,)
MATRIX: Dims = (-2, -1)
OF_NORMALS = {"covariance_matrix": MATRIX, "precision_matrix": MATRIX, "scale_tril": MATRIX}

# Maps each class to its methods, and each method's arguments to the dimensions of a slice.
METHODS: dict[type, dict[str, dict[str, Dims]]] = {
    D.MultivariateNormal: {"__init__": {"loc": ROW, **OF_NORMALS}},
    D.LowRankMultivariateNormal: {
        "__init__": {"loc": ROW, "cov_factor": MATRIX, "cov_diag": ROW},
        "log_prob": {"value": ROW},
    },
    D.Wishart: {"__init__": OF_NORMALS},
    D.LKJCholesky: {"log_prob": {"value": MATRIX}},
    D.CorrCholeskyTransform: {
        "_call": {"x": ROW},
        "_inverse": {"y": MATRIX},
        "log_abs_det_jacobian": {"x": ROW, "y": MATRIX},
    },
    D.StickBreakingTransform: {
        "_call": {"x": ROW},
        "_inverse": {"y": ROW},
        "log_abs_det_jacobian": {"x": ROW, "y": ROW},
    },
}


def whole(value: object, dims: Dims) -> object:
    """Invalidate the slices over `dims` of a masked tensor that have an invalid element; return other values unchanged.

    A tensor without such slices is returned itself, so a distribution shares its parameters' memory as in torch.
    """
    if not isinstance(value, MaskedTensor) or value.dim() < len(dims):
        return value
    mask = value.get_mask()
    slices = mask.all(dims, keepdim=True)
    if not torch.compiler.is_compiling() and may_be_read(mask) and bool((mask == slices).all()):
        return value
    return value.mask_with(slices)


def valid_with(matrices: Tensor | None, degrees: object) -> Tensor | None:
    """Invalidate matrices whose degrees of freedom are invalid, because they have no distribution to draw from."""
    if matrices is None or not isinstance(degrees, MaskedTensor):
        return matrices
    mask = degrees.get_mask()[..., None, None]
    batch = torch.broadcast_shapes(matrices.shape, mask.shape)
    return as_masked(matrices.expand(batch), mask)


def taking_whole(function: Callable[..., Any], slices: Mapping[str, Dims]) -> Callable[..., Any]:
    """Return a replacement that calls `whole` on masked arguments; `slices` maps their names to slice dims."""
    places = tuple(slices.get(name) for name in inspect.signature(function).parameters)

    def method(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = [a if dims is None else whole(a, dims) for a, dims in zip(args, places, strict=False)]
        named = {name: whole(a, slices[name]) if name in slices else a for name, a in kwargs.items()}
        return original(*given, *args[len(places) :], **named)

    return method


def with_degrees(
    init: Callable[..., None],
    self: D.Wishart,
    df: Tensor | float,
    covariance_matrix: Tensor | None = None,
    precision_matrix: Tensor | None = None,
    scale_tril: Tensor | None = None,
    validate_args: bool | None = None,
) -> None:
    """Call Wishart's `__init__` with matrices that are invalid where the degrees of freedom are."""
    matrices = [valid_with(m, df) for m in (covariance_matrix, precision_matrix, scale_tril)]
    init(self, df, *matrices, validate_args)


def of_whole_matrices(call: Callable[..., Tensor], self: D.PositiveDefiniteTransform, x: MaskedTensor) -> Tensor:
    """Call PositiveDefiniteTransform's `_call`, and invalidate matrices with an invalid element.

    The method writes valid zeros into a triangle, so its own products would be partly valid.
    """
    result: Any = call(self, x)
    return result.mask_with(x.get_mask().all(MATRIX, keepdim=True))


# These methods have special replacements.
OTHERS: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (D.Wishart, "__init__", with_degrees),
    (D.PositiveDefiniteTransform, "_call", of_whole_matrices),
)


# ---------------------------------------------------------------------------------------------------------- TorchScript

# TorchScript interprets a graph without calling the original Python function, so replacements of Python functions would
# not apply. After some calls, it also differentiates by formulas for plain tensors, which divide by sizes. So we run
# the original Python function on masked tensors. For modules and loaded files, which have no such function, we refuse.


def call_python(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the Python function that TorchScript compiled."""
    function = python_function_of(self)
    if function is None:
        raise MaskedSemanticsError(
            f"{self.name} of a TorchScript module is called with a masked tensor. TorchScript differentiates by the "
            "formulas of plain tensors, which divide by sizes, not by the number of valid elements. Call the Python "
            "module that was compiled, or torch.compile it; or pass x.to_tensor(fill), and put the mask on the result: "
            "as_masked_tensor(y, mask)."
        )
    return function(*args, **kwargs)


# ---------------------------------------------------------------------------------- torch.nn.utils.vector_to_parameters

# The function assigns ``parameter.data = part``, which torch runs in C++ without dispatch for plain parameters: they
# would become tensors without memory, and reading one would crash the process.


def give_parts(original: Callable[..., None], vec: MaskedTensor, parameters: Iterable[Tensor]) -> None:
    """Check that every parameter is masked before any write, then call torch's function."""
    parameters = list(parameters)
    for number, parameter in enumerate(parameters):
        if not isinstance(parameter, MaskedTensor):
            raise MaskedSemanticsError(
                f"vector_to_parameters of a masked vector of shape {tuple(vec.shape)}: parameter {number}, of shape "
                f"{tuple(parameter.shape)}, is plain, and `parameter.data = masked` can't give it a mask. Give it "
                "values, vec.to_tensor(fill); or make the parameters masked first, "
                "nn.Parameter(masked_tensor(parameter))."
            )
    original(vec, parameters)


# --------------------------------------------------------------------------------------------- examples in a DataLoader

# In a worker process, torch's collate function allocates the batch in shared memory, as a tensor of the first example's
# type, and stacks into it. A masked tensor cannot use such a storage, and a plain tensor would lose the masks. So we
# stack a batch with a masked tensor without preallocation; sending moves it to shared memory as usual.


def stacked(original: Callable[..., Any], batch: Sequence[Tensor], **options: Any) -> Tensor:
    """Stack the batch in new memory; each example keeps the positions that it has."""
    if not any(map(knows_padding, batch)):
        return torch.stack(list(batch), 0)
    records = [unwrap_any(example) for example in batch]
    batched: Any = torch.stack([without_extent(example) for example in batch], 0)
    return with_extent(batched, extent_of_samples(records, "default_collate"))


# ------------------------------------------------------------------------------------------------------ other processes

# torch.multiprocessing's queues and pipes: as with any tensor of torch, the sender first moves data and validity to
# shared memory, and the receiver's tensor uses the same memory. So each process sees the writes of the others.


def send(tensor: MaskedTensor) -> Any:
    """Pickle a masked tensor for another process."""
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support "
            f"crossing process boundaries. This one is the result of {type(tensor.grad_fn).__name__}: send x.detach()."
        )
    if not tensor._mask_is_a_copy:  # a view with another dtype than its base is sent as an independent tensor
        tensor.share_memory_()
    return tensor.__reduce_ex__(2)


def send_family(family: ViewFamily) -> Any:
    """Pickle the validity and the extent that a tensor shares with its views."""
    return receive_family, (family.data, family.memory, *parts_of_extent(family.extent))


@never_compiled
def receive_family(data: Tensor, memory: Tensor, *extent: Any) -> ViewFamily:
    """Build the view family around the validity in shared memory."""
    family = family_around(data, None, memory, *extent)
    family.in_place = True
    return family


def send_stored(stored: StoredPieces) -> Any:
    """Pickle the stored pieces of a sparsely stored tensor."""
    return receive_stored, stored_parts(stored)


@never_compiled
def receive_stored(*parts: Any) -> StoredPieces:
    """Build the stored pieces from their parts in shared memory."""
    stored = stored_around(*parts)
    stored.in_place = True
    return stored


# --------------------------------------------------------------------------------------- libraries that guess a backend

# Libraries that guess a tensor's backend from the module of its type are told to use torch for masked tensors. This
# imports no library: it registers with each one after the program imports it, or now if it is already imported.

_OURS = "masked_dispatch"


def tell_when_imported() -> None:
    """Register with each library as soon as the program has imported it."""
    when_imported("opt_einsum.backends.dispatch", tell_opt_einsum)
    when_imported("autoray.autoray", tell_autoray)


def tell_opt_einsum() -> None:
    """Register with opt_einsum.contract, which checks its first operand, and takes unknown types for NumPy arrays.

    Its table of backends is private. For a release without the table, this does nothing.
    """
    aliases = getattr(sys.modules["opt_einsum.backends.dispatch"], "_aliases", {})
    if "torch" in aliases:
        aliases.setdefault(_OURS, aliases["torch"])


def tell_autoray() -> None:
    """Register with autoray.do and the libraries built on it, through autoray's public function."""
    sys.modules["autoray.autoray"].register_backend_alias(_OURS, "torch")
