"""What is public: `dir` of the package and of each public module is its `__all__`, and the names are these."""

from __future__ import annotations

import inspect
import re
import textwrap
from types import ModuleType

import pytest
import torch
from expecttest import assert_expected_inline as expect

import masked_dispatch as md
from masked_dispatch.api import known_words
from masked_dispatch.tensor.storage import NamedPieces
from repository import ROOT

INSIDE = {f"md.{name}": getattr(md, name) for name in md.__all__ if inspect.ismodule(getattr(md, name))}
MODULES = {"md": md, **INSIDE}


def own_names() -> list[str]:
    """What MaskedTensor has and torch.Tensor does not, or not for dense tensors."""
    names = [name for name in dir(md.MaskedTensor) if not name.startswith("_")]
    own = [name for name in names if name in vars(NamedPieces) or not hasattr(torch.Tensor, name)]
    # Names of pandas and numpy.ma raise an AttributeError that says the word used here.
    hints = known_words.__name__
    return [name for name in own if type(inspect.getattr_static(md.MaskedTensor, name)).__module__ != hints]


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_dir_shows_what_is_public(module: ModuleType) -> None:
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_what_is_public_is_documented(module: ModuleType) -> None:
    undocumented = [name for name in module.__all__ if not inspect.getdoc(getattr(module, name))]
    assert undocumented == []


@pytest.mark.parametrize("module", INSIDE.values(), ids=INSIDE)
def test_the_reference_has_every_public_module_whole(module: ModuleType) -> None:
    reference = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    assert re.search(rf"^::: {re.escape(module.__name__)}$", reference, re.MULTILINE)


def test_the_names() -> None:
    expect(
        textwrap.fill(" ".join(dir(md)), 110),
        """\
Audit BatchEndWarning DensificationWarning EmptiedSampleWarning InvalidValueError MaskDroppedWarning
MaskedSemanticsError MaskedTensor Trace accumulate align all amax amin aminmax any argmax argmin
as_masked_tensor audit average cummax cummin cumprod cumsum densify distributed explain export first
from_lengths from_nan functional interop is_masked_tensor kthvalue last logcumsumexp logsumexp mask_like
masked_tensor max mean median metrics min missing mode nanmean nanmedian nanquantile nansum optim pad_sequence
pad_stack padded patches plot positions prod quantile registry sparse_relu sparse_threshold sparse_topk
sparse_where std std_mean sum testing torchax trace updates var var_mean vector_norm windows""",
    )
    expect(
        "\n".join(
            textwrap.fill(f"{prefix}: {' '.join(dir(module))}", 110, subsequent_indent="    ")
            for prefix, module in MODULES.items()
            if module is not md
        ),
        """\
md.distributed: TopK count distribute from_local full_tensor mean mean_loss redistribute sum to_local
    topk_hook var
md.functional: grad grad_and_value hessian jacfwd jacrev jvp vjp vmap
md.interop: from_arrow from_attention_mask from_batch_encoding from_block_mask from_key_padding_mask
    from_nested_tensor from_numpy_masked from_packed_sequence from_pandas from_polars from_scipy_sparse
    from_tensordict from_torch_masked from_xarray to_arrow to_attention_mask to_batch_encoding to_block_mask
    to_key_block_mask to_key_padding_mask to_lengths to_nested_tensor to_numpy_masked to_packed_sequence
    to_pandas to_polars to_scipy_sparse to_tensordict to_torch_masked to_xarray
md.metrics: accuracy auroc confusion_matrix f1 mae mse perplexity precision r2 recall valid_pairs
md.missing: GroupBy Rolling bfill dropna ffill fillna groupby interpolate nan_to_invalid rolling shift
md.optim: Adadelta Adagrad AdamW Adamax LazyAdam NAdam RAdam RMSprop Rprop SGD
md.plot: mask
md.testing: assert_close
md.torchax: enable""",
    )
    expect(
        textwrap.fill(" ".join(own_names()), 110),
        """\
ccol_indices coalesce col_indices compressed count crow_indices extent fsdp_post_all_gather
fsdp_pre_all_gather get_data get_mask indices is_coalesced lengths mask_like mask_with nnz offsets row_indices
storage_layout stored_bytes to_layout to_numpy to_packed to_tensor to_torch_sparse values without_extent""",
    )
