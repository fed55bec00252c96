"""Convert masked tensors from and to the arrays, frames, batches and masks of other libraries.

Each conversion loses nothing, or raises an error with the reason. If True means invalid in another library's mask, the
converting function has that mask's name. The first use of a function imports its library; the core only needs torch.

crossing.py           code that all conversions share
numpy_arrays.py       numpy.ma
pandas_frames.py      Series and DataFrames of pandas
arrow_arrays.py       arrays and tables of Apache Arrow
polars_frames.py      Series and DataFrames of polars
xarray_arrays.py      DataArrays of xarray
scipy_sparse.py       sparse arrays of SciPy
tensordicts.py        tensordict
sequences.py          attention_mask, key_padding_mask, lengths; PackedSequence, torch.nested, batches of tokenizers
block_masks.py        FlexAttention's BlockMask
torch_sparse.py       torch.sparse tensors; the stored values and index tensors in torch's shapes
torch_maskedtensor.py  torch.masked.MaskedTensor

These modules support masked tensors in parts of torch and Python that dispatch does not reach:

outside_dispatch.py     functions of torch written in Python, TorchScript, DataLoader, other processes
gradients_of_others.py  autograd functions and hooks of other projects
protocols.py            the methods that NumPy, DLPack, Arrow and matplotlib call
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from masked_dispatch.tensor.messages import no_such_name

if TYPE_CHECKING:
    from masked_dispatch.interop.arrow_arrays import from_arrow, to_arrow
    from masked_dispatch.interop.block_masks import from_block_mask, to_block_mask, to_key_block_mask
    from masked_dispatch.interop.numpy_arrays import from_numpy_masked, to_numpy_masked
    from masked_dispatch.interop.pandas_frames import from_pandas, to_pandas
    from masked_dispatch.interop.polars_frames import from_polars, to_polars
    from masked_dispatch.interop.scipy_sparse import from_scipy_sparse, to_scipy_sparse
    from masked_dispatch.interop.sequences import (
        from_attention_mask,
        from_batch_encoding,
        from_key_padding_mask,
        from_nested_tensor,
        from_packed_sequence,
        to_attention_mask,
        to_batch_encoding,
        to_key_padding_mask,
        to_lengths,
        to_nested_tensor,
        to_packed_sequence,
    )
    from masked_dispatch.interop.tensordicts import from_tensordict, to_tensordict
    from masked_dispatch.interop.torch_maskedtensor import from_torch_masked, to_torch_masked
    from masked_dispatch.interop.xarray_arrays import from_xarray, to_xarray

__all__ = [
    "from_arrow",
    "from_attention_mask",
    "from_batch_encoding",
    "from_block_mask",
    "from_key_padding_mask",
    "from_nested_tensor",
    "from_numpy_masked",
    "from_packed_sequence",
    "from_pandas",
    "from_polars",
    "from_scipy_sparse",
    "from_tensordict",
    "from_torch_masked",
    "from_xarray",
    "to_arrow",
    "to_attention_mask",
    "to_batch_encoding",
    "to_block_mask",
    "to_key_block_mask",
    "to_key_padding_mask",
    "to_lengths",
    "to_nested_tensor",
    "to_numpy_masked",
    "to_packed_sequence",
    "to_pandas",
    "to_polars",
    "to_scipy_sparse",
    "to_tensordict",
    "to_torch_masked",
    "to_xarray",
]

# Maps each module of this package to the library that it imports, and to its public functions.
MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "numpy_arrays": ("numpy", ("from_numpy_masked", "to_numpy_masked")),
    "pandas_frames": ("pandas", ("from_pandas", "to_pandas")),
    "arrow_arrays": ("pyarrow", ("from_arrow", "to_arrow")),
    "polars_frames": ("polars", ("from_polars", "to_polars")),
    "xarray_arrays": ("xarray", ("from_xarray", "to_xarray")),
    "scipy_sparse": ("scipy", ("from_scipy_sparse", "to_scipy_sparse")),
    "tensordicts": ("tensordict", ("from_tensordict", "to_tensordict")),
    "sequences": (
        "torch",
        (
            *("from_attention_mask", "to_attention_mask", "from_key_padding_mask", "to_key_padding_mask", "to_lengths"),
            *("from_batch_encoding", "to_batch_encoding", "from_packed_sequence", "to_packed_sequence"),
            *("from_nested_tensor", "to_nested_tensor"),
        ),
    ),
    "block_masks": ("torch", ("from_block_mask", "to_block_mask", "to_key_block_mask")),
    "torch_maskedtensor": ("torch", ("from_torch_masked", "to_torch_masked")),
}
DOORS = {name: (module, library) for module, (library, names) in MODULES.items() for name in names}


def door(name: str) -> Callable[..., Any]:
    """Return the function; raise ImportError with the package to install if its library is missing."""
    module, library = DOORS[name]
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(f"masked_dispatch.interop.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise ImportError(
            f"masked_dispatch.interop.{name} needs {library}, which is not installed: pip install {library}, or "
            "pip install 'masked-dispatch[interop]' for all libraries that masked tensors convert to",
            name=library,
        ) from error
    return found


def __dir__() -> list[str]:
    return [*__all__]


if not TYPE_CHECKING:  # a type checker would accept any name as an attribute

    def __getattr__(name: str) -> Callable[..., Any]:
        if name not in DOORS:
            no_such_name(__name__, name, names=__all__)
        return door(name)
