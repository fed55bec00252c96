"""A padded batch is its samples in every storage: values, masks and extents are those of the dense call."""

from __future__ import annotations

import pytest
import torch
from extents.test_padded_batches import RIGHT_OR_LEFT, W, batch, check_loop
from torch import Tensor, nn
from torch.nn import functional as F

import masked_dispatch as md
from masked_dispatch import MaskedSemanticsError

STORED = {
    "packed": lambda x: x.to_packed(),
    "coo": lambda x: x.to_sparse(),
    "coo of rows": lambda x: x.to_sparse(2),
    "csr": lambda x: x.to_sparse_csr(dense_dim=1),
    "csc": lambda x: x.to_sparse_csc(dense_dim=1),
    "bsr": lambda x: x.to_sparse_bsr((2, 1), dense_dim=1),
}
FEW = {name: STORED[name] for name in ("packed", "coo", "csr")}
PROGRAMS = RIGHT_OR_LEFT | {
    "features summed": lambda x: x.sum(-1),
    "features merged": lambda x: F.linear(x.flatten(1).unflatten(1, (-1, 2)), W[:, :2]),
    "features split": lambda x: x.chunk(2, -1)[0] * x[..., 1:],
    "steps first": lambda x: F.layer_norm(x.transpose(0, 1), (2,)).transpose(0, 1),
    "imputed": lambda x: torch.where(x > 0, x, 0.0).cumsum(1),
    "attention of heads": lambda x: F.scaled_dot_product_attention(*[x.unflatten(2, (2, 1)).transpose(1, 2)] * 3),
    "written": lambda x: x.clone().mul_(2).masked_fill_(x > 0, 1.0) + x,
    "filled": lambda x: x.clone().zero_() + x,
}


def missing(side: str = "right") -> md.MaskedTensor:
    """A batch of which a row, and a feature of another, are missing."""
    x, _ = batch(2, side=side)
    mask = torch.ones(x.shape, dtype=torch.bool)
    mask[:, 1] = False
    mask[0, 2, 1] = False
    return x.mask_with(mask)


def check_same(found: Tensor, expected: Tensor) -> None:
    """Values, mask and extent of `found` are those of `expected`."""
    if not isinstance(expected, md.MaskedTensor):
        torch.testing.assert_close(found, expected)
        return
    md.testing.assert_close(found.to_dense(), expected, rtol=1e-12, atol=1e-12)
    assert (found.extent is None) == (expected.extent is None)
    if expected.extent is not None:
        assert found.extent.tolist() == expected.extent.tolist()


@pytest.mark.parametrize("storage", STORED)
def test_conversions_keep_it(storage: str) -> None:
    for x in (batch(2)[0], batch(2, side="left")[0], missing()):
        stored = STORED[storage](x)
        check_same(stored, x)
        check_same(stored.to_packed(), x)
        check_same(stored.to_sparse().to_packed().to_sparse_csr(dense_dim=1), x)
        assert stored.detach().extent.tolist() == x.extent.tolist()
        assert stored.without_extent().extent is None
        assert stored.without_extent().storage_layout == stored.storage_layout


def test_packed_storage_stores_the_positions_that_are_there() -> None:
    x, _ = batch(2)
    assert x.to_packed().nnz == 9
    assert missing().to_packed().nnz == 9
    assert missing().without_extent().to_packed().nnz == 6
    assert missing().to_sparse().to_packed().nnz == 9
    assert missing().to_packed().count(2).tolist()[0] == [2, 0, 1, 2, 0]


@pytest.mark.filterwarnings("ignore:x.* 0. is an end of the batch:masked_dispatch.BatchEndWarning")  # in the loop
@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")  # of the sample of length 0, as in torch
@pytest.mark.filterwarnings("ignore:a window of 3:masked_dispatch.EmptiedSampleWarning")  # of the same, after a pad
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("storage", FEW)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_batch_is_its_samples(name: str, storage: str, side: str) -> None:
    f = PROGRAMS[name]
    x, samples = batch(2, side=side)
    check_loop(f, STORED[storage](x), samples)
    check_same(f(STORED[storage](x)), f(x))
    if name != "steps stacked":
        x = missing(side)
        check_same(f(STORED[storage](x)), f(x))


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")  # of the sample of length 0, as in torch
@pytest.mark.parametrize("storage", FEW)
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_stored_densely_in_silence(name: str, storage: str) -> None:
    f = PROGRAMS[name]
    x, _ = batch(2)
    with md.densify("never"):
        try:
            found = f(STORED[storage](x))
        except MaskedSemanticsError as error:
            found, refusal = None, str(error)
    if found is None:
        assert "has no sparse form for this call" in refusal
    else:
        check_same(found, f(x))


def ones(*lengths: int) -> md.MaskedTensor:
    return md.padded(
        md.from_lengths(torch.ones(len(lengths), max(lengths), 1, dtype=torch.float64), torch.tensor(lengths))
    )


