"""Doors: masked tensors from and to what other libraries call arrays, frames, batches and masks.

Each direction is lossless, or refused with the reason. A mask whose True means something else here is converted by the
function that has its name. Each library is loaded when one of its functions is used; the core needs torch alone.

crossing.py           what every door shares
doors.py              the functions by name, and which library each needs
numpy_arrays.py       numpy.ma
pandas_frames.py      Series and DataFrames of pandas
arrow_arrays.py       arrays and tables of Apache Arrow
tables.py             columns of a table as one tensor

And masked tensors in the parts of torch and Python that dispatch does not reach:

torch_sparse.py  torch.sparse tensors
torch_masked.py  the functions of torch.masked
torch_script.py  what torch.jit has compiled
numpy_masked.py  masked arrays of NumPy as data
low_rank.py      torch.lobpcg, torch.svd_lowrank and torch.pca_lowrank
collate.py       torch.utils.data.DataLoader
processes.py     sending to other processes
protocols.py     what NumPy, DLPack, Arrow and matplotlib call
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from masked_dispatch.interop.doors import DOORS, door

if TYPE_CHECKING:
    from masked_dispatch.interop.arrow_arrays import from_arrow, to_arrow
    from masked_dispatch.interop.numpy_arrays import from_numpy_masked, to_numpy_masked
    from masked_dispatch.interop.pandas_frames import from_pandas, to_pandas

__all__ = [
    "from_arrow",
    "from_numpy_masked",
    "from_pandas",
    "to_arrow",
    "to_numpy_masked",
    "to_pandas",
]


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in DOORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(DOORS))}")
    return door(name)


def __dir__() -> list[str]:
    return [*__all__]
