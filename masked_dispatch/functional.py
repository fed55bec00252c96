"""torch.func's transforms, for functions that take and return masked tensors.

Functorch wraps the tensors that it is given; around a masked tensor it would hide the mask, and differentiate with the
formulas of the plain operators. So at the boundary of each transform a masked tensor is taken apart (`data` and
`validity`) and put together again inside, where its inner tensors carry the transform. The signatures are torch.func's,
and the transforms nest: ``vmap(grad(f))``, ``hessian(f)``, ``torch.compile(vmap(grad(f)))``.

==================  ===================================================================================================
vmap                maps over data and mask alike; ``in_dims`` and ``out_dims`` speak of the masked tensor's dimensions;
                    what is stored sparsely is stored densely for it, as for an operator without sparse form
grad, vjp           with respect to the data; a gradient has the mask and the storage of its argument. A masked scalar
                    is a loss; one that has nothing valid has zero gradients
jvp                 tangents count as zero where they are invalid; the tangent of an output has the output's mask
jacrev, jacfwd      an element is valid where its output element and its input element are; stored densely, as in vmap
==================  ===================================================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from masked_dispatch.densify_policy import check_allowed
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import tree_flatten, tree_map, tree_unflatten
from op_registry.records.validity import intersect

_ops = torch.ops.masked_dispatch
Argnums = int | tuple[int, ...]

__all__ = ["grad", "grad_and_value", "hessian", "jacfwd", "jacrev", "jvp", "vjp", "vmap"]


# ------------------------------------------------------------------------------------- taking apart, putting together


class _Parts(NamedTuple):
    """A masked tensor as vmap sees it: two tensors of the same shape."""

    data: Tensor
    validity: Tensor


class _AllValid(NamedTuple):
    """The same where no validity is stored."""

    data: Tensor


def _densely(value: Any, transform: str) -> Any:
    """What is stored sparsely, stored densely for a transform that has no other way, if the policy in force lets it."""
    if not isinstance(value, SparseMaskedTensor):
        return value
    check_allowed(f"masked_dispatch.functional.{transform}", [value], "it maps over dimensions of what is stored")
    return value._stored_densely()


def _to_parts(value: Any) -> Any:
    value = _densely(value, "vmap")
    if not isinstance(value, MaskedTensor):
        return value
    if value._given_validity is None:
        return _AllValid(_ops.data_of(value))
    return _Parts(_ops.data_of(value), _ops.validity_of(value).expand(value.shape))


def _from_parts(value: Any) -> Any:
    if isinstance(value, _Parts):
        return _ops.from_parts(value.data, value.validity)
    return _ops.from_parts(value.data, None) if isinstance(value, _AllValid) else value


def _is_parts(value: Any) -> bool:
    return isinstance(value, (_Parts, _AllValid))


def _taken_apart(tree: Any) -> Any:
    return tree_map(_to_parts, tree)


def _put_together(tree: Any) -> Any:
    return tree_map(_from_parts, tree, is_leaf=_is_parts)


class _Where(NamedTuple):
    """Where a sparsely stored tensor has its values, but for the index tensors, of which there are `pieces`."""

    layout: torch.layout
    sizes: tuple[int, ...]
    block: tuple[int, int] | None
    order: tuple[int, ...] | None
    pieces: int
    shape: tuple[int, ...]  # of the tensor


_Kind = tuple[int, _Where | None]


class _Mark(NamedTuple):
    """What one leaf of a tree is beside its data: masked, and how it is stored (None: densely).

    tensors  a validity where one is stored; behind the index tensors, where it is stored sparsely
    """

    tensors: tuple[Tensor, ...] = ()
    where: _Where | None = None

    def masked(self, data: Tensor) -> Any:
        """The leaf with `data`."""
        where = self.where
        if where is None:
            return _ops.from_parts(data, self.tensors[0] if self.tensors else None)
        pieces, validity = self.tensors[: where.pieces], self.tensors[where.pieces :]
        return _ops.from_stored(data, validity[0] if validity else None, list(pieces), *where[:4])

    def values_of(self, tangent: Tensor) -> Tensor:
        """What a tangent has where the leaf, which is stored sparsely, has its values."""
        where = self.where
        assert where is not None
        if tuple(tangent.shape) != where.shape:
            raise RuntimeError(
                f"a tangent or cotangent of shape {tuple(tangent.shape)} was given for a masked tensor of shape "
                f"{where.shape} that is stored as {where.layout}; it has to have that shape, however it is stored"
            )
        values: Tensor = _ops.values_in_places(tangent, list(self.tensors[: where.pieces]), *where[:4])
        return values

    @property
    def kind(self) -> _Kind:
        """How many tensors it has, and all else of it."""
        return len(self.tensors), self.where


def _data_and_mark(leaf: MaskedTensor) -> tuple[Tensor, _Mark]:
    if isinstance(leaf, SparseMaskedTensor):
        pattern = leaf._pattern
        where = _Where(
            pattern.layout, pattern.sizes, pattern.block, leaf._order, len(pattern.pieces), tuple(leaf.shape)
        )
        values, *tensors = _ops.stored_of(leaf)
        return values, _Mark(tuple(tensors), where)
    return _ops.data_of(leaf), _Mark(() if leaf._given_validity is None else (_ops.validity_of(leaf),))


def _split(tree: Any) -> tuple[Any, list[_Mark | None]]:
    """A tree with data in place of masked tensors, and the mark of each of its leaves; None for what is not masked."""
    leaves, spec = tree_flatten(tree)
    parts = [_data_and_mark(leaf) if isinstance(leaf, MaskedTensor) else (leaf, None) for leaf in leaves]
    return tree_unflatten([data for data, _ in parts], spec), [mark for _, mark in parts]


def _masked(data: Any, mark: _Mark | None) -> Any:
    return data if mark is None or not isinstance(data, Tensor) else mark.masked(data)


def _join(tree: Any, marks: Sequence[_Mark | None]) -> Any:
    """The inverse of `_split`."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([_masked(d, m) for d, m in zip(leaves, marks, strict=True)], spec)


