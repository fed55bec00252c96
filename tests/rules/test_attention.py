"""Attention: torch.nn's modules on padded batches, in train and in eval, against each sequence alone; the fused kernel.

Which keys a query attends to under which masks, with its gradients, the laws ask (P2, P3, P5).
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bare_records import apply, seen
from masked_dispatch import MaskedSemanticsError, as_masked_tensor, is_masked_tensor, masked_tensor
from op_registry.authoring import Dense

aten = torch.ops.aten
LENGTHS = (6, 4, 1)
BATCH, TIME, WIDTH = 3, 6, 8


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    return torch.randn(BATCH, TIME, WIDTH)


KNOWN = (torch.arange(TIME) < torch.tensor(LENGTHS)[:, None])[..., None]


def padded(tokens, mask=KNOWN):
    return as_masked_tensor(torch.where(mask, tokens, math.nan), mask)


def zeros_outside(x):
    return x.to_tensor(0)


def agree(a, b):
    assert torch.equal(a.get_mask(), b.get_mask())
    torch.testing.assert_close(zeros_outside(a), zeros_outside(b), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_each_sequence_is_attended_as_if_alone(tokens, training, gradients, need_weights):
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True).train(training)
    with torch.set_grad_enabled(gradients):
        x = padded(tokens)
        mixed, weights = attention(x, x, x, need_weights=need_weights)
    assert torch.equal(mixed.get_mask(), KNOWN.expand(BATCH, TIME, WIDTH))
    for b, n in enumerate(LENGTHS):
        alone, alone_weights = attention(*[tokens[b : b + 1, :n]] * 3)
        torch.testing.assert_close(zeros_outside(mixed)[b, :n], alone[0])
        if need_weights:
            torch.testing.assert_close(zeros_outside(weights)[b, :n, :n], alone_weights[0])
            assert weights.get_mask()[b].sum() == n * n


MASKINGS = ("nothing", "keys", "pairs", "both")


def restrictions(which, keys="key_padding_mask", pairs="attn_mask"):
    excluded = torch.zeros(BATCH, TIME, dtype=torch.bool)
    excluded[0, 2] = excluded[1, 3] = True
    future = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    return {
        "nothing": {},
        "keys": {keys: excluded},
        "pairs": {pairs: future},
        "both": {keys: excluded, pairs: future},
    }[which]


@pytest.mark.parametrize("which", MASKINGS)
def test_weights_and_the_fused_kernels_agree(tokens, which):
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    scattered = torch.rand(BATCH, TIME, 1, generator=torch.Generator().manual_seed(1)) < 0.7
    scattered[:, 0] = True
    x = padded(tokens, scattered)
    kept = restrictions(which)
    with_weights, weights = attention(x, x, x, **kept)
    agree(with_weights, attention(x, x, x, need_weights=False, **kept)[0])
    attention.eval()
    with torch.no_grad():
        in_eval, weights_in_eval = attention(x, x, x, **kept)
        agree(with_weights, in_eval)
        agree(weights, weights_in_eval)
        agree(with_weights, attention(x, x, x, need_weights=False, **kept)[0])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("which", MASKINGS)
def test_an_encoder_in_training_is_that_in_eval(tokens, which):
    """Which encodes each sequence as if alone: test_encoder_tokens.py."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    encoder, kept = nn.TransformerEncoder(layer, 2), restrictions(which, "src_key_padding_mask", "mask")
    trained = encoder(padded(tokens), **kept)
    assert trained._validity.shape == (BATCH, TIME, 1)
    with torch.no_grad():
        agree(trained, encoder.eval()(padded(tokens), **kept))


def test_a_decoder_trains_and_its_parameters_get_plain_gradients(tokens):
    model = nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    out = model(padded(tokens), padded(tokens.flip(1)), tgt_mask=restrictions("pairs")["attn_mask"], tgt_is_causal=True)
    assert torch.equal(out.get_mask(), KNOWN.expand(BATCH, TIME, WIDTH))
    zeros_outside(out).square().sum().backward()
    for parameter in model.parameters():
        assert not is_masked_tensor(parameter.grad)
        assert parameter.grad.isfinite().all()


def test_kernels_called_by_name_say_whom_to_call_instead(tokens):
    x = padded(tokens)[:, None]
    assert torch._fused_sdp_choice(x, x, x) == torch._fused_sdp_choice(*[tokens[:, None]] * 3)
    for call in (
        lambda: aten._scaled_dot_product_efficient_attention(x, x, x, None, False),
        lambda: aten._scaled_dot_product_flash_attention(x, x, x),
    ):
        with pytest.raises(MaskedSemanticsError, match=r"partly valid tensor of shape \(3, 1, 6, 8\). Call torch.nn.f"):
            call()
    whole = masked_tensor(tokens[:, None].to("meta"))
    outcome = aten._scaled_dot_product_efficient_attention(whole, whole, whole, None, True)[0]
    assert is_masked_tensor(outcome)
    assert outcome.shape == x.shape


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_tensor_attends_to_itself_as_to_another_with_its_mask(is_causal):
    torch.manual_seed(0)
    data, mask = torch.randn(2, 3, 4), torch.rand(2, 3, 4) < 0.4
    x, other = masked_tensor(data, mask), masked_tensor(data, mask.clone())
    own = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=is_causal)
    assert own.get_mask().equal(
        nn.functional.scaled_dot_product_attention(x, other, other, is_causal=is_causal).get_mask()
    )


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_attention_to_nothing_is_blind_to_invalid_queries(garbage):
    data, mask = torch.ones(2, 3, 4), torch.tensor([[False], [True], [True]]).expand(2, 3, 4)
    query, nothing = masked_tensor(torch.where(mask, data, garbage), mask), torch.ones(2, 0, 4)
    attended = nn.functional.scaled_dot_product_attention(query, nothing, nothing)
    assert attended.get_mask().equal(mask)
    assert attended.to_tensor(0).equal(torch.zeros(2, 3, 4))


