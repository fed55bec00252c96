"""The functions of masked_dispatch.interop by name. The first use of one imports its module and its library."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

# Maps each module of this package to the library that it imports, and to its public functions.
MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "numpy_arrays": ("numpy", ("from_numpy_masked", "to_numpy_masked")),
    "pandas_frames": ("pandas", ("from_pandas", "to_pandas")),
    "arrow_arrays": ("pyarrow", ("from_arrow", "to_arrow")),
    "polars_frames": ("polars", ("from_polars", "to_polars")),
    "xarray_arrays": ("xarray", ("from_xarray", "to_xarray")),
    "scipy_sparse": ("scipy", ("from_scipy_sparse", "to_scipy_sparse")),
    "tensordicts": ("tensordict", ("from_tensordict", "to_tensordict")),
    "padding": (
        "torch",
        ("from_attention_mask", "to_attention_mask", "from_key_padding_mask", "to_key_padding_mask", "to_lengths"),
    ),
    "batch_encodings": ("torch", ("from_batch_encoding", "to_batch_encoding")),
    "packed_sequences": ("torch", ("from_packed_sequence", "to_packed_sequence")),
    "nested_tensors": ("torch", ("from_nested_tensor", "to_nested_tensor")),
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