@pytest.mark.parametrize("storage", FEW)
def test_features_joined_to_steps(storage: str) -> None:
    x = STORED[storage](ones(4, 2))
    joined = torch.cat([x, x.mean(1, keepdim=True).expand_as(x)], -1)
    weights = F.linear(joined, torch.ones(1, 2, dtype=torch.float64)).softmax(1)
    assert weights.to_tensor(0).flatten(1).tolist() == [[0.25] * 4, [0.5, 0.5, 0, 0]]
    assert weights.extent.flatten(1).tolist() == [[True] * 4, [True, True, False, False]]


@pytest.mark.parametrize("storage", FEW)
def test_the_lines_of_ends(storage: str) -> None:
    """Paddings, trims, transposed convolutions and interpolation end where each sample does."""
    x = STORED[storage](ones(4, 2)).transpose(1, 2)
    kernel = torch.ones(1, 1, 3, dtype=torch.float64)
    assert F.conv1d(x, kernel, padding=2)[..., :-2].count(2).tolist() == [[4], [2]]
    assert F.conv1d(F.pad(x, (1, 1)), kernel).count(2).tolist() == [[4], [2]]
    doubled = F.conv_transpose1d(x, torch.ones(1, 1, 4, dtype=torch.float64), stride=2)[..., 1:-1]
    assert doubled.count(2).tolist() == [[8], [4]]
    assert F.interpolate(x, scale_factor=2.0, mode="linear").count(2).tolist() == [[8], [4]]


@pytest.mark.parametrize("storage", STORED)
def test_each_samples_own_ends(storage: str) -> None:
    for x in (batch(2)[0], batch(2, side="left")[0], missing("left")):
        stored = STORED[storage](x)
        check_same(md.last(stored), md.last(x))
        check_same(md.first(stored, k=2), md.first(x, k=2))
        check_same(md.align(stored), md.align(x))
        check_same(md.positions(stored), md.positions(x))


@pytest.mark.parametrize("storage", STORED)
def test_masks_by_hand(storage: str) -> None:
    x = batch(2)[0]
    stored, other = STORED[storage](x), missing()
    plain = torch.tensor([True, False, True, True, False])[:, None]
    check_same(stored.mask_with(plain), x.mask_with(plain))
    check_same(stored.mask_like(other), x.mask_like(other))
    check_same(stored.mask_like(STORED[storage](other)), x.mask_like(other))
    check_same(md.accumulate(stored, STORED[storage](other)), md.accumulate(x, other))
    check_same(md.accumulate(stored, other), md.accumulate(x, other))
    check_same(md.sparse_where(stored, stored > 0), md.sparse_where(x, x > 0).to_dense())
    check_same(md.padded(stored.without_extent(), dim=1), x)
    check_same(md.padded(stored.without_extent(), x.extent, dim=1), x)


@pytest.mark.parametrize("storage", FEW)
def test_assignments_make_no_position_be_there(storage: str) -> None:
    def written(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 1] = 5.0
        x.copy_(torch.ones_like(x.get_data()) * x)
        return x

    for x in (batch(2)[0], missing()):
        check_same(written(STORED[storage](x)), written(x))
        check_same(STORED[storage](x).clone().copy_(torch.ones(x.shape, dtype=x.dtype)), x.clone().fill_(1.0))


def test_layouts_that_meet_are_refused() -> None:
    right, left = batch(2)[0].to_packed(), batch(2, side="left")[0].to_packed()
    with pytest.raises(MaskedSemanticsError, match=r"add: `self` and `other` have samples at different places"):
        right + left


def test_models_stay_packed() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(2, 2, 4, dropout=0.0, batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for x, model in (
        (batch(2)[0], encoder),
        (missing().without_extent(), encoder),
        (batch(2)[0], nn.GRU(2, 2, batch_first=True).double()),
    ):
        padded, packed = md.padded(x, x.get_mask().any(2, keepdim=True), dim=1), None
        with md.densify("never"):
            packed = model(padded.to_packed())
        packed, expected = (y[0] if isinstance(y, tuple) else y for y in (packed, model(padded)))
        assert packed.storage_layout is torch.jagged
        check_same(packed, expected)
    encoder.eval()
    with torch.no_grad(), md.densify("never"):  # torch's fused layer
        packed = encoder(batch(2)[0].to_packed())
    with torch.no_grad():
        check_same(packed, encoder(batch(2)[0]))


def test_what_does_not_carry_it_refuses() -> None:
    x = batch(2)[0].to_packed()
    with pytest.raises(MaskedSemanticsError, match="extent has no sparse form"), md.densify("never"):
        _ = x.extent


def test_packing_says_that_its_rows_are_what_is_there() -> None:
    x = batch(2, side="left")[0].without_extent()
    check_same(x.to_packed(), batch(2, side="left")[0])
    assert x.to_packed()._extent.known == batch(2, side="left")[0]._extent.known
    gaps = x.mask_with(torch.tensor([[True], [False], [True], [True], [True]])).to_packed()
    assert gaps.extent[0, :, 0].tolist() == [False, False, True, True, True]
    assert x.to_sparse().extent is None
    assert x.to_packed().without_extent().to_packed().extent is not None
