"""Convert masked tensors from and to the arrays, frames, batches and masks of other libraries.

Each conversion loses nothing, or raises an error with the reason. If True means invalid in another library's mask, the
converting function has that mask's name. The first use of a function imports its library; the core only needs torch.

crossing.py           code that all conversions share
doors.py              the functions by name, and the library that each needs
numpy_arrays.py       numpy.ma
pandas_frames.py      Series and DataFrames of pandas
arrow_arrays.py       arrays and tables of Apache Arrow
polars_frames.py      Series and DataFrames of polars
tables.py             columns of a table as one tensor
xarray_arrays.py      DataArrays of xarray
scipy_sparse.py       sparse arrays of SciPy
tensordicts.py        tensordict
padding.py            attention_mask, key_padding_mask, lengths
batch_encodings.py    the batches of tokenizers
packed_sequences.py   PackedSequence
nested_tensors.py     torch.nested
block_masks.py        FlexAttention's BlockMask
torch_maskedtensor.py  torch.masked.MaskedTensor

These modules support masked tensors in parts of torch and Python that dispatch does not reach:

torch_sparse.py  torch.sparse tensors
stored_pieces.py  the stored values and index tensors in torch's shapes
torch_masked.py  the functions of torch.masked
attention_module.py  nn.MultiheadAttention and the Transformer layers
torch_script.py  functions compiled by torch.jit
numpy_masked.py  masked arrays of NumPy as data
parameter_vectors.py  torch.nn.utils.vector_to_parameters
guessed_backends.py  opt_einsum and autoray, which choose a backend by the module of a tensor's type
low_rank.py      torch.lobpcg, torch.svd_lowrank and torch.pca_lowrank
distributions.py  torch.distributions of vectors and matrices
collate.py       torch.utils.data.DataLoader
processes.py     masked tensors sent to other processes
gradients_of_others.py  autograd functions and hooks of other projects
protocols.py     the methods that NumPy, DLPack, Arrow and matplotlib call
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from masked_dispatch.interop.doors import DOORS, door
from masked_dispatch.tensor.messages import no_such_name

if TYPE_CHECKING:
    from masked_dispatch.interop.arrow_arrays import from_arrow, to_arrow
    from masked_dispatch.interop.batch_encodings import from_batch_encoding, to_batch_encoding
    from masked_dispatch.interop.block_masks import from_block_mask, to_block_mask, to_key_block_mask
    from masked_dispatch.interop.nested_tensors import from_nested_tensor, to_nested_tensor
    from masked_dispatch.interop.numpy_arrays import from_numpy_masked, to_numpy_masked
    from masked_dispatch.interop.packed_sequences import from_packed_sequence, to_packed_sequence
    from masked_dispatch.interop.padding import (
        from_attention_mask,
        from_key_padding_mask,
        to_attention_mask,
        to_key_padding_mask,
        to_lengths,
    )
    from masked_dispatch.interop.pandas_frames import from_pandas, to_pandas
    from masked_dispatch.interop.polars_frames import from_polars, to_polars
    from masked_dispatch.interop.scipy_sparse import from_scipy_sparse, to_scipy_sparse
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


def __dir__() -> list[str]:
    return [*__all__]


if not TYPE_CHECKING:  # a type checker would accept any name as an attribute

    def __getattr__(name: str) -> Callable[..., Any]:
        if name not in DOORS:
            no_such_name(__name__, name, names=__all__)
        return door(name)