def _zero_filled(tree: Any, marks: Sequence[_Mark | None]) -> Any:
    """Tangents or cotangents as torch.func takes them, beside data of such marks: zero where they are invalid."""
    leaves, spec = tree_flatten(tree)
    if len(leaves) != len(marks):
        return tree  # torch says what does not fit
    return tree_unflatten([_beside(leaf, mark) for leaf, mark in zip(leaves, marks, strict=True)], spec)


def _beside(tangent: Any, mark: _Mark | None) -> Any:
    if mark is not None and mark.where is not None and isinstance(tangent, Tensor):
        return mark.values_of(tangent)
    return tangent.to_tensor(0) if isinstance(tangent, MaskedTensor) else tangent


class _Call:
    """One call of a differentiating transform: arguments taken apart, results put together by what the function gave.

    torch.func calls `inside` with data, and hands on what it returns second (`has_aux`) unchanged: the validities of
    the outputs leave the transform that way.
    """

    def __init__(
        self, func: Callable[..., Any], has_aux: bool, args: Any, kwargs: dict[str, Any], densely_for: str | None = None
    ) -> None:
        self.func, self.has_aux, self.densely_for = func, has_aux, densely_for
        args = self._stored_for_it(args)
        split = [_split(arg) for arg in args]
        self.args = tuple(data for data, _ in split)
        self.marks = [marks for _, marks in split]
        self.kwargs, self.keyword_marks = _split(kwargs)
        # For each leaf of the function's output, and of its aux: is it masked, and is there a validity?
        self.output_kinds: list[_Kind | None] = []
        self.aux_kinds: list[_Kind | None] = []

    def _stored_for_it(self, tree: Any) -> Any:
        transform = self.densely_for
        return tree if transform is None else tree_map(lambda leaf: _densely(leaf, transform), tree)

    def inside(self, *args: Any, **kwargs: Any) -> Any:
        """The function, from data to data."""
        args = tuple(_join(arg, marks) for arg, marks in zip(args, self.marks, strict=True))
        result = self.func(*args, **_join(kwargs, self.keyword_marks))
        aux: Any = ()
        if self.has_aux:
            if not (isinstance(result, tuple) and len(result) == 2):
                raise RuntimeError("the function has to return a tuple (output, aux) where has_aux=True")
            result, aux = result
        output, marks = _split(self._stored_for_it(result))
        aux, aux_marks = _split(aux)
        self.output_kinds = [None if m is None else m.kind for m in marks]
        self.aux_kinds = [None if m is None else m.kind for m in aux_marks]
        return output, (_tensors(marks), _tensors(aux_marks), aux)

    def output_marks(self, carried: Any) -> list[_Mark | None]:
        """The marks of the function's outputs, outside of the transform."""
        return _marks(self.output_kinds, carried[0])

    def aux(self, carried: Any) -> Any:
        """What the function returned as aux, outside of the transform."""
        return _join(carried[2], _marks(self.aux_kinds, carried[1]))

    def masked_like_arguments(self, values: Any, argnums: Argnums) -> Any:
        """Gradients with the masks of the arguments that they belong to."""
        if isinstance(argnums, int):
            return _join(values, self.marks[argnums])
        return tuple(_join(v, self.marks[i]) for v, i in zip(values, argnums, strict=True))

    def jacobians(self, values: Any, carried: Any, argnums: Argnums) -> Any:
        """Jacobians, valid where output and input are: torch.func gives them for each output, each input."""
        chosen = (argnums,) if isinstance(argnums, int) else argnums
        inputs = [
            (mark, leaf)
            for i in chosen
            for mark, leaf in zip(self.marks[i], tree_flatten(self.args[i])[0], strict=True)
        ]
        outputs = self.output_marks(carried)
        leaves, spec = tree_flatten(values)
        masked = []
        for position, jacobian in enumerate(leaves):
            mark, leaf = inputs[position % len(inputs)]
            masked.append(_masked(jacobian, _outer(outputs[position // len(inputs)], mark, jacobian, leaf.ndim)))
        return tree_unflatten(masked, spec)


def _tensors(marks: Sequence[_Mark | None]) -> tuple[Tensor, ...]:
    return tuple(t for mark in marks if mark is not None for t in mark.tensors)


def _marks(kinds: Sequence[_Kind | None], tensors: Sequence[Tensor]) -> list[_Mark | None]:
    rest = list(tensors)

    def mark(number: int, where: _Where | None) -> _Mark:
        return _Mark(tuple(rest.pop(0) for _ in range(number)), where)

    return [None if kind is None else mark(*kind) for kind in kinds]


def _outer(output: _Mark | None, argument: _Mark | None, jacobian: Tensor, ndim: int) -> _Mark | None:
    """The mark of a Jacobian whose last `ndim` dimensions are its argument's."""
    if output is None and argument is None:
        return None
    validity = None
    if output is not None and output.tensors:
        validity = output.tensors[0][(..., *[None] * ndim)]
    if argument is not None and argument.tensors:
        validity = intersect(validity, argument.tensors[0][(None,) * (jacobian.ndim - ndim)])
    return _Mark(() if validity is None else (validity,))


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
        keywords = _taken_apart(kwargs)

        def inside(*parts: Any) -> Any:
            return _taken_apart(func(*_put_together(parts), **_put_together(keywords)))

        transformed = torch.func.vmap(inside, in_dims, out_dims, randomness, chunk_size=chunk_size)
        return _put_together(transformed(*_taken_apart(args)))

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

        transformed = torch.func.grad_and_value(inside, argnums, has_aux=True)
        gradients, (value, carried) = transformed(*call.args, **call.kwargs)
        gradients = call.masked_like_arguments(gradients, argnums)
        value = _join(value, call.output_marks(carried))
        return gradients, ((value, call.aux(carried)) if has_aux else value)

    return differentiated


def grad(func: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """torch.func.grad: gradients, or ``(gradients, aux)``."""
    both = grad_and_value(func, argnums, has_aux)

    @functools.wraps(func)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        gradients, value = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return differentiated


def vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """torch.func.vjp: ``(output, vjp_fn)``, or ``(output, vjp_fn, aux)``; cotangents may be masked or plain."""
    call = _Call(func, has_aux, primals, {})
    vjp: Any = torch.func.vjp  # typed as if it never gave aux
    output, plain_vjp, carried = vjp(call.inside, *call.args, has_aux=True)

    def vjp_fn(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        gradients = plain_vjp(_zero_filled(cotangents, output_marks), retain_graph, create_graph)
        return tuple(_join(g, marks) for g, marks in zip(gradients, call.marks, strict=True))

    output_marks = call.output_marks(carried)
    output = _join(output, output_marks)
    return (output, vjp_fn, call.aux(carried)) if has_aux else (output, vjp_fn)


def jvp(
    func: Callable[..., Any], primals: Any, tangents: Any, *, strict: bool = False, has_aux: bool = False
) -> tuple[Any, ...]:
    """torch.func.jvp: ``(output, tangent)``, or ``(output, tangent, aux)``; tangents may be masked or plain."""
    call = _Call(func, has_aux, primals, {})
    jvp: Any = torch.func.jvp
    if isinstance(tangents, tuple) and len(tangents) == len(call.marks):  # else torch says what does not fit
        tangents = tuple(_zero_filled(t, marks) for t, marks in zip(tangents, call.marks, strict=True))
    output, tangent, carried = jvp(call.inside, call.args, tangents, strict=strict, has_aux=True)
    marks = call.output_marks(carried)
    result = _join(output, marks), _join(tangent, marks)
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
        jacobians, carried = transformed(*call.args)
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
        jacobians, carried = transformed(*call.args)
        jacobians = call.jacobians(jacobians, carried, argnums)
        return (jacobians, call.aux(carried)) if has_aux else jacobians

    return differentiated


def hessian(func: Callable[..., Any], argnums: Argnums = 0) -> Callable[..., Any]:
    """torch.func.hessian: forward over reverse."""
    return jacfwd(jacrev(func, argnums), argnums)
