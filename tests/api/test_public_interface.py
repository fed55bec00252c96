"""What is public: `dir(md)` is `md.__all__` is the API reference, for the package and each of its public modules."""

from __future__ import annotations

import re
import textwrap
from types import ModuleType

import pytest
from expecttest import assert_expected_inline as expect

import api_page
import masked_dispatch as md

MODULES = api_page.public_modules()


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_dir_shows_what_is_public(module: ModuleType) -> None:
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_the_reference_is_written_anew_when_something_public_changes() -> None:
    """``PYTHONPATH=.:tests/helpers python tests/helpers/api_page.py`` writes it."""
    assert api_page.PAGE.read_text(encoding="utf-8") == api_page.page()


def test_the_reference_has_every_name() -> None:
    listed = set(re.findall(r"^- `(md(?:\.\w+)+)", api_page.page(), re.MULTILINE))
    public = {f"{prefix}.{name}" for prefix, module in MODULES.items() for name in module.__all__}
    assert listed == public - set(MODULES)


def test_every_public_name_is_documented() -> None:
    lines = re.findall(r"^- `(.*?)`: (.*)$", api_page.page(), re.MULTILINE)
    assert len(lines) > 100
    assert [name for name, sentence in lines if len(sentence) < 10 or "deprecated" in sentence] == []


def test_the_names() -> None:
    expect(
        textwrap.fill(" ".join(dir(md)), 110),
        """\
InvalidValueError MaskedSemanticsError MaskedTensor accumulate all amax amin aminmax any argmax argmin
as_masked_tensor cummax cummin cumprod cumsum densify distributed explain from_lengths from_nan functional
interop is_masked_tensor kthvalue logcumsumexp logsumexp mask_like masked_tensor max mean median metrics min
missing mode nanmean nanmedian nanquantile nansum optim pad_sequence pad_stack plot prod quantile registry
sparse_relu sparse_threshold sparse_topk sparse_where std std_mean storage sum testing var var_mean
vector_norm windows""",
    )
    expect(
        "\n".join(
            textwrap.fill(f"{prefix}: {' '.join(dir(module))}", 110, subsequent_indent="    ")
            for prefix, module in MODULES.items()
            if module is not md
        ),
        """\
md.distributed: count mean mean_loss sum var
md.functional: grad grad_and_value hessian jacfwd jacrev jvp vjp vmap
md.interop: from_arrow from_attention_mask from_batch_encoding from_block_mask from_key_padding_mask
    from_nested_tensor from_numpy_masked from_packed_sequence from_pandas from_polars from_scipy_sparse
    from_tensordict from_torch_masked from_xarray to_arrow to_attention_mask to_batch_encoding to_block_mask
    to_key_block_mask to_key_padding_mask to_lengths to_nested_tensor to_numpy_masked to_packed_sequence
    to_pandas to_polars to_scipy_sparse to_tensordict to_torch_masked to_xarray
md.metrics: accuracy mse perplexity
md.missing: bfill dropna ffill fillna group_mean interpolate nan_to_invalid rolling
md.optim: Adadelta Adagrad AdamW Adamax LazyAdam NAdam RAdam RMSprop Rprop SGD
md.plot: mask
md.storage: Choice choose choosing explain family_of
md.testing: assert_close""",
    )
    expect(
        textwrap.fill(" ".join(api_page.own_methods()), 110),
        """\
ccol_indices col_indices compressed count crow_indices get_data get_mask indices lengths mask_like mask_with
nnz offsets row_indices storage_layout stored_bytes to_layout to_numpy to_packed to_tensor to_torch_sparse
values""",
    )
