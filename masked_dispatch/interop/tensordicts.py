"""Convert from and to tensordict: one entry holds a masked tensor's values and mask, so they move and save together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from masked_dispatch.interop.crossing import as_masked, filled, mask_of, not_taken, takes
from masked_dispatch.tensor.masked_tensor import MaskedTensor

PARTS = {"data", "mask"}


@takes(batch=Mapping, instead="pass {name: tensor}")
def to_tensordict(batch: Mapping[str, Any], batch_size: Sequence[int] = ()) -> TensorDict:
    """Build a TensorDict in which each masked tensor is an entry ``{"data": values, "mask": True where valid}``.

    batch       a mapping of masked and plain tensors, or of such mappings. Plain tensors stay unchanged
    batch_size  the leading sizes that all tensors share

    The values are 0 where invalid. Differentiable.
    """
    return TensorDict({name: _split(value, batch_size) for name, value in batch.items()}, batch_size=list(batch_size))


def _split(value: Any, batch_size: Sequence[int]) -> Any:
    if isinstance(value, MaskedTensor):
        value._check_no_extent("a TensorDict")
        return TensorDict({"data": filled(value), "mask": mask_of(value)}, batch_size=list(batch_size))
    return to_tensordict(value, batch_size) if isinstance(value, Mapping) else value


def from_tensordict(batch: TensorDictBase) -> dict[str, Any]:
    """Invert `to_tensordict`: convert entries with exactly "data" and "mask" (bool, True where valid).

    Raises TypeError for a mask of another dtype.
    """
    if not (is_tensor_collection(batch) or isinstance(batch, Mapping)):
        raise TypeError(not_taken("from_tensordict", "batch", TensorDictBase, batch, "to_tensordict makes one"))
    return {name: _joined(name, value) for name, value in batch.items()}


def _joined(name: str, value: Any) -> Any:
    if not isinstance(value, TensorDictBase):
        return value
    if set(value.keys()) != PARTS:
        return from_tensordict(value)
    data, mask = value["data"], value["mask"]
    if not isinstance(data, Tensor) or str(mask.dtype) != "torch.bool" or mask.shape != data.shape:
        raise TypeError(
            f"the mask of {name!r} is {mask.dtype} of shape {tuple(mask.shape)}; it has to be bool, True where "
            f"valid, and to have the shape of its data, {tuple(data.shape)}"
        )
    return as_masked(data, mask)