def test_an_attn_mask_may_be_masked_itself():
    q, k, v = (torch.randn(3, 2), torch.randn(4, 2), torch.randn(4, 2))
    for given in (torch.ones(3, 4, dtype=torch.bool), torch.zeros(3, 4)):
        known = torch.rand(3, 4) < 0.6
        known[0] = False
        garbage = torch.where(known, given, False if given.dtype is torch.bool else math.nan)
        result = apply(
            aten.scaled_dot_product_attention.default,
            Dense(q),
            Dense(k),
            Dense(v),
            Dense(garbage, known.to(torch.int8)),
        )
        mask, values = seen(result)
        assert mask.any(-1).tolist() == known.any(-1).tolist()
        torch.testing.assert_close(values[1:], F.scaled_dot_product_attention(q, k, v, known)[1:])


def test_a_query_that_attn_mask_leaves_without_keys_is_as_in_torch():
    torch.manual_seed(0)
    q, k, allowed = torch.randn(2, 4), torch.randn(3, 4), torch.tensor([[True] * 3, [False] * 3])
    for known in (torch.tensor([[True], [False], [True]]), torch.rand(3, 4) < 0.6):
        keys = masked_tensor(torch.where(known, k, math.nan), known)
        found = F.scaled_dot_product_attention(q, keys, keys, allowed)
        assert found.get_mask().all()
        torch.testing.assert_close(found[1].to_tensor(9), F.scaled_dot_product_attention(q, k, k, allowed)[1])


def test_a_query_without_a_valid_key_gets_a_finite_gradient():
    q, known = torch.ones(2, 3, 4, requires_grad=True), torch.tensor([[[True], [False]], [[False], [False]]])
    for mask in (known, known.expand(2, 2, 4) & (torch.arange(4) > 1)):
        keys = masked_tensor(torch.where(mask, torch.ones(2, 2, 4), math.nan), mask)
        found = F.scaled_dot_product_attention(q, keys, keys)
        assert found.get_mask().any(-1).tolist() == [[True] * 3, [False] * 3]
        (gradient,) = torch.autograd.grad(found.sum(), q)
        assert gradient.isfinite().all()


def test_grouped_queries_share_keys():
    q, k, v = torch.randn(2, 4, 3, 2), torch.randn(2, 2, 5, 2), torch.randn(2, 2, 5, 2)
    mask = torch.rand(2, 2, 5, 1) < 0.6
    record_of_k, record_of_v = (Dense(torch.where(mask, t, math.nan), mask.to(torch.int8)) for t in (k, v))
    grouped = apply(aten.scaled_dot_product_attention.default, Dense(q), record_of_k, record_of_v, enable_gqa=True)

    def repeated(r):
        return Dense(r.data.repeat_interleave(2, 1), r.validity.repeat_interleave(2, 1))

    whole = apply(aten.scaled_dot_product_attention.default, Dense(q), repeated(record_of_k), repeated(record_of_v))
    for mine, theirs in zip(seen(grouped), seen(whole), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_mask_by_token_reaches_the_kernel_as_one_by_key():
    mask = (torch.rand(2, 1, 5, 1) < 0.5).to(torch.int8)
    x = Dense(torch.randn(2, 3, 5, 4), mask)
    seen_masks: list[Tensor] = []

    class Kernel(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "flash_attention" in func._schema.name:
                seen_masks.append(kwargs["attn_mask"])
            return func(*args, **(kwargs or {}))

    with Kernel():
        result = apply(aten.scaled_dot_product_attention.default, x, x, x)
    assert [m.shape for m in seen_masks] == [(2, 1, 1, 5)]
    assert result.validity.shape == (2, 1, 5, 1)


def test_attention_math_gives_weights_over_valid_keys():
    q, k, v = torch.randn(3, 2), torch.randn(4, 2), torch.randn(4, 2)
    known = torch.tensor([True, False, True, False])[:, None]
    keys = Dense(torch.where(known, k, math.nan), known.to(torch.int8))
    output, weights = apply(aten._scaled_dot_product_attention_math.default, Dense(q), keys, Dense(v))
    mask, values = seen(weights)
    assert torch.equal(mask, known.T.expand(3, 4))
    kept = known[:, 0]
    torch.testing.assert_close(values[:, kept], (q @ k[kept].T / math.sqrt(2)).softmax(-1))
    torch.testing.assert_close(seen(output)[1], values[:, kept] @ v[kept])
