"""Masked tensors of distributed tensors (DTensor): functions that place, move and split them,
torch's functions that place modules, and FSDP2.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from masked_dispatch.api.construct import as_masked_tensor
from masked_dispatch.autograd.dense import unwrap
from masked_dispatch.dispatch.run_rule import has_masked
from masked_dispatch.distributed.agreement import Description, agree, described
from masked_dispatch.distributed.extents import statement_of, statement_of_several
from masked_dispatch.distributed_internals import PREPARING, placing_module, waited_for
from masked_dispatch.replacements import no_call, replace
from masked_dispatch.tensor.masked_tensor import MaskedTensor, with_extent
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry import MaskedSemanticsError
from op_registry.extents.factors import factors_of, narrowed
from op_registry.records.divided import is_divided
from op_registry.records.extent import Extent, Factor
from op_registry.records.validity import as_bool, as_int8

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def distribute(
    tensor: MaskedTensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> MaskedTensor:
    """Place a masked tensor as `torch.distributed.tensor.distribute_tensor` places a plain one.

    The ranks receive parts of rank 0's tensor. The result is a leaf of autograd, which requires grad if `tensor` does.
    """
    from torch.distributed.tensor import distribute_tensor

    check("distribute", tensor)
    check_placements("distribute", tensor, placements)
    detached: Any = tensor.detach()

    def place(part: Tensor, parts: Sequence[Placement] | None) -> Tensor:
        return distribute_tensor(part, device_mesh, parts)

    placed: Any = agreed("distribute", place, detached, placements)
    placed.requires_grad_(tensor.requires_grad)
    return placed  # type: ignore[no-any-return]


def from_local(
    tensor: MaskedTensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> MaskedTensor:
    """Build one masked tensor from the parts of the ranks, like `DTensor.from_local`; differentiable."""
    from torch.distributed.tensor import DTensor

    check("from_local", tensor)
    check_placements("from_local", tensor, placements)
    check_parts("from_local", tensor, placements)

    def place(part: Tensor, parts: Sequence[Placement] | None) -> Tensor:
        return DTensor.from_local(part, device_mesh, parts)

    return agreed("from_local", place, tensor, placements)


def to_local(tensor: MaskedTensor) -> MaskedTensor:
    """Return this rank's part of a masked tensor of distributed tensors, like `DTensor.to_local`; differentiable."""
    check_distributed("to_local", tensor)
    check_parts("to_local", tensor, unwrap(tensor).data.placements)  # type: ignore[attr-defined]
    return alike(lambda part, _: part.to_local(), tensor)


