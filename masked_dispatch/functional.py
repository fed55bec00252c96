"""torch.func's transforms, for functions that take and return masked tensors.

Functorch wraps the tensors it is given; around a masked tensor that would hide the mask, and differentiate with the
formulas of the plain operators. So at the boundary of each transform a masked tensor is split into `data` and
`validity` and reassembled inside, where its inner tensors carry the transform. The signatures are torch.func's, and
the transforms nest: ``vmap(grad(f))``, ``hessian(f)``, ``torch.compile(vmap(grad(f)))``.

==================  ===================================================================================================
vmap                maps over data and mask alike; ``in_dims`` and ``out_dims`` are dimensions of the masked tensor;
                    sparse storage is stored densely for it, as for an operator without a sparse form
grad, vjp           with respect to the data; a gradient has the mask and the storage of its argument. A masked scalar
                    is a loss; an invalid one has zero gradients
jvp                 tangents count as zero where invalid; the tangent of an output has the output's mask
jacrev, jacfwd      an element is valid if its output element and its input element are; stored densely, as in vmap
==================  ===================================================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from masked_dispatch.policies import check_allowed
from masked_dispatch.tensor.masked_tensor import MaskedTensor, with_extent
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import broadcast_to_leaves, mapped_dim, tree_flatten, tree_map, tree_unflatten
from op_registry.extents.pieces import booleans_of, of_outer, with_booleans, with_samples, without_dim
from op_registry.older_torch import outside_inference_mode
from op_registry.records.arguments import with_leading_dims
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent
from op_registry.records.validity import intersect

_ops = torch.ops.masked_dispatch
Argnums = int | tuple[int, ...]

__all__ = ["grad", "grad_and_value", "hessian", "jacfwd", "jacrev", "jvp", "vjp", "vmap"]


def __dir__() -> list[str]:
    return [*__all__]


# ------------------------------------------------------------------------------------- splitting and reassembling


class _Split(NamedTuple):
    """A masked tensor as vmap sees it, in tensors of one shape: its validity if one is stored, extent booleans."""

    data: Tensor
    validity: tuple[Tensor, ...]
    booleans: tuple[Tensor, ...]


def _densely(value: object, transform: str) -> object:
    """A sparsely stored tensor, stored densely for a transform without a sparse form if the policy allows it."""
    if not isinstance(value, SparseMaskedTensor):
        return value
    check_allowed(f"masked_dispatch.functional.{transform}", [value], "it maps over dimensions of the stored values")
    return value._stored_densely()


class _Leaves:
    """Takes masked leaves of trees apart for vmap, and reassembles them; keeps the extents of all, in order."""

    def __init__(self) -> None:
        self.extents: list[Extent | None] = []

    def split(self, tree: object) -> Any:
        return tree_map(self._split, tree)

    def reassemble(self, tree: object, change: Callable[[Extent, int, Tensor], Extent]) -> Any:
        """The leaves again; `change` makes an extent, the number of its leaf, and data, what is known there."""
        numbers = iter(range(len(self.extents)))

        def masked(value: object) -> object:
            if not _is_split(value):
                return value
            whole: MaskedTensor = _ops.from_parts(value.data, value.validity[0] if value.validity else None)
            number = next(numbers)
            extent = self.extents[number]
            if extent is None:
                return whole
            return with_extent(whole, with_booleans(change(extent, number, value.data), value.booleans))

        return tree_map(masked, tree, is_leaf=_is_split)

    def _split(self, value: object) -> object:
        value = _densely(value, "vmap")
        if not isinstance(value, MaskedTensor):
            return value
        extent = value._extent
        booleans = tuple(b.expand(value.shape) for b in ([] if extent is None else booleans_of(extent)))
        self.extents.append(extent)
        validity = () if value._graph_validity is None else (_ops.validity_of(value).expand(value.shape),)
        return _Split(_ops.data_of(value), validity, booleans)


def _inside(extent: Extent, number: int, data: Tensor) -> Extent:
    dim = mapped_dim(data)
    return extent if dim is None else without_dim(extent, dim)


def _dims_of_masked(out_dims: object, output: object) -> list[int | None]:
    """The dimension that vmap adds to each masked leaf of an output."""
    leaves, spec = tree_flatten(output)
    if len(leaves) == 1 and isinstance(out_dims, tuple):
        dims = list(out_dims)
    else:
        dims = broadcast_to_leaves(out_dims, spec) or [None] * len(leaves)  # torch raises
    return [
        None if dim is None else dim % (leaf.ndim + 1)
        for dim, leaf in zip(dims, leaves, strict=False)
        if isinstance(leaf, MaskedTensor)
    ]


def _is_split(value: object) -> TypeGuard[_Split]:
    return isinstance(value, _Split)


class _Sparsity(NamedTuple):
    """The sparsity pattern of a tensor except its index tensors, of which there are `pieces`."""

    layout: str  # its name
    sizes: tuple[int, ...]
    block: tuple[int, int] | None
    order: tuple[int, ...] | None
    pieces: int
    shape: tuple[int, ...]  # of the tensor


_MaskKind = tuple[int, _Sparsity | None, Extent | None]
# What leaves a transform unchanged: the mask tensors of the outputs and of the aux, and the aux without masks.
_Carried = tuple[tuple[Tensor, ...], tuple[Tensor, ...], Any]


class _Mask(NamedTuple):
    """What a masked leaf of a tree has besides its data.

    tensors   the validity if one is stored, then the booleans of the extent; in sparse storage, index tensors first
    sparsity  None for dense storage
    extent    what is known of it; its booleans are among the tensors
    """

    tensors: tuple[Tensor, ...] = ()
    sparsity: _Sparsity | None = None
    extent: Extent | None = None

    def masked(self, data: Tensor) -> Tensor:
        """The leaf with `data`."""
        sparsity = self.sparsity
        if sparsity is None:
            masked: MaskedTensor = _ops.from_parts(data, self.validity)
            return with_extent(masked, self.whole_extent)
        stored: MaskedTensor = _ops.from_stored(data, self.validity, self.pieces, *sparsity[:4])
        return with_extent(stored, self.whole_extent)

    @property
    def pieces(self) -> list[Tensor]:
        """The index tensors of a leaf in sparse storage."""
        return list(self.tensors[: 0 if self.sparsity is None else self.sparsity.pieces])

    @property
    def validity(self) -> Tensor | None:
        """The validity, if one is stored."""
        booleans = 0 if self.extent is None else len(booleans_of(self.extent))
        stored = self.tensors[len(self.pieces) : len(self.tensors) - booleans]
        return stored[0] if stored else None

    @property
    def whole_extent(self) -> Extent | None:
        """The extent with its booleans."""
        extent = self.extent
        if extent is None:
            return None
        return with_booleans(extent, self.tensors[len(self.tensors) - len(booleans_of(extent)) :])

    def values_of(self, tangent: Tensor) -> Tensor:
        """The elements of a tangent at the coordinates of the leaf's values, for a leaf in sparse storage."""
        sparsity = self.sparsity
        assert sparsity is not None
        if tuple(tangent.shape) != sparsity.shape:
            raise RuntimeError(
                f"a tangent or cotangent of shape {tuple(tangent.shape)} was given for a masked tensor of shape "
                f"{sparsity.shape} stored as {sparsity.layout}; it has to have that shape, in any layout"
            )
        return _ops.values_at(tangent, self.pieces, *sparsity[:4])

    @property
    def kind(self) -> _MaskKind:
        """The number of tensors, the sparsity, and what is known of the extent."""
        return len(self.tensors), self.sparsity, self.extent


