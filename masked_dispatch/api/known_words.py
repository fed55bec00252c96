"""AttributeErrors for names that pandas, numpy.ma or torch.masked have: they say the word used here."""

from __future__ import annotations

import inspect
import sys
from typing import NoReturn

import torch
import torch.overrides

from masked_dispatch.tensor.masked_tensor import MaskedTensor

# From the name to what to write instead.
WORDS = {
    "anom": "x - x.mean()",
    "astype": "x.to(dtype)",
    "average": "masked_dispatch.average(x, weights, dim)",
    "bfill": "masked_dispatch.missing.bfill(x, dim)",
    "columns": "frame.columns: a tensor has no names, take x[:, list(frame.columns).index(name)]",
    "combine_first": "masked_dispatch.missing.fillna(x, other)",
    "corr": "torch.corrcoef(x.T)",
    "describe": "x.count(0), x.mean(0), x.std(0), x.amin(0), x.quantile(0.5, dim=0), x.amax(0)",
    "dropna": "masked_dispatch.missing.dropna(x, dim)",
    "ffill": "masked_dispatch.missing.ffill(x, dim)",
    "fill_value": "x.to_tensor(fill): there is no default, each use chooses",
    "filled": "x.to_tensor(fill)",
    "fillna": "x.to_tensor(fill), or masked_dispatch.missing.fillna(x, other) for a masked `other`",
    "from_coo": "masked_dispatch.as_masked_tensor(s) for a torch.sparse tensor s, or "
    "masked_dispatch.interop.from_scipy_sparse(s)",
    "groupby": "masked_dispatch.missing.groupby(x, labels, dim)",
    "harden_mask": "x.copy_(torch.where(x.get_mask(), y, x)) for a write that makes nothing valid",
    "head": "x[:n]",
    "iloc": "x[rows, columns]",
    "interpolate": "masked_dispatch.missing.interpolate(x, dim)",
    "isna": "~x.get_mask()",
    "isnull": "~x.get_mask()",
    "loc": "x[rows, columns]: labels stay with the frame, see masked_dispatch.interop.to_pandas",
    "mask": "x.get_mask(), which is True where valid (numpy.ma's mask is True where it is not)",
    "nomask": "x.get_mask().all()",
    "notna": "x.get_mask()",
    "notnull": "x.get_mask()",
    "nunique": "x.unique().numel()",
    "pad_stack": "masked_dispatch.pad_stack(tensors)",
    "pct_change": "x / masked_dispatch.missing.shift(x, 1, dim) - 1",
    "ptp": "x.amax() - x.amin()",
    "rank": "masked_dispatch.missing.groupby(x, labels, dim).rank(), with labels torch.zeros(n).int() for one group",
    "recordmask": "x.get_mask()",
    "rolling": "masked_dispatch.missing.rolling(x, window, dim)",
    "shift": "masked_dispatch.missing.shift(x, periods, dim)",
    "sort_values": "x.sort(dim)",
    "soften_mask": "nothing: a write to an invalid element always makes it valid",
    "tail": "x[-n:]",
    "to_arrow": "masked_dispatch.interop.to_arrow(x)",
    "to_frame": "masked_dispatch.interop.to_pandas(x)",
    "to_list": "x.to_tensor(fill).tolist()",
    "to_pandas": "masked_dispatch.interop.to_pandas(x)",
    "to_scipy": "masked_dispatch.interop.to_scipy_sparse(x)",
    "unshare_mask": "x.clone()",
    "value_counts": "x.unique(return_counts=True)",
}


def function_elsewhere(name: str) -> str | None:
    """What to say of a name that a module of torch has as a function, or pandas as a method; None if none has."""
    if name.startswith("_"):
        return None
    nn = torch.nn
    for module in (torch, nn.functional, torch.fft, torch.linalg, torch.special, nn.utils.rnn):
        function = getattr(module, name, None)
        if callable(function) and not inspect.isclass(function):
            path = f"{module.__name__}.{name}"
            takes_tensors = function in torch.overrides.get_testing_overrides()
            return f"{path} takes masked tensors" if takes_tensors else f"here it is written {path}"
    if (pandas := sys.modules.get("pandas")) and callable(getattr(pandas.DataFrame, name, None)):
        return f"pandas has it: masked_dispatch.interop.to_pandas(x).{name}(...)"
    return None


class NotHere:
    """A name that masked tensors do not have: `hasattr` is False, and the error says the word used here.

    (A `__getattr__` of the class would do it for all names at once, but Dynamo then knows no attribute any more.)
    """

    def __init__(self, name: str, word: str) -> None:
        self.name, self.word = name, word

    def __get__(self, instance: MaskedTensor | None, owner: type) -> NoReturn:
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self.name!r}; here it is written {self.word}",
            name=self.name,
            obj=instance,
        )


def install() -> None:
    """Called once, when the package is imported."""
    for name, word in WORDS.items():
        setattr(MaskedTensor, name, NotHere(name, word))
