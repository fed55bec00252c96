"""Statistics of a window that ends, or is centred, at each element: results have the input's length.

A window of 2k elements is two neighbours of k. So windows of the sizes 1, 2, 4 … are merged into those asked for: time
and memory grow with the logarithm of the window's size, no element outside of a window takes part in it, and nothing
is subtracted that was added before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from masked_dispatch.missing.filling import InOrder, Statistics, square_of_distance, summed_dtype, takes_tensor
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.records.arguments import Number, highest, lowest

# What is known of a window, in tensors whose last dimension numbers the windows.
State = tuple[Tensor, ...]


@takes_tensor
def rolling(x: Tensor, window: int, dim: int, center: bool = False, min_count: int | None = None) -> Rolling:
    """Windows of `window` elements along `dim`, one for each element: ``rolling(x, 3, 0).mean()``.

    x          any shape and storage, masked or plain
    center     the window is centred on its element (of an even window, as in pandas, one element more lies before it);
               otherwise it ends there
    min_count  the number of valid elements that a result needs, from 0 to `window`; pandas' min_periods. The default is
               `window`, as in pandas: only whole windows without a missing element have a result

    The windows themselves, n - window + 1 of them, are a view: ``x.unfold(dim, window, step)``.

    Raises TypeError for an `x` that is no tensor and a window that is no number of elements, ValueError for one below 1
    and a `min_count` that does not fit.
    """
    return Rolling(x, window, dim, center, min_count)


class Rolling(Statistics):
    """Statistics of rolling windows, made by `rolling`.

    Results have the shape of `x`, are stored densely, and are masked: invalid where a window has fewer than `min_count`
    valid elements. (With ``min_count=0``, a window without any has the sum 0, and no other statistic.) `count` is
    plain. Of a batch that knows which positions are there, windows are those of each sample, and results know it too,
    `count` as well. All but `count` are differentiable. `mean`, `var` and `std` raise TypeError for integers and bool.
    """

    def __init__(self, x: Tensor, window: int, dim: int, center: bool, min_count: int | None) -> None:
        if not hasattr(window, "__index__"):
            raise TypeError(
                f"rolling takes the number of elements of a window, not window={window!r}. pandas has windows of time: "
                "from_pandas(to_pandas(x, index=times).rolling(window).mean()), both of masked_dispatch.interop"
            )
        self._window = operator.index(window)
        if self._window < 1:
            raise ValueError(f"a window has at least 1 element, not window={window}")
        self._least = self._window if min_count is None else min_count
        if not 0 <= self._least <= self._window:
            raise ValueError(f"min_count has to lie between 0 and the size of the window, {window}; got {min_count}")
        self._given = InOrder(x, dim)
        self._dim = self._given.dim
        after = (self._window - 1) // 2 if center else 0
        self._around = (self._window - 1 - after, after)
        self._filled, self._mask = self._given.values, self._given.mask
        self._counts = self._over_windows((self._mask.to(torch.int64),), _added)[0]

    def __repr__(self) -> str:
        return f"<windows of {self._window} along dim={self._dim} of a tensor of shape {tuple(self._filled.shape)}>"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"rolling windows have count, sum, mean, var, std, min and max, not {name}; for others, reduce the "
            "windows themselves along their last dimension: x.unfold(dim, window, 1), which has the whole windows "
            "only",
            name=name,
            obj=self,
        )

    def count(self) -> Tensor:
        """The number of valid elements of each window, int64, whatever `min_count` is; plain, or there where `x` is."""
        return self._given.counts(self._counts)

    def min(self) -> MaskedTensor:
        """The least element, NaN if one is."""
        return self._extreme(highest, torch.minimum)

    def max(self) -> MaskedTensor:
        """The greatest element, NaN if one is."""
        return self._extreme(lowest, torch.maximum)

    def _over_windows(self, state: State, merge: Callable[[State, State], State], fill: Number = 0) -> State:
        """The states of all windows, of those of all elements; `fill` stands around them."""
        # F.pad takes the number as floating point, in which the ends of int64 are others.
        elements = tuple(torch.constant_pad_nd(part.movedim(self._dim, -1), self._around, fill) for part in state)
        return tuple(part.movedim(-1, self._dim) for part in merged_windows(elements, self._window, merge))

    def _numbers_of_valid(self) -> Tensor:
        return self._counts

    def _sums(self, dtype: torch.dtype) -> Tensor:
        return self._over_windows((self._filled.to(dtype),), _added)[0]

    def _variances(self, correction: float) -> Tensor:
        adding, _ = summed_dtype(self._filled)
        values = self._filled.to(adding)
        real = values.real.dtype
        state = (self._mask.to(real), values, torch.zeros_like(values, dtype=real))
        squares = self._over_windows(state, _moments_of_both)[2]
        # 0 / 0 has no place where the result is invalid: its derivative would be NaN.
        return squares / torch.where(self._counts >= max(self._least, 1), (self._counts - correction).clamp(min=0), 1)

    def _extreme(
        self, identity: Callable[[torch.dtype], Number], choose: Callable[[Tensor, Tensor], Tensor]
    ) -> MaskedTensor:
        if self._filled.is_complex():
            raise TypeError(f"complex values have no order, so no minimum and no maximum; got {self._filled.dtype}")
        fill = identity(self._filled.dtype)
        values = torch.where(self._mask, self._filled, torch.full_like(self._filled, fill))
        return self._of_some(self._over_windows((values,), lambda a, b: (choose(a[0], b[0]),), fill)[0])

    def _result(self, values: Tensor, least: int) -> MaskedTensor:
        return self._given.result(values, self._counts >= least)


def merged_windows(elements: State, window: int, merge: Callable[[State, State], State]) -> State:
    """The states of all windows of `window` elements, from those of single ones.

    merge  the state of a window from those of its two parts, the earlier one first
    """
    whole, covered = None, 0
    block, size = elements, 1
    while True:
        if window & size:
            whole = block if whole is None else merge(*_neighbours(whole, covered, block))
            covered += size
        if covered == window:
            assert whole is not None
            return whole
        block = merge(*_neighbours(block, size, block))
        size *= 2


def _neighbours(before: State, size: int, after: State) -> tuple[State, State]:
    """Windows of `size` elements, and those that begin where each of them ends."""
    count = after[0].shape[-1] - size
    return tuple(part.narrow(-1, 0, count) for part in before), tuple(part.narrow(-1, size, count) for part in after)


def _added(a: State, b: State) -> State:
    return (a[0] + b[0],)


def _moments_of_both(a: State, b: State) -> State:
    """Number, mean and sum of squared distances from the mean, of two parts together (Chan et al. 1979)."""
    (count, mean, squares), (other_count, other_mean, other_squares) = a, b
    both = count + other_count
    share = other_count / both.clamp(min=1)
    distance = other_mean - mean
    return both, mean + distance * share, squares + other_squares + square_of_distance(distance) * count * share