def redistribute(
    tensor: MaskedTensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> MaskedTensor:
    """Change the placements of a masked tensor of distributed tensors, like `DTensor.redistribute`; differentiable."""
    check_distributed("redistribute", tensor)
    check_placements("redistribute", tensor, placements)
    return alike(lambda part, parts: part.redistribute(device_mesh, parts), tensor, placements)


def full_tensor(tensor: MaskedTensor) -> MaskedTensor:
    """Gather a masked tensor of distributed tensors on every rank, like `DTensor.full_tensor`; differentiable."""
    check_distributed("full_tensor", tensor)
    return alike(lambda part, _: part.full_tensor(), tensor)


# Places or moves a tensor, which gets these placements.
Place = Callable[[Any, Any], Tensor]


def alike(
    place: Place, tensor: MaskedTensor, placements: Sequence[Placement] | None = None, is_mask: bool | None = None
) -> MaskedTensor:
    """Apply a function that places or moves a tensor to data, mask and the booleans of the extent.

    A boolean is whole on each rank along dimensions on which it does not depend.

    is_mask  whether the mask is the extent, on all ranks that hold parts of the tensor
    """
    result = together(place(data_of(tensor), placements), place(tensor.get_mask(), placements))
    extent = tensor._extent
    if extent is None:
        return result
    is_mask = extent.is_mask if is_mask is None else is_mask
    factors = extent.factors if is_mask else factors_of(unwrap(tensor))
    return with_extent(result, Extent(tuple(_placed(place, f, tensor.shape, placements) for f in factors), is_mask))


def _placed(place: Place, factor: Factor, shape: Sequence[int], placements: Sequence[Placement] | None) -> Factor:
    if factor.said is None:
        return factor
    sizes = [1 if along is None else size for along, size in zip(factor.along, shape, strict=True)]
    return Factor(factor.along, waited_for(place(factor.there.expand(sizes), placements_of(factor, placements))))


def placements_of(factor: Factor, placements: Sequence[Placement] | None) -> Sequence[Placement] | None:
    """Return the placements of a factor's boolean, whose dimensions have size 1 where it does not depend on them."""
    from torch.distributed.tensor import Replicate

    if placements is None:
        return None
    independent = [dim for dim, along in enumerate(factor.along) if along is None]
    ndim = len(factor.along)
    return [Replicate() if placed_dim(p, ndim) in independent else p for p in placements]


def placed_dim(placement: Placement, ndim: int) -> int | None:
    """Return the dimension that a placement divides, from the start; None if it divides none."""
    dim: int | None = getattr(placement, "dim", None)
    return None if dim is None else dim % ndim


def agreed(call: str, place: Place, tensor: MaskedTensor, placements: Sequence[Placement] | None) -> MaskedTensor:
    """Apply `place` after all ranks of the mesh have agreed on what is known of the extent.

    Ranks that place a tensor without an extent by `from_local` send no messages, and take no part.
    """
    if call == "from_local" and tensor._extent is None:
        return alike(place, tensor, placements)
    statement = statement_of(unwrap(tensor))
    data: Any = place(data_of(tensor).detach(), placements)
    name = f"masked_dispatch.distributed.{call}"
    for dim in range(data.device_mesh.ndim):
        mine = Description(name, (described(tensor),), extents=(statement,) if statement else ())
        everyone = agree(data.device_mesh.get_group(dim), mine, tensor.device)
        statement = statement_of_several([(description.extents or (None,))[0] for description in everyone])
    return alike(place, tensor, placements, bool(statement and statement[0]))


def check_parts(call: str, tensor: MaskedTensor, placements: Sequence[Placement] | None) -> None:
    """Refuse parts along dimensions that number positions, whose order of samples the parts do not tell."""
    for placement in placements or ():
        dim = placed_dim(placement, tensor.ndim)
        if dim is not None and tensor._extent is not None and tensor._extent.numbers(dim):
            raise MaskedSemanticsError(
                f"masked_dispatch.distributed.{call} of a tensor of shape {tuple(tensor.shape)} with {placement!r}: "
                f"dimension {dim} numbers the positions of its samples, which no part has whole. Divide another "
                "dimension; or pass x.without_extent(), in which padding counts as missing."
            )


def together(data: Tensor, mask: Tensor) -> MaskedTensor:
    return as_masked_tensor(waited_for(data), waited_for(mask))


def data_of(tensor: MaskedTensor) -> Tensor:
    """Return the data of a masked tensor; differentiable."""
    return unwrap(tensor).data


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return data, mask and the booleans of what a tensor knows of its padding, each of its shape; of a plain tensor
    the data alone. There are no booleans if the mask is the extent.
    """
    if not isinstance(tensor, MaskedTensor):
        return [tensor]
    parts, extent = [data_of(tensor), tensor.get_mask()], tensor._extent
    if extent is None or all(f.said is None for f in extent.factors):
        return parts
    return [*parts, *(as_bool(factor.there).expand(tensor.shape) for factor in factors_of(unwrap(tensor)))]


def is_distributed(tensor: MaskedTensor) -> bool:
    """Return whether data and mask are distributed tensors."""
    return is_divided(tensor._data)


def check(call: str, tensor: Tensor) -> None:
    """Raise unless the tensor is a dense masked tensor."""
    if not isinstance(tensor, MaskedTensor):
        raise TypeError(
            f"masked_dispatch.distributed.{call} takes a masked tensor, got {type(tensor).__name__} of shape "
            f"{tuple(tensor.shape)}: for a plain tensor use the function of torch.distributed.tensor."
        )
    if isinstance(tensor, SparseMaskedTensor):
        raise MaskedSemanticsError(
            f"masked_dispatch.distributed.{call} of a tensor of shape {tuple(tensor.shape)} that is stored as "
            f"{tensor.storage_layout}: distributed tensors are stored densely. Pass x.to_dense()."
        )


def check_placements(call: str, tensor: Tensor, placements: Sequence[Placement] | None) -> None:
    """Raise for a placement that stands for a sum over ranks (Partial), because masks have no sum."""
    for dim, placement in enumerate(placements or ()):
        if placement.is_partial():
            raise MaskedSemanticsError(
                f"masked_dispatch.distributed.{call} of a tensor of shape {tuple(tensor.shape)} with {placement!r} "
                f"along dimension {dim} of the mesh: a mask has no partial sums. First combine the tensors of the "
                "ranks by torch.distributed.all_reduce(x), which makes an element valid if it is valid on one rank, "
                "and place the result with Replicate()."
            )


def check_distributed(call: str, tensor: MaskedTensor) -> None:
    check(call, tensor)
    if not is_distributed(tensor):
        raise TypeError(
            f"masked_dispatch.distributed.{call} takes a masked tensor whose data is a distributed tensor, but the "
            f"data of this one of shape {tuple(tensor.shape)} is a {type(tensor._data).__name__}. See `distribute` "
            "and `from_local`."
        )


# -------------------------------------------------- torch.distributed.tensor's functions that place tensors and modules

# A module hook takes and returns one tensor or several.
Values: TypeAlias = Any
Hook = Callable[..., Values]


def is_of_masked(tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return whether the call places a masked tensor."""
    return isinstance(tensor, MaskedTensor)


def refusing(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a replacement that refuses masked tensors, for a function that returns a DTensor."""

    def refuse(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise MaskedSemanticsError(
            f"{name} of a masked tensor of shape {tuple(tensor.shape)}: a masked tensor has to be the outermost "
            "type; inside a DTensor, its mask would be ignored when the ranks' parts are combined. Its data and "
            f"mask may be DTensors: masked_dispatch.distributed.{instead}(x, device_mesh, placements)."
        )

    return refuse


def place_parameter(distribute_tensor: Callable[..., Tensor], tensor: MaskedTensor, *args: Any, **kwargs: Any) -> Any:
    """Replace `distribute_tensor` where modules call it for their parameters and buffers."""
    if is_distributed(tensor):  # the style has placed it before its module's other parameters
        return tensor
    detached: Any = tensor.detach()
    torchs_own = inspect.unwrap(distribute_tensor)  # the refusing replacement, installed in another module, wraps it
    return alike(lambda part, _: torchs_own(part, *args, **kwargs), detached)


def has_masked_values(owner: Any, values: Values, *rest: Any) -> bool:
    """Return whether a hook or a style's method, which places its second argument, gets masked tensors."""
    return has_masked(values if isinstance(values, (list, tuple)) else [values])


def place_values(function: Hook, owner: Any, values: Values, *rest: Any) -> Values:
    """Call such a function on data and masks separately, and return masked results."""
    return placed(lambda chosen: function(owner, chosen, *rest), values)


def placing_values(function: Hook) -> Hook:
    """Wrap such a hook of a module, so that it accepts masked values too."""

    @functools.wraps(function)
    def called(owner: Any, values: Values, *rest: Any) -> Values:
        return place_values(function, owner, values, *rest)

    return called


def placed(function: Callable[[Values], Values], values: Values) -> Values:
    """Return a placing function's result, with masked tensors built from placed data and masks."""
    one = not isinstance(values, (list, tuple))
    several = [values] if one else list(values)
    if not has_masked(several):
        return function(values)
    parts = [parts_of(value) for value in several]
    # Every call takes a part of each value: the last one again of a value that has fewer.
    rounds = [[each[min(n, len(each) - 1)] for each in parts] for n in range(max(map(len, parts)))]
    results = [function(each[0] if one else type(values)(each)) for each in rounds]
    if not isinstance(results[0], (list, tuple)):
        return _masked_again(several[0], results)
    of_values = zip(several, parts, zip(*results, strict=True), strict=True)
    return tuple(_masked_again(value, found[: len(own)]) for value, own, found in of_values)


def _masked_again(value: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return the placed data of a value under its placed mask, with what the value knows of its padding."""
    if not isinstance(value, MaskedTensor):
        return parts[0]
    data, mask, *booleans = parts
    result, extent = together(data, mask), value._extent
    if extent is None:
        return result
    divided = [dim for dim in extent.positions if data.shape[dim] != value.shape[dim]]
    if divided:
        raise MaskedSemanticsError(
            f"a parallel module places a tensor of shape {tuple(value.shape)} as one of shape {tuple(data.shape)}: "
            f"dimension {divided[0]} numbers the positions of its samples, which no part has whole. Divide another "
            "dimension; or pass x.without_extent(), in which padding counts as missing."
        )
    if not booleans:
        return with_extent(result, extent)
    pairs = zip(extent.factors, booleans, strict=True)
    factors = [Factor(f.along, waited_for(narrowed(as_int8(there), f.along))) for f, there in pairs]
    return with_extent(result, Extent(tuple(factors), extent.is_mask))


def distribute_module(
    original: Callable[..., nn.Module],
    module: nn.Module,
    device_mesh: DeviceMesh,
    partition_fn: Any,
    input_fn: Hook,
    output_fn: Hook,
) -> nn.Module:
    """Call torch's function of this name, for styles, with hooks that place masked inputs and outputs too."""
    return original(module, device_mesh, partition_fn, placing_values(input_fn), placing_values(output_fn))


def install_refusals() -> None:
    """later_import.py calls this once, after the import of torch.distributed.tensor."""
    tensors: Any = importlib.import_module("torch.distributed.tensor")
    replace(tensors.DTensor, "from_local", refusing("DTensor.from_local", "from_local"), is_of_masked)
    replace(tensors, "distribute_tensor", refusing("distribute_tensor", "distribute"), is_of_masked)
    replace(placing_module(), "distribute_tensor", place_parameter, is_of_masked)


def install_styles() -> None:
    """later_import.py calls this once, after the import of torch.distributed.tensor.parallel's styles."""
    styles: Any = importlib.import_module("torch.distributed.tensor.parallel.style")
    replace(styles, "distribute_tensor", place_parameter, is_of_masked)
    replace(styles, "distribute_module", distribute_module, no_call, always=True)
    for owner, name in PREPARING:
        replace(getattr(styles, owner), name, place_values, has_masked_values)


# ------------------------------------------------------------------------------------------------------- FSDP2: refused


# fully_shard calls these methods of a parameter with these arguments.
def fsdp_pre_all_gather(
    self: MaskedTensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> NoReturn:
    raise MaskedSemanticsError(
        f"fully_shard of {type(module).__name__}, which has a masked parameter of shape {tuple(outer_size)}: FSDP2 "
        "keeps parameters and gradients in plain buffers, where the mask would be lost. Use DistributedDataParallel, "
        "which takes masked parameters; or shard a plain parameter, and apply the mask in forward: "
        "masked_dispatch.as_masked_tensor(self.weight, self.mask)."
    )


def fsdp_post_all_gather(self: MaskedTensor, *args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("nothing was gathered")


def install_sharded_parameters() -> None:
    """The package calls this once, on import."""
    methods: Any = MaskedTensor
    methods.fsdp_pre_all_gather, methods.fsdp_post_all_gather = fsdp_pre_all_gather, fsdp_post_all_gather
