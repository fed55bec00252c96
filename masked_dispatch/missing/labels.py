"""Labels as numbers of groups: torch numbers integers and bools, pandas all others.

Where a label is missing (invalid in a masked tensor, None or NaN elsewhere) its number is the number of groups.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from masked_dispatch import interop
from masked_dispatch.interop.crossing import filled, mask_of
from masked_dispatch.tensor.checks import least_and_most, values_unknown


class HasArray(Protocol):
    """An array of NumPy, or what NumPy can make one of: a Series, an Index, a DataArray …"""

    def __array__(self, *args: Any, **kwargs: Any) -> Any: ...


Labels = Tensor | Sequence[Any] | HasArray


def numbered(labels: Labels) -> tuple[Tensor, Any]:
    """The number of each label among the sorted different ones, int64 of shape (n,); and these, without a missing one.

    They come as they are given: a tensor for tensors and lists of integers, an array for arrays of integers, and for
    everything else what ``pandas.factorize`` gives.
    """
    if isinstance(labels, Tensor):
        return _numbered_by_torch(labels)
    if isinstance(labels, (str, bytes)):
        raise TypeError(
            f"labels have to be one for each index, not the one {type(labels).__name__} {labels!r}: a tensor has no "
            "columns with names. Pass the labels themselves, such as the column frame[name] of a frame"
        )
    if hasattr(labels, "get_fill_value"):  # of numpy.ma
        found, different = _numbered_by_torch(interop.from_numpy_masked(labels))  # type: ignore[arg-type]
        return found, different.numpy()
    if type(labels).__module__.partition(".")[0] == "pandas":
        if getattr(labels, "ndim", 1) == 2:
            return _numbered_together([column for _, column in labels.items()])  # type: ignore[union-attr]
        return _numbered_by_pandas(labels)
    if hasattr(labels, "__array__"):
        array = labels.__array__()
        if array.dtype.kind not in "biu":
            return _numbered_by_pandas(array)
        found, different = _numbered_by_torch(torch.as_tensor(array))
        return found, different.numpy()
    labels = list(labels)
    if labels and all(map(_are_labels, labels)):
        return _numbered_together(labels)
    if any(isinstance(label, Tensor) for label in labels):
        raise TypeError("labels have to be one tensor, not a list of tensors: pass torch.stack(labels)")
    if all(isinstance(label, numbers.Integral) for label in labels):
        return _numbered_by_torch(torch.tensor(labels) if labels else torch.tensor(labels, dtype=torch.int64))
    return _numbered_by_pandas(labels)


def counted_from_zero(labels: Labels, num_groups: int) -> tuple[Tensor, Tensor]:
    """Labels that are the numbers of their groups already, 0 … num_groups - 1; nothing depends on their values."""
    if not isinstance(labels, Tensor):
        try:
            labels = torch.as_tensor(labels)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"with num_groups={num_groups}, labels are integers from 0 to {num_groups - 1}, and this "
                f"{type(labels).__name__} holds no numbers that torch has. Leave num_groups out for other labels"
            ) from error
        labels = labels if labels.numel() else labels.to(torch.int64)  # an empty list has no dtype
    _check_integers(labels)
    found = filled(labels).to(torch.int64)
    if not values_unknown(found) and found.numel():
        least, most = least_and_most(found)
        if least < 0 or most >= num_groups:
            raise ValueError(
                f"labels run from {least} to {most}, and with num_groups={num_groups} they count from 0 to "
                f"{num_groups - 1}. Leave out num_groups to take labels as they are; if -1 stands for a missing "
                "label, pass masked_tensor(labels, labels >= 0)"
            )
    return torch.where(mask_of(labels), found, num_groups), torch.arange(num_groups, device=found.device)


def _check_integers(labels: Tensor) -> None:
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(
            f"labels in a tensor have to be integers or bool; got {labels.dtype}. Convert them, labels.long(), or "
            "number intervals with torch.bucketize(labels, boundaries)"
        )


def _numbered_by_torch(labels: Tensor) -> tuple[Tensor, Tensor]:
    _check_integers(labels)
    _check_one_dimension(labels)
    mask, values = mask_of(labels), filled(labels)
    different, found = values[mask].to(torch.int64).unique(return_inverse=True)
    return torch.full_like(values, len(different), dtype=torch.int64).masked_scatter(mask, found), different.to(
        values.dtype
    )


def _are_labels(labels: object) -> bool:
    """Whether an element of a list is labels itself; a tuple is one label."""
    return hasattr(labels, "__len__") and not isinstance(labels, (str, bytes, tuple)) and getattr(labels, "ndim", 1) > 0


def _numbered_together(keys: Sequence[Labels]) -> tuple[Tensor, Any]:
    """By several labels for each index, like pandas' groupby of a list: those that occur together, a MultiIndex."""
    each = [numbered(labels) for labels in keys]
    if len(each) == 1:
        return each[0]
    sizes = {tuple(found.shape) for found, _ in each}
    if len(sizes) > 1:
        raise ValueError(f"several labels for each index need one length, and these have shapes {sorted(sizes)}")
    codes = torch.stack([found for found, _ in each], 1)
    known = (codes < torch.tensor([len(different) for _, different in each])).all(1)
    different, found = codes[known].unique(dim=0, return_inverse=True)
    columns = [
        (names.numpy() if isinstance(names, Tensor) else names)[at]
        for (_, names), at in zip(each, different.T.numpy(), strict=True)
    ]
    index = _pandas("several labels for each index").MultiIndex.from_arrays(
        columns, names=[getattr(labels, "name", None) for labels in keys]
    )
    return torch.full_like(codes[:, 0], len(different)).masked_scatter(known, found), index


def _pandas(what: str) -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError(f"{what} are numbered by pandas: install it, or number them yourself") from error
    return pandas


def _numbered_by_pandas(labels: Any) -> tuple[Tensor, Any]:
    pd = _pandas(f"labels in a {type(labels).__name__} that are neither integers nor bool")
    labels = pd.Index(labels, dtype=object, tupleize_cols=False) if isinstance(labels, list) else labels
    _check_one_dimension(labels)
    found, different = pd.factorize(labels, sort=True)
    found = torch.as_tensor(found).to(torch.int64)
    return torch.where(found < 0, len(different), found), different


def _check_one_dimension(labels: Any) -> None:
    if labels.ndim != 1:
        raise ValueError(f"labels need one dimension, and these have shape {tuple(labels.shape)}")
