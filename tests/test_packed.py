"""Packed storage: a padded batch kept as its rows. Every operator gives what it gives on the padded batch (P4)."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masked_dispatch as md

B, T, D, H = 5, 6, 4, 2


def rows(kind: str) -> Tensor:
    """Which rows of a batch (B, T) are valid."""
    lengths = torch.tensor([6, 0, 3, 1, 4])
    padded = torch.arange(T) < lengths[:, None]
    if kind == "padding":
        return padded
    if kind == "holes":
        return padded & (torch.rand(B, T, generator=torch.Generator().manual_seed(5)) < 0.6)
    return torch.full((B, T), kind == "all valid")


KINDS = ("padding", "holes", "all valid", "none valid")


def batch(kind: str, *sizes: int, seed: int = 0) -> md.MaskedTensor:
    """A padded batch (B, T, *sizes) with NaN where there is no row."""
    data = torch.randn((B, T, *sizes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = rows(kind).reshape(B, T, *[1] * len(sizes))
    return md.masked_tensor(torch.where(mask, data, torch.nan), mask)


def plain(*sizes: int, seed: int = 1) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert torch.equal(mask_of(a), mask_of(b))
    torch.testing.assert_close(filled(a), filled(b), equal_nan=True)


def mask_of(x: Tensor) -> Tensor:
    return x.get_mask() if md.is_masked_tensor(x) else torch.ones(x.shape, dtype=torch.bool)


def filled(x: Tensor) -> Tensor:
    return x.to_tensor(0) if md.is_masked_tensor(x) else x


def alike(function: Callable[..., Any], inputs: list[Tensor], parameters: list[Tensor] = (), policy: str = "never"):
    """The function on padded inputs and on packed ones: the same result, and the same gradients of all inputs."""
    outcomes = []
    for packed in (False, True):
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in (*inputs, *parameters)]
        given = [x.to_packed() if packed and n < len(inputs) else x for n, x in enumerate(leaves)]
        torch.manual_seed(0)
        with md.densify(policy if packed else "auto"):
            results = function(*given)
            results = results if isinstance(results, (list, tuple)) else [results]
            wanted = [x for x in leaves if x.requires_grad]
            gradients: Any = []
            if any(r.requires_grad for r in results):
                total = sum((filled(r) * plain(*r.shape)).sum() for r in results if r.requires_grad)
                gradients = torch.autograd.grad(total, wanted, allow_unused=True)
        outcomes.append((results, gradients))
    (expected, expected_gradients), (found, gradients) = outcomes
    assert len(expected) == len(found)
    for a, b in zip(found, expected, strict=True):
        same(a, b)
    assert len(gradients) == len(expected_gradients)
    for a, b in zip(gradients, expected_gradients, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            same(a, b)
    return found


# ------------------------------------------------------------------------------------------------------- the storage


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(), (D,), (H, D)])
def test_there_and_back(kind, sizes):
    x = batch(kind, *sizes)
    packed = x.to_packed()
    assert packed.storage_layout is torch.jagged
    assert packed.nnz == int(rows(kind).sum())
    same(packed.to_dense(), x)
    same(packed, x)
    for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo):
        other = packed.to_layout(layout, sparse_dim=2)
        assert other.storage_layout is layout
        same(other.to_packed(), x)


@pytest.mark.parametrize("shape", [(0, T, D), (B, 0, D), (0, 0, D), (B, T, 0)])
def test_batches_of_nothing(shape):
    x = md.masked_tensor(torch.ones(shape), torch.ones((*shape[:2], 1), dtype=torch.bool))
    packed = x.to_packed()
    assert packed.nnz == 0
    for function in (torch.exp, lambda t: t + 1, lambda t: F.linear(t, torch.ones(3, shape[-1])), torch.clone):
        same(function(packed), function(x))


def test_rows_that_are_partly_valid_are_kept_with_what_is_valid_in_them():
    x = batch("padding", D)
    x = x.mask_with(torch.arange(B * T * D).reshape(B, T, D) % 3 > 0)
    packed = x.to_packed()
    same(packed, x)
    alike(lambda t: F.linear(t, torch.ones(2, D).double()).softmax(-1), [x])
    alike(lambda t: F.layer_norm(t, (D,)), [x])


def test_lengths_say_what_is_stored():
    x = md.from_lengths(torch.randn(3, 4, 2), torch.tensor([4, 0, 2]))
    packed = x.to_packed()
    assert packed._pattern.lengths() == [4, 0, 2]
    assert packed._kept_validity is None


def test_copies_and_files():
    x = batch("holes", H, D).to_packed()
    for tensor in (x, x.transpose(1, 2).clone()):
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        buffer.seek(0)
        copies = copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), torch.load(buffer, weights_only=True)
        for again in copies:
            assert again.storage_layout is torch.jagged
            same(again, tensor)


def test_it_prints_what_it_is():
    x = md.masked_tensor(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [False, True]]))
    assert repr(x.to_packed()) == f"{repr(x)[:-1]}, stored as torch.jagged, nnz=2)"


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        (
            (4,),
            {},
            "packed storage is that of a batch (B, T, …), of which the first 2 dimensions are sparse: shape (4,)",
        ),
        ((2, 3, 4), {"sparse_dim": 3}, "shape (2, 3, 4) cannot be stored so with sparse_dim=3"),
        ((2, 4), {"blocksize": (2, 2)}, "torch.jagged has no blocks"),
    ],
)
def test_what_cannot_be_packed(shape, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        md.masked_tensor(torch.ones(shape)).to_layout(torch.jagged, **arguments)
    with pytest.raises(ValueError, match=r"packed storage has two sparse dimensions, \(batch, time\), and torch"):
        md.masked_tensor(torch.ones(2, 3, 4)).to_sparse().to_packed()


def test_the_gradient_of_a_packed_leaf_is_packed():
    leaf = batch("holes", D).to_packed().detach().requires_grad_()
    F.linear(leaf, WEIGHT).square().sum().backward()
    assert leaf.grad.storage_layout is torch.jagged
    assert leaf.grad._pattern is leaf._pattern


def test_second_derivatives():
    gradients = []
    for packed in (False, True):
        x, w = batch("holes", D).requires_grad_(), WEIGHT.clone().requires_grad_()
        given = x.to_packed() if packed else x
        hidden = heads(F.layer_norm(F.gelu(F.linear(given, w.mT @ w)), (D,))).softmax(-1)
        loss = (hidden.transpose(1, 2).flatten(2) * given).sin().sum()
        first = torch.autograd.grad(loss, (x, w), create_graph=True)
        gradients.append(torch.autograd.grad(first[0].sin().sum().to_tensor(0) + first[1].sin().sum(), (x, w)))
    for a, b in zip(*gradients, strict=True):
        same(a, b)


def test_in_place_on_rows():
    packed, padded = batch("padding", D).to_packed().clone(), batch("padding", D)
    for x in (packed, padded):
        x.mul_(2).add_(batch("holes", D)).relu_()
    same(packed, padded)
    assert packed.storage_layout is torch.jagged
    hidden = F.linear(packed, WEIGHT)
    hidden += 1
    same(hidden, F.linear(padded, WEIGHT) + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    x = batch("padding", D).float()
    block = Block(D, H).eval()
    with torch.autocast("cpu", dtype):
        same(block(x.to_packed()), block(x))
    block, x = block.to(dtype), x.to(dtype)
    same(block(x.to_packed()), block(x))


# ------------------------------------------------------------------------------------------------ operators on rows

WEIGHT, BIAS = plain(3, D), plain(3, seed=2)

ON_ROWS: dict[str, Callable[..., Any]] = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "linear without bias": lambda x, w, b: F.linear(x, w),
    "matmul": lambda x, w, b: x @ w.mT + b,
    "matrix times vector": lambda x, w, b: x @ w[0] + b.sum(),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (D,), w[0], w[1]) * b.sum(),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (D,), w[0]) + b.sum(),
    "normalize": lambda x, w, b: F.normalize(x, dim=-1) * w[0] + b.sum(),
    "gelu": lambda x, w, b: F.gelu(x) * w[0] + b.sum(),
    "silu, gated": lambda x, w, b: F.silu(F.linear(x, w, b)) * F.linear(x, w),
    "dropout": lambda x, w, b: F.dropout(x * w[0], 0.4) + b.sum(),
    "feature dropout": lambda x, w, b: F.dropout1d(x * w[0], 0.4) + b.sum(),
    "dropout of everything": lambda x, w, b: F.dropout(x * w[0], 1.0) + b.sum(),
    "glu": lambda x, w, b: F.glu(x * w[0], -1) * b.sum(),
    "residual": lambda x, w, b: x + F.linear(F.gelu(F.linear(x, w, b)), w.mT),
    "softmax": lambda x, w, b: (x * w[0]).softmax(-1) * b.sum(),
    "log_softmax": lambda x, w, b: F.linear(x, w, b).log_softmax(-1),
    "pooled sum": lambda x, w, b: (x * w[0]).sum(1) + b.sum(),
    "pooled mean": lambda x, w, b: (x * w[0]).mean(1) + b.sum(),
    "pooled amax": lambda x, w, b: (x * w[0]).amax(1) + b.sum(),
    "mean over features": lambda x, w, b: (x * w[0]).mean(-1, keepdim=True) * x + b.sum(),
    "heads": lambda x, w, b: (x * w[0]).view(B, T, H, -1).exp().reshape(B, T, D) + b.sum(),
    "unflatten": lambda x, w, b: (x * w[0]).unflatten(-1, (H, -1)).flatten(-2) + b.sum(),
    "chunk": lambda x, w, b: [c * b.sum() for c in (x * w[0]).chunk(2, -1)],
    "split": lambda x, w, b: [c * b.sum() for c in (x * w[0]).split([1, D - 1], -1)],
    "unbind": lambda x, w, b: [c * b.sum() for c in (x * w[0]).unbind(-1)],
    "cat": lambda x, w, b: torch.cat([x * w[0], F.linear(x, w, b)], -1),
    "stack": lambda x, w, b: torch.stack([x * w[0], x * w[1]], -1) * b.sum(),
    "getitem": lambda x, w, b: [(x * w[0])[..., :2] * b.sum(), (x * w[0])[:, :, 1:3], x[..., 0]],
    "transposed features": lambda x, w, b: F.linear(x, w, b).unflatten(-1, (3, 1)).transpose(2, 3).squeeze(2),
    "flip and roll": lambda x, w, b: (x * w[0]).flip(-1).roll(1, -1) + b.sum(),
    "whole blocks": lambda x, w, b: F.linear(F.dropout(F.gelu(F.linear(F.layer_norm(x, (D,)), w, b)), 0.2), w.mT) + x,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ON_ROWS)
def test_operators_on_rows(name, kind):
    results = alike(ON_ROWS[name], [batch(kind, D)], [WEIGHT, BIAS])
    if "pooled" not in name:
        assert {r.storage_layout for r in results} == {torch.jagged}


def test_what_moves_dense_dimensions_keeps_the_pattern():
    x = batch("padding", D).to_packed()
    moved = x.view(B, T, H, 2).transpose(1, 2).transpose(1, 2).flatten(2)
    assert moved._pattern is x._pattern
    assert torch.cat([x, x], -1)._pattern is x._pattern
    assert F.layer_norm(x, (D,))._pattern is x._pattern


def test_addmm_and_mm():
    x = batch("padding", D).to_packed().view(B * T, D)
    dense = batch("padding", D).view(B * T, D)
    with md.densify("never"):
        same(torch.mm(x, WEIGHT.mT), torch.mm(dense, WEIGHT.mT))
        same(torch.addmm(BIAS, x, WEIGHT.mT, beta=2), torch.addmm(BIAS, dense, WEIGHT.mT, beta=2))
        same(torch.addmm(plain(B * T, 3), x, WEIGHT.mT), torch.addmm(plain(B * T, 3), dense, WEIGHT.mT))


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_of_packed_indices(kind):
    indices = md.masked_tensor(torch.arange(B * T).reshape(B, T) % 7, rows(kind))
    found = alike(lambda i, w: F.embedding(i, w, padding_idx=2), [indices], [plain(7, D)])
    assert found[0].storage_layout is torch.jagged


CLASSES = torch.arange(B * T).reshape(B, T) % D

LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": lambda x: F.cross_entropy(x.transpose(1, 2), CLASSES),
    "cross_entropy of rows": lambda x: F.cross_entropy(x.view(-1, D), CLASSES.view(-1)),
    "cross_entropy, masked": lambda x: F.cross_entropy(
        x.view(-1, D), md.masked_tensor(CLASSES).mask_like(x[..., 0]).view(-1)
    ),
    "cross_entropy, smoothed": lambda x: F.cross_entropy(x.view(-1, D), CLASSES.view(-1), label_smoothing=0.1),
    "cross_entropy, ignored": lambda x: F.cross_entropy(
        x.view(-1, D), CLASSES.view(-1), ignore_index=1, weight=plain(D).abs()
    ),
    "cross_entropy, all ignored": lambda x: F.cross_entropy(x.view(-1, D), torch.full((B * T,), -100)),
    "cross_entropy, unreduced": lambda x: F.cross_entropy(x.transpose(1, 2), CLASSES, reduction="none"),
    "cross_entropy, shares": lambda x: F.cross_entropy(x.transpose(1, 2), plain(B, T, D).softmax(-1).transpose(1, 2)),
    "nll": lambda x: F.nll_loss(x.log_softmax(-1).view(-1, D), CLASSES.view(-1), reduction="sum"),
    "mse": lambda x: F.mse_loss(x, plain(B, T, D)),
    "mse with masked": lambda x: F.mse_loss(x, batch("holes", D, seed=4)),
    "mse with itself": lambda x: F.mse_loss(x, x.exp()),
    "mse, unreduced": lambda x: F.mse_loss(x, plain(B, T, D), reduction="none"),
    "l1": lambda x: F.l1_loss(x, plain(B, T, D), reduction="sum"),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, plain(B, T, D)),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, plain(B, T, D).sigmoid(), pos_weight=plain(D).abs()),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), plain(B, T, D).softmax(-1), reduction="sum"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_rows(name, kind):
    alike(LOSSES[name], [batch(kind, D)])


def test_a_loss_over_no_batch_at_all_is_torchs():
    x = md.masked_tensor(torch.ones(0, T, D))
    same(F.mse_loss(x.to_packed(), torch.ones(0, T, D)), F.mse_loss(x, torch.ones(0, T, D)))


# --------------------------------------------------------------------------------------------------------- attention


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


ATTENTION: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "bool mask": {"attn_mask": plain(T, T) > -0.3},
    "mask without keys": {"attn_mask": torch.ones(T, T, dtype=torch.bool).tril(-2)},
    "mask by batch": {"attn_mask": plain(B, 1, T, T) > -0.3},
    "bias by head": {"attn_mask": plain(1, H, T, T)},
    "masked bias": {"attn_mask": md.masked_tensor(plain(T, T), plain(T, T, seed=9) > -0.5)},
    "dropout": {"dropout_p": 0.3},
    "dropout, causal": {"dropout_p": 0.3, "is_causal": True},
    "dropout, mask": {"dropout_p": 0.3, "attn_mask": plain(T, T) > -0.3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_one_sequence_to_itself(name, kind):
    def attend(x: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in x.chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, **ATTENTION[name]).transpose(1, 2).flatten(2)

    found = alike(attend, [batch(kind, 3 * D)])
    assert found[0].storage_layout is torch.jagged


@pytest.mark.parametrize("kinds", [("padding", "holes"), ("holes", "padding"), ("all valid", "none valid")])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_to_other_sequences(name, kinds):
    def attend(x: Tensor, y: Tensor) -> Tensor:
        k, v = (heads(part) for part in y.chunk(2, -1))
        return F.scaled_dot_product_attention(heads(x), k, v, **ATTENTION[name]).transpose(1, 2).flatten(2)

    alike(attend, [batch(kinds[0], D), batch(kinds[1], 2 * D, seed=3)])


def test_attention_to_sequences_of_another_length():
    def attend(x: Tensor, y: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, y, y)

    other = md.masked_tensor(plain(B, 3, D), torch.arange(3)[:, None] < torch.tensor([3, 1, 2, 0, 1])[:, None, None])
    alike(attend, [batch("padding", D), other])


def test_attention_of_rows_that_are_partly_valid():
    x = batch("padding", 3 * D).mask_with(torch.arange(B * T * 3 * D).reshape(B, T, 3 * D) % 5 > 1)

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(heads(part) for part in x.chunk(3, -1)), is_causal=True)

    alike(attend, [x])


def test_attention_of_grouped_queries():
    def attend(x: Tensor, y: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in y.chunk(2, -1))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    alike(attend, [batch("padding", 8), batch("padding", 8, seed=2)], policy="auto")
    both = batch("padding", 16)
    alike(lambda z: attend(*z.split([8, 8], -1)), [both])


# ---------------------------------------------------------------------------------- dense dimensions before sparse ones


TURNED: dict[str, Callable[[Tensor], Any]] = {
    "there and back": lambda x: heads(x).exp().transpose(1, 2),
    "stays": lambda x: heads(x).exp() * heads(x) + plain(H, 1, 2),
    "three at once": lambda x: x.view(B, T, 2, H, 1).permute(2, 0, 3, 1, 4).unbind(0),
    "one of three": lambda x: x.view(B, T, 2, H, 1).permute(2, 0, 3, 1, 4)[1],
    "norms of heads": lambda x: F.rms_norm(heads(x), (2,), plain(2)),
    "linear of heads": lambda x: F.linear(heads(x), plain(3, 2)),
    "softmax of heads": lambda x: heads(x).softmax(-1),
    "rotated": lambda x: torch.cat([-heads(x)[..., 1:], heads(x)[..., :1]], -1) * plain(T, 2),
    "unsqueezed": lambda x: heads(x).unsqueeze(1),
    "heads repeated": lambda x: heads(x)[:, :, None].expand(B, H, 3, T, 2).reshape(B, 3 * H, T, 2),
    "heads divided": lambda x: heads(x).reshape(B, 1, H, T, 1, 2),
    "turned by position": lambda x: heads(x) * plain(B, T, 2).unsqueeze(1),
    "dropout": lambda x: F.dropout(heads(x), 0.3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TURNED)
def test_dense_dimensions_before_sparse_ones(name, kind):
    alike(TURNED[name], [batch(kind, D)])


def test_what_has_no_form_with_dense_dimensions_in_front_is_stored_densely_or_refused():
    x = heads(batch("padding", D).to_packed())
    dense = heads(batch("padding", D))
    same(x.sum(2), dense.sum(2))
    same(x @ x.mT, dense @ dense.mT)
    same(x.count((0, 1)), dense.count((0, 1)))
    same(x.mask_with(torch.arange(T)[:, None] > 1), dense.mask_with(torch.arange(T)[:, None] > 1))
    same(torch.zeros(x.shape).double().add_(x), torch.zeros(x.shape).double().add_(dense))
    clone, other = x.clone(), dense.clone()
    same(clone.mul_(2).add_(dense), other.mul_(2).add_(dense))
    same(x.to_layout(torch.sparse_coo), dense)
    same(md.accumulate(x, x.exp()), md.accumulate(dense, dense.exp()))
    with md.densify("never"), pytest.raises(md.MaskedSemanticsError, match="has no sparse form for this call"):
        x.sum(2)


# --------------------------------------------------------------------------------------------------- whole modules


class Block(nn.Module):
    """A pre-norm transformer block, as people write it."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(part) for part in self.qkv(self.ln1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.ln2(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_transformer_block_never_leaves_the_rows(kind, causal):
    torch.manual_seed(3)
    block = Block(D, H, causal).double()
    parameters = list(block.parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        names = [name for name, _ in block.named_parameters()]
        return torch.func.functional_call(block, dict(zip(names, values, strict=True)), (x,))

    found = alike(run, [batch(kind, D)], parameters)
    assert found[0].storage_layout is torch.jagged


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_torchs_own_encoder_layer(norm_first, training):
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(D, H, 8, 0.1, batch_first=True, norm_first=norm_first).double().train(training)
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    alike(run, [batch("padding", D)], list(layer.parameters()), policy="auto")


def test_torchs_own_multihead_attention():
    torch.manual_seed(3)
    module = nn.MultiheadAttention(D, H, batch_first=True).double()
    x = batch("padding", D)
    for found, expected in zip(module(*[x.to_packed()] * 3), module(x, x, x), strict=True):
        same(found, expected)


def test_a_model_learns_from_packed_batches_what_it_learns_from_padded_ones():
    torch.manual_seed(3)
    models = [nn.Sequential(Block(D, H), nn.Linear(D, D)).double()]
    models.append(copy.deepcopy(models[0]))
    x = batch("padding", D)
    for model, given in zip(models, (x, x.to_packed()), strict=True):
        torch.manual_seed(4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(given).view(-1, D), CLASSES.view(-1)).backward()
            optimizer.step()
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b)
