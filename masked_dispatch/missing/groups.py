"""Statistics of groups, which labels along a dimension tell apart.

Sums add up the elements with the same group number. Functions that choose elements (min, max, median, first, last,
rank) sort the elements by group, and by value within each group, and take the element at a certain place.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from masked_dispatch import interop
from masked_dispatch.api.along_dim import average_ranks, order_by_group
from masked_dispatch.api.construct import as_masked_tensor
from masked_dispatch.interop.crossing import filled, mask_of, placed_like
from masked_dispatch.missing.filling import Statistics, check_inexact, square_of_distance, summed_dtype, takes_tensor
from masked_dispatch.tensor.checks import as_plain_tensor, least_and_most, values_unknown
from masked_dispatch.tensor.masked_tensor import MaskedTensor


@takes_tensor
def groupby(x: Tensor, labels: Labels, dim: int = 0, *, num_groups: int | None = None) -> GroupBy:
    """The groups of `x` along `dim`, with their statistics: ``groupby(x, years).mean()``.

    x           any shape and storage, masked or plain
    labels      one for each index along `dim`, shape (x.shape[dim],): integers or bools, as a tensor (a masked one: an
                invalid label belongs to no group), a list or an array; strings, dates and others as a Series, an Index,
                a Categorical, an array or a list, which pandas numbers (its missing labels belong to no group). A list
                of such labels, or a frame of them, makes a group of those that occur together, as in pandas
    num_groups  labels count from 0 to num_groups - 1, and each has a row, whether it occurs or not. So the shape of the
                results doesn't depend on the labels, and `torch.compile` makes one graph

    Raises TypeError for an `x` that is no tensor, for labels of floating point in a tensor and for one string (a
    column's name, say), ValueError for labels that do not fit.
    """
    return GroupBy(x, labels, dim, num_groups)


_ONE_AT_A_TIME = (
    "reduce one group at a time, x[groups.inverse == number] along the first dimension, for each number and label of "
    "enumerate(groups.labels)"
)


class GroupBy(Statistics):
    """Statistics of the groups of a tensor along `dim`, made by `groupby`.

    labels   the different labels, sorted, one for each row of a result: a tensor for a tensor or a list of integers,
             an array for an array, an Index for labels of pandas, a MultiIndex for several labels
    inverse  the row of each index along `dim`, a masked int64 tensor, invalid for an index in no group:
             ``g.mean()[g.inverse]`` has a row for each row of `x` (``index_select(dim, …)`` for other dimensions)

    A result has the shape of `x`, except that `dim` has an element for each label; `rank` has the shape of `x`. Results
    are stored densely, masked, and invalid for a group without a valid element; `count` is plain. Of a batch that knows
    which positions are there, results know it too, `count` as well: padding is in no group, and a group of samples is
    there where one of its samples is. Along positions, samples have to begin at 0, where labels do. All but `count` and
    `rank` are differentiable. `mean`, `var`, `std` and `median` raise TypeError for integers and bool.
    """

    def __init__(self, x: Tensor, labels: Labels, dim: int, num_groups: int | None) -> None:
        self._filled, self._mask, self._least = filled(x), mask_of(x), 1
        size = x.size(dim)
        self._dim = dim % x.ndim
        self.labels: Any
        numbers, self.labels = numbered(labels) if num_groups is None else counted_from_zero(labels, num_groups)
        if numbers.shape != (size,):
            raise ValueError(
                f"labels of shape {tuple(numbers.shape)} do not fit dim={dim} of a tensor of shape {tuple(x.shape)}: "
                "they need one label for each index"
            )
        self._count = len(self.labels) if num_groups is None else num_groups
        self._numbers = numbers.to(x.device)
        self._given = x
        # It has the extent of the results.
        self._like = self._filled
        if isinstance(x, MaskedTensor):
            self._like = torch.ops.masked_dispatch.places_of_groups(x, self._dim, self._numbers, self._count)

    def __repr__(self) -> str:
        return f"<{self._count} groups along dim={self._dim} of a tensor of shape {tuple(self._filled.shape)}>"

    def __iter__(self) -> NoReturn:
        raise TypeError(f"groups are not iterated over; {_ONE_AT_A_TIME}")

    def __getitem__(self, label: object) -> NoReturn:
        raise TypeError(f"groups[{label!r}]: groups are not taken by their label; {_ONE_AT_A_TIME}")

    def __getattr__(self, name: str) -> NoReturn:
        if name == "size":
            raise AttributeError(
                "groups have no size; groups.count() counts the valid elements of each, and "
                "missing.groupby(torch.ones(len(x)), labels).count() the rows",
                name=name,
                obj=self,
            )
        raise AttributeError(
            f"groups have count, sum, mean, std, var, min, max, median, first, last and rank, not {name}; a statistic "
            f"with a row for each element again is groups.mean()[groups.inverse]; for others, {_ONE_AT_A_TIME}",
            name=name,
            obj=self,
        )

    @property
    def inverse(self) -> MaskedTensor:
        belongs = self._numbers < self._count
        return as_masked_tensor(torch.where(belongs, self._numbers, 0), belongs)

    def count(self) -> Tensor:
        """The number of valid elements of each group: int64; plain, or there where the group is."""
        return placed_like(self._numbers_of_valid(), self._like)  # type: ignore[no-any-return]

    def min(self) -> MaskedTensor:
        """The least element, NaN if one is; the gradient is that of the first one that is least."""
        begins, ends = self._places()
        return self._chosen(begins, greatest=ends)[0]

    def max(self) -> MaskedTensor:
        """The greatest element, NaN if one is; the gradient is that of the last one that is greatest."""
        _, ends = self._places()
        return self._chosen(ends, greatest=ends)[0]

    def median(self) -> MaskedTensor:
        """The middle element, or the mean of the middle two, as pandas has it (torch.median takes the lower one)."""
        check_inexact(self._filled, "median")
        begins, ends = self._places()
        size = ends - begins
        lower, upper = self._chosen(begins + size // 2, begins + (size + 1) // 2, greatest=ends)
        return torch.where(size % 2 == 0, lower, lower / 2 + upper / 2)  # type: ignore[return-value]

    def first(self) -> MaskedTensor:
        """The first valid element along `dim`."""
        begins, _ = self._places()
        return self._chosen(begins)[0]

    def last(self) -> MaskedTensor:
        """The last valid element along `dim`."""
        _, ends = self._places()
        return self._chosen(ends)[0]

    def rank(self) -> MaskedTensor:
        """The rank of each element among the valid ones of its group, from 1: float64, in the shape of `x`.

        Ties share the average of their ranks, as in pandas. NaN ranks after every number. Invalid where `x` is, and
        where an index belongs to no group.
        """
        ranks = average_ranks(self._filled, self._members(), self._dim)
        ranked = as_masked_tensor(ranks, self._members() < self._count)
        return placed_like(ranked, self._given)  # type: ignore[no-any-return]

    def _numbers_of_valid(self) -> Tensor:
        return self._rows(self._added(self._mask.to(torch.int64)))

    def _sums(self, dtype: torch.dtype) -> Tensor:
        return self._rows(self._added(self._filled.to(dtype)))

    def _added(self, values: Tensor) -> Tensor:
        """Sums along `dim` over the elements of each group, and a last row for the elements in no group."""
        sizes = list(values.shape)
        sizes[self._dim] = self._count + 1
        return values.new_zeros(sizes).index_add(self._dim, self._numbers, values)

    def _variances(self, correction: float) -> Tensor:
        """The mean square of the distances from the mean, which is subtracted first: nothing cancels."""
        adding, _ = summed_dtype(self._filled)
        means = self._added(self._filled.to(adding)) / self._added(self._mask.to(torch.int64)).clamp(min=1)
        distances = self._filled.to(adding) - means.index_select(self._dim, self._numbers)
        squares = self._rows(self._added(square_of_distance(torch.where(self._mask, distances, 0))))
        counts = self._numbers_of_valid()
        return squares / torch.where(counts > 0, (counts - correction).clamp(min=0), 1)

    def _members(self) -> Tensor:
        """The number of each element's group, in the shape of `x`; an invalid element belongs to no group."""
        numbers = self._numbers.view(-1, *[1] * (self._filled.ndim - self._dim - 1))
        return torch.where(self._mask, numbers, self._count)

    def _places(self) -> tuple[Tensor, Tensor]:
        """Where each group's first and last elements are when all are in the order of their groups."""
        counts = self._numbers_of_valid()
        ends = counts.cumsum(self._dim)
        return ends - counts, ends - 1

    def _chosen(self, *places: Tensor, greatest: Tensor | None = None) -> list[MaskedTensor]:
        """The elements at each of `places` in the order of groups.

        greatest  order by values too; these are the places of the greatest ones, taken instead where NaN is there
        """
        values, size = self._filled, self._filled.shape[self._dim]
        if not size:
            return [self._of_some(self._rows(self._added(values))) for _ in places]
        order = order_by_group(self._members(), self._dim, None if greatest is None else values)

        def at(places: Tensor) -> Tensor:
            return values.gather(self._dim, order.gather(self._dim, places.clamp(min=0, max=size - 1)))

        chosen = [at(each) for each in places]
        if greatest is not None:
            last = at(greatest)
            chosen = [torch.where(last != last, last, each) for each in chosen]
        return [self._of_some(each) for each in chosen]

    def _rows(self, results: Tensor) -> Tensor:
        """Those of the groups."""
        return results.narrow(self._dim, 0, self._count)

    def _result(self, values: Tensor, least: int) -> MaskedTensor:
        found = as_masked_tensor(values, self._numbers_of_valid() >= least)
        return placed_like(found, self._like)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------ labels as numbers of groups


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
        found, different = _numbered_by_torch(as_plain_tensor(array))
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
            labels = as_plain_tensor(labels)
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
    found = as_plain_tensor(found).to(torch.int64)
    return torch.where(found < 0, len(different), found), different


def _check_one_dimension(labels: Any) -> None:
    if labels.ndim != 1:
        raise ValueError(f"labels need one dimension, and these have shape {tuple(labels.shape)}")