def _data_and_mask(leaf: MaskedTensor) -> tuple[Tensor, _Mask]:
    extent = leaf._extent
    booleans = () if extent is None else booleans_of(extent)
    if isinstance(leaf, SparseMaskedTensor):
        pattern = leaf._pattern
        sparsity = _Sparsity(
            pattern.layout.name, pattern.sizes, pattern.block, leaf._order, len(pattern.pieces), tuple(leaf.shape)
        )
        values, *stored = _ops.stored_of(leaf)
        return values, _Mask((*stored, *booleans), sparsity, extent)
    tensors = () if leaf._graph_validity is None else (_ops.validity_of(leaf),)
    return _ops.data_of(leaf), _Mask((*tensors, *booleans), None, extent)


def _without_masks(tree: object) -> tuple[Any, list[_Mask | None]]:
    """A tree with data instead of masked tensors, and the mask of each leaf; None for a leaf that is not masked."""
    leaves, spec = tree_flatten(tree)
    parts = [_data_and_mask(leaf) if isinstance(leaf, MaskedTensor) else (leaf, None) for leaf in leaves]
    return tree_unflatten([data for data, _ in parts], spec), [mask for _, mask in parts]


def _masked_leaf(data: object, mask: _Mask | None) -> object:
    return data if mask is None or not isinstance(data, Tensor) else mask.masked(data)


