"""export: a module that takes, returns or holds masked tensors, as a program of plain operators on plain tensors."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from masked_dispatch.api.padding import HasMeaning, windows
from masked_dispatch.compiler_internals import check_dtype_in_graph
from masked_dispatch.dispatch.compile import split_masked_state
from masked_dispatch.interop.crossing import as_masked, filled, mask_of, takes
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.torch_internals import tree_flatten, tree_map, tree_unflatten
from op_registry import MaskedSemanticsError
from op_registry.extents.found import stated
from op_registry.windows import windows_mean_now


@takes(module=nn.Module)
def export(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Mapping[str, Any] | tuple[Any, ...] | list[Any] | None = None,
    strict: bool = False,
) -> torch.export.ExportedProgram:
    """Export `module` with torch.export, to a program that does not need this library.

    Where the module takes a masked tensor, the program takes the pair ``(data, mask)``; where it returns one, it
    returns the pair ``(data, mask)``, in which the data is 0 where invalid. Masks are bool, of the shape of the data,
    True where valid. A batch whose extent is not its mask, because a position of it is missing, is the triple
    ``(data, mask, extent)``; the program asserts that batches are padded as its example is. A masked parameter or
    buffer ``w`` is a plain ``w_data`` and a buffer ``w_mask`` in the program's state. The program is decomposed: its
    operators are torch's own, so files, compiled packages and models made from it (``torch.export.save``,
    ``aoti_compile_and_package``, ``torch.onnx.export``) run without this library.

    args, kwargs    example arguments, masked or plain, as for torch.export.export
    dynamic_shapes  as for torch.export.export, with one entry for a masked tensor, which applies to all of its parts
    strict          whether Dynamo traces the module

    Masked tensors are exported in dense storage, however they are stored. The scopes in force during the export
    (``windows``, rules of an overlay) become part of the program; a scope that the module enters is refused.

    Raises MaskedSemanticsError for a module that holds masked tensors in lists or dicts, and the errors of
    torch.export.export.
    """
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"args has to be a tuple of the module's arguments, export(module, (x,)), not a {type(args).__name__}"
        )
    own_meaning = windows(module.meaning) if isinstance(module, HasMeaning) else contextlib.nullcontext()
    with own_meaning:
        return _exported(module, args, dict(kwargs or {}), dynamic_shapes, strict)


def _exported(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, strict: bool
) -> torch.export.ExportedProgram:
    takes = [_Argument(value) for value in args], {name: _Argument(value) for name, value in kwargs.items()}
    adapted = _adapt(module, *takes)
    if dynamic_shapes is not None:
        dynamic_shapes = _shapes_of_pairs(dynamic_shapes, _named(module, args, kwargs))
    _check_containers(adapted)
    program = torch.export.export(
        adapted,
        tuple(argument.plain for argument in takes[0]),
        {name: argument.plain for name, argument in takes[1].items()},
        dynamic_shapes=dynamic_shapes,
        strict=strict,
    )
    return program.run_decompositions()


class _Argument:
    """One argument of a module: what the program takes in place of it, and the way back."""

    def __init__(self, example: object) -> None:
        leaves, self._spec = tree_flatten(example)
        # How many tensors stand for a masked leaf, and what is known of its extent.
        self._masked = [_kind(leaf) if isinstance(leaf, MaskedTensor) else None for leaf in leaves]
        self.plain = tree_unflatten([_apart(leaf) for leaf in leaves], self._spec)

    def masked_again(self, plain: object) -> Any:
        """The argument as the module takes it."""
        flat, _ = tree_flatten(plain)
        leaves: list[Any] = []
        for masked in self._masked:
            leaf = flat.pop(0)
            if masked is not None:
                number, known = masked
                leaf = _masked(leaf, flat.pop(0))
                extent = flat.pop(0) if number == 3 else None
                leaf = leaf if known is None else _padded(leaf, extent, known)
            leaves.append(leaf)
        return tree_unflatten(leaves, self._spec)


def _kind(value: MaskedTensor) -> tuple[int, str | None]:
    """How many tensors stand for a masked tensor, and what is known of its extent."""
    extent = value._extent
    if extent is None or not extent.factors:
        return 2, None
    return (2 if extent.is_mask else 3), stated(extent)


def _apart(value: object) -> object:
    """(data, mask) of a masked tensor, and its extent if that is not its mask; anything else as it is."""
    if not isinstance(value, MaskedTensor):
        return value
    return filled(value), mask_of(value), *torch.ops.masked_dispatch.own_extent(value)


def _masked(data: Tensor, mask: Tensor) -> Tensor:
    check_dtype_in_graph(mask, torch.bool)  # torch's own guards of a program are about shapes alone
    return as_masked(data, mask)


def _padded(masked: Tensor, extent: Tensor | None, known: str) -> Tensor:
    if extent is not None:
        check_dtype_in_graph(extent, torch.bool)
    return torch.ops.masked_dispatch.padded_as(masked, extent, known)


def _adapt(module: nn.Module, positional: list[_Argument], by_name: dict[str, _Argument]) -> nn.Module:
    """A copy of `module` that shares its plain tensors, and takes, holds and returns plain tensors."""
    kept: dict[int, Any] = {}
    for owner in module.modules():
        for holder in (owner._parameters, owner._buffers, vars(owner)):
            kept.update({id(value): value for value in holder.values() if isinstance(value, Tensor)})
    copied = copy.deepcopy(module, kept)
    for owner in copied.modules():
        if isinstance(owner, HasMeaning):
            _give_up_meaning(owner)
    split_masked_state(copied)
    cls = type(copied)
    run: Callable[..., Any] = cls.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        masked_args = [argument.masked_again(value) for argument, value in zip(positional, args, strict=True)]
        masked_kwargs = {name: argument.masked_again(kwargs[name]) for name, argument in by_name.items()}
        return tree_map(_apart, run(self, *masked_args, **masked_kwargs))

    forward.__signature__ = inspect.signature(run)  # type: ignore[attr-defined]
    copied.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    return copied


def _give_up_meaning(module: Any) -> None:
    """Make a module of ``windows(meaning, module)`` an ordinary one, if that meaning is in force anyway."""
    if module.meaning != windows_mean_now():
        raise MaskedSemanticsError(
            f"{module.own_class.__name__} has windows of its own, {module.meaning!r}, inside of an exported module for "
            f"which {windows_mean_now()!r} is in force, and a program has one meaning: export the whole module inside "
            f"`with masked_dispatch.windows({module.meaning!r}):`, or the two parts separately"
        )
    module.__class__ = module.own_class


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)


def _shapes_of_pairs(shapes: object, examples: Mapping[str, Any]) -> Any:
    """`dynamic_shapes` in which a masked tensor's is there for its data, its mask, and its extent if it takes one."""
    if isinstance(shapes, Mapping):
        return {name: _doubled(examples[name], shape) if name in examples else shape for name, shape in shapes.items()}
    if isinstance(shapes, (tuple, list)):
        if len(shapes) != len(examples):
            raise ValueError(
                f"dynamic_shapes has {len(shapes)} entries, and the module takes {len(examples)} arguments "
                f"({', '.join(examples)}): write one for each, a single one for a masked tensor"
            )
        return type(shapes)(_doubled(value, shape) for value, shape in zip(examples.values(), shapes, strict=True))
    return shapes


def _doubled(example: object, shape: object) -> Any:
    if isinstance(example, MaskedTensor):
        return (shape,) * _kind(example)[0]
    if isinstance(example, Mapping) and isinstance(shape, Mapping):
        return {name: _doubled(value, shape[name]) for name, value in example.items()}
    if isinstance(example, (tuple, list)) and isinstance(shape, (tuple, list)):
        return type(shape)(_doubled(value, s) for value, s in zip(example, shape, strict=True))
    return shape


def _check_containers(module: nn.Module) -> None:
    """Refuse masked tensors in lists and dicts of a module, which would be saved as objects of this library."""
    for owner in module.modules():
        for name, value in vars(owner).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            held = next((leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, MaskedTensor)), None)
            if held is not None:
                raise MaskedSemanticsError(
                    f"{type(owner).__name__}.{name} holds a masked tensor of shape {tuple(held.shape)} in a container, "
                    "and only parameters, buffers and attributes are exported. Register it: "
                    "module.register_buffer(name, tensor)"
                )