def _with_masks(tree: object, masks: Sequence[_Mask | None]) -> Any:
    """The inverse of `_without_masks`."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([_masked_leaf(d, m) for d, m in zip(leaves, masks, strict=True)], spec)


def _plain_tangents(tree: object, masks: Sequence[_Mask | None]) -> Any:
    """Tangents or cotangents as torch.func takes them, for data with these masks: plain, zero where invalid."""
    leaves, spec = tree_flatten(tree)
    if len(leaves) != len(masks):
        return tree  # torch raises
    return tree_unflatten([_plain_tangent(leaf, mask) for leaf, mask in zip(leaves, masks, strict=True)], spec)


def _plain_tangent(tangent: object, mask: _Mask | None) -> object:
    if mask is not None and mask.sparsity is not None and isinstance(tangent, Tensor):
        return mask.values_of(tangent)
    return tangent.to_tensor(0) if isinstance(tangent, MaskedTensor) else tangent


class _Call:
    """One call of a differentiating transform: splits arguments, and reassembles results.

    torch.func calls `inside` with data, and returns its second result (`has_aux`) unchanged: this is how the masks of
    the outputs leave the transform.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        has_aux: bool,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        densely_for: str | None = None,
    ) -> None:
        self.func, self.has_aux, self.densely_for = func, has_aux, densely_for
        args = self._densely_if_needed(args)
        split = [_without_masks(arg) for arg in args]
        self.args = tuple(data for data, _ in split)
        self.masks = [masks for _, masks in split]
        self.kwargs, self.keyword_masks = _without_masks(kwargs)
        # The kind of mask of each leaf of the function's output and aux; None if not masked.
        self.output_kinds: list[_MaskKind | None] = []
        self.aux_kinds: list[_MaskKind | None] = []

    def _densely_if_needed(self, tree: object) -> Any:
        transform = self.densely_for
        return tree if transform is None else tree_map(lambda leaf: _densely(leaf, transform), tree)

    def inside(self, *args: Any, **kwargs: Any) -> Any:
        """The function, from data to data."""
        args = tuple(_with_masks(arg, masks) for arg, masks in zip(args, self.masks, strict=True))
        result = self.func(*args, **_with_masks(kwargs, self.keyword_masks))
        aux: Any = ()
        if self.has_aux:
            if not (isinstance(result, tuple) and len(result) == 2):
                raise RuntimeError("the function has to return a tuple (output, aux) if has_aux=True")
            result, aux = result
        output, masks = _without_masks(self._densely_if_needed(result))
        aux, aux_masks = _without_masks(aux)
        self.output_kinds = [None if m is None else m.kind for m in masks]
        self.aux_kinds = [None if m is None else m.kind for m in aux_masks]
        return output, (_mask_tensors(masks), _mask_tensors(aux_masks), aux)

    def output_masks(self, carried: _Carried) -> list[_Mask | None]:
        """The masks of the function's outputs, outside the transform."""
        return _masks_from(self.output_kinds, carried[0])

    def aux(self, carried: _Carried) -> Any:
        """The function's aux, outside the transform."""
        return _with_masks(carried[2], _masks_from(self.aux_kinds, carried[1]))

    def masked_like_arguments(self, values: Sequence[object], argnums: Argnums) -> Any:
        """Gradients with the masks of their arguments."""
        if isinstance(argnums, int):
            return _with_masks(values, self.masks[argnums])
        return tuple(_with_masks(v, self.masks[i]) for v, i in zip(values, argnums, strict=True))

    def jacobians(self, values: object, carried: _Carried, argnums: Argnums) -> Any:
        """Jacobians, valid where output and input are; torch.func returns one for each output and input."""
        chosen = (argnums,) if isinstance(argnums, int) else argnums
        inputs = [
            (mask, leaf)
            for i in chosen
            for mask, leaf in zip(self.masks[i], tree_flatten(self.args[i])[0], strict=True)
        ]
        outputs = self.output_masks(carried)
        leaves, spec = tree_flatten(values)
        masked = []
        for position, jacobian in enumerate(leaves):
            mask, leaf = inputs[position % len(inputs)]
            masked.append(
                _masked_leaf(jacobian, _jacobian_mask(outputs[position // len(inputs)], mask, jacobian, leaf.ndim))
            )
        return tree_unflatten(masked, spec)


def _mask_tensors(masks: Sequence[_Mask | None]) -> tuple[Tensor, ...]:
    return tuple(t for mask in masks if mask is not None for t in mask.tensors)


def _masks_from(kinds: Sequence[_MaskKind | None], tensors: Sequence[Tensor]) -> list[_Mask | None]:
    """Masks of these kinds from the list of all their tensors: the inverse of `_mask_tensors`."""
    rest = list(tensors)

    def mask(number: int, sparsity: _Sparsity | None, extent: Extent | None) -> _Mask:
        return _Mask(tuple(rest.pop(0) for _ in range(number)), sparsity, extent)

    return [None if kind is None else mask(*kind) for kind in kinds]


def _jacobian_mask(output: _Mask | None, argument: _Mask | None, jacobian: Tensor, ndim: int) -> _Mask | None:
    """The mask of a Jacobian whose last `ndim` dimensions are its argument's."""
    if output is None and argument is None:
        return None
    lead = jacobian.ndim - ndim
    validity = None
    if output is not None and output.validity is not None:
        validity = output.validity[(..., *[None] * ndim)]
    if argument is not None and argument.validity is not None:
        validity = intersect(validity, with_leading_dims(argument.validity, lead))
    first, second = (
        mask if mask is None else Dense(jacobian.new_empty(()).expand(shape), mask.validity, mask.whole_extent)
        for mask, shape in ((output, jacobian.shape[:lead]), (argument, jacobian.shape[lead:]))
    )
    extent = of_outer(first, second, jacobian.ndim)
    booleans = () if extent is None else booleans_of(extent)
    return _Mask((*(() if validity is None else (validity,)), *booleans), None, extent)


# --------------------------------------------------------------------------------------------------- the transforms


def vmap(
    func: Callable[..., Any],
    in_dims: int | tuple[Any, ...] = 0,
    out_dims: int | tuple[Any, ...] = 0,
    randomness: str = "error",
    *,
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """torch.func.vmap for functions of masked (and plain) tensors."""

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        arguments, keywords, results = _Leaves(), _Leaves(), _Leaves()
        plain_args, plain_keywords = arguments.split(args), keywords.split(kwargs)
        dims: list[int | None] = []

        def inside(*parts: Any) -> Any:
            output = func(*arguments.reassemble(parts, _inside), **keywords.reassemble(plain_keywords, _inside))
            results.extents.clear()
            plain_output = results.split(output)
            if any(extent is not None for extent in results.extents):
                dims[:] = _dims_of_masked(out_dims, output)
            return plain_output

        def outside(extent: Extent, number: int, data: Tensor) -> Extent:
            dim = dims[number]
            return extent if dim is None else with_samples(extent, dim)

        transformed = torch.func.vmap(inside, in_dims, out_dims, randomness, chunk_size=chunk_size)
        return results.reassemble(transformed(*plain_args), outside)

    return mapped


def grad_and_value(func: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """torch.func.grad_and_value: ``(gradients, value)``, or ``(gradients, (value, aux))``."""

    @functools.wraps(func)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        call = _Call(func, has_aux, args, kwargs)

        def inside(*args: Any, **kwargs: Any) -> Any:
            output, carried = call.inside(*args, **kwargs)
            for kind in call.output_kinds:
                if kind is not None and kind[1] is not None:
                    raise RuntimeError(
                        "grad takes a function that returns a scalar, and this one returned a masked tensor of shape "
                        f"{kind[1].shape}: reduce it, or use vjp or jacrev"
                    )
            return output, carried

        transformed = outside_inference_mode(torch.func.grad_and_value(inside, argnums, has_aux=True))
        gradients, (value, carried) = transformed(*call.args, **call.kwargs)
        gradients = call.masked_like_arguments(gradients, argnums)
        value = _with_masks(value, call.output_masks(carried))
        return gradients, ((value, call.aux(carried)) if has_aux else value)

    return differentiated


def grad(func: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """torch.func.grad: gradients, or ``(gradients, aux)``."""
    gradients_and_value = grad_and_value(func, argnums, has_aux)

    @functools.wraps(func)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        gradients, value = gradients_and_value(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return differentiated


def vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """torch.func.vjp: ``(output, vjp_fn)``, or ``(output, vjp_fn, aux)``; cotangents may be masked or plain."""
    call = _Call(func, has_aux, primals, {})
    output, plain_vjp, carried = outside_inference_mode(torch.func.vjp)(call.inside, *call.args, has_aux=True)

    def vjp_fn(cotangents: object, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        cotangents = _plain_tangents(cotangents, output_masks)
        gradients = outside_inference_mode(plain_vjp)(cotangents, retain_graph, create_graph)
        return tuple(_with_masks(g, masks) for g, masks in zip(gradients, call.masks, strict=True))

    output_masks = call.output_masks(carried)
    output = _with_masks(output, output_masks)
    return (output, vjp_fn, call.aux(carried)) if has_aux else (output, vjp_fn)


def jvp(
    func: Callable[..., Any], primals: tuple[Any, ...], tangents: object, *, strict: bool = False, has_aux: bool = False
) -> tuple[Any, ...]:
    """torch.func.jvp: ``(output, tangent)``, or ``(output, tangent, aux)``; tangents may be masked or plain."""
    call = _Call(func, has_aux, primals, {})
    differentiate = outside_inference_mode(torch.func.jvp)
    if isinstance(tangents, tuple) and len(tangents) == len(call.masks):  # else torch raises
        tangents = tuple(_plain_tangents(t, masks) for t, masks in zip(tangents, call.masks, strict=True))
    output, tangent, carried = differentiate(call.inside, call.args, tangents, strict=strict, has_aux=True)
    masks = call.output_masks(carried)
    result = _with_masks(output, masks), _with_masks(tangent, masks)
    return (*result, call.aux(carried)) if has_aux else result


def jacrev(
    func: Callable[..., Any],
    argnums: Argnums = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    _preallocate_and_copy: bool = False,
) -> Callable[..., Any]:
    """torch.func.jacrev, by reverse mode."""

    @functools.wraps(func)
    def differentiated(*args: Any) -> Any:
        call = _Call(func, has_aux, args, {}, densely_for="jacrev")
        transformed: Any = torch.func.jacrev(
            call.inside, argnums, has_aux=True, chunk_size=chunk_size, _preallocate_and_copy=_preallocate_and_copy
        )
        jacobians, carried = outside_inference_mode(transformed)(*call.args)
        jacobians = call.jacobians(jacobians, carried, argnums)
        return (jacobians, call.aux(carried)) if has_aux else jacobians

    return differentiated


def jacfwd(
    func: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False, *, randomness: str = "error"
) -> Callable[..., Any]:
    """torch.func.jacfwd, by forward mode."""

    @functools.wraps(func)
    def differentiated(*args: Any) -> Any:
        call = _Call(func, has_aux, args, {}, densely_for="jacfwd")
        transformed: Any = torch.func.jacfwd(call.inside, argnums, has_aux=True, randomness=randomness)
        jacobians, carried = outside_inference_mode(transformed)(*call.args)
        jacobians = call.jacobians(jacobians, carried, argnums)
        return (jacobians, call.aux(carried)) if has_aux else jacobians

    return differentiated


def hessian(func: Callable[..., Any], argnums: Argnums = 0) -> Callable[..., Any]:
    """torch.func.hessian: forward over reverse."""
    return jacfwd(jacrev(func, argnums), argnums)
