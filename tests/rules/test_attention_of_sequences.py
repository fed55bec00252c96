"""Attention of packed batches by torch's kernels that read the bounds of sequences: a stand-in of them on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md
from kernels_of_sequences import KERNELS, kernels_of_sequences
from op_registry.ops.attention import by_bounds

LENGTHS = torch.tensor([5, 0, 3])
F = nn.functional


@pytest.fixture
def called() -> Iterator[list[str]]:
    with kernels_of_sequences("cpu") as names:
        yield names


def batch(features: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0, lengths: Tensor = LENGTHS) -> Any:
    data = torch.randn(3, 6, features, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return md.from_lengths(data, lengths).to_packed().detach().requires_grad_()


def heads(x: Any, number: int) -> Any:
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


def outcome(q: Any, k: Any, v: Any, of_keys: int = 2, **options: Any) -> list[Tensor]:
    """The result of attention, and the gradients, as dense tensors."""
    result = F.scaled_dot_product_attention(heads(q, 2), heads(k, of_keys), heads(v, of_keys), **options)
    result = result.transpose(1, 2).flatten(2)
    found = [result, *torch.autograd.grad(result.float().square().sum(), (q, k, v))]
    return [part for t in found for part in (t.to_dense().to_tensor(0).detach(), t.to_dense().get_mask())]


OPTIONS: dict[str, dict[str, Any]] = {"": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.3}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["efficient", "flash"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_kernel_gives_what_one_call_for_each_sequence_gives(dtype: torch.dtype, options: dict[str, Any]) -> None:
    x = batch(16, dtype)
    expected = outcome(x, x, x, **options)
    with kernels_of_sequences("cpu") as called:
        found = outcome(x, x, x, **options)
    assert called == ["flash" if dtype is torch.bfloat16 else "efficient"]
    rounding = 0.05 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)


def test_sequences_without_keys_are_as_they_are_one_by_one() -> None:
    q, k = batch(lengths=torch.tensor([5, 2, 3])), batch(seed=1)
    expected = outcome(q, k, k)
    with kernels_of_sequences("cpu") as called:
        found = outcome(q, k, k)
    assert called == ["efficient"]
    torch.testing.assert_close(found, expected)


def test_heads_of_keys_serve_several_heads_of_queries(called: list[str]) -> None:
    q, k = batch(16), batch(8, seed=1)
    found = outcome(q, k, k, of_keys=1, enable_gqa=True)
    assert called == ["efficient"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_bounds, "DEVICES", [])
        torch.testing.assert_close(found, outcome(q, k, k, of_keys=1, enable_gqa=True))


@pytest.mark.parametrize("features", [6, 10])
def test_what_no_kernel_takes_runs_one_sequence_after_another(features: int, called: list[str]) -> None:
    outcome(batch(features), batch(features), batch(features))
    outcome(batch(8, torch.float64), batch(8, torch.float64), batch(8, torch.float64))
    assert called == []


def test_an_encoder_layer_on_packed_tokens_calls_it(called: list[str]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = batch()
    trained = layer(x)
    with torch.no_grad():
        evaluated = layer.eval()(x)
    assert called == ["efficient"] * 2
    torch.testing.assert_close(trained.to_dense().to_tensor(0), evaluated.to_dense().to_tensor(0))


def test_the_kernels_have_the_arguments_that_are_passed() -> None:
    """As do those of every torch that was tested; what they compute, only a GPU shows."""
    aten = torch.ops.aten
    assert all(hasattr(aten, name) for name in KERNELS)
    names = {
        name: [a.name for a in getattr(aten, name).default._schema.arguments]
        for name in ("_flash_attention_forward", "_efficient_attention_forward")
    }
    flash, efficient = names.values()
    assert flash[:11] == [
        *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"),
        *("return_debug_mask", "scale"),
    ]
    assert efficient[:12] == [
        *("query", "key", "value", "bias", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("dropout_p", "custom_mask_type", "compute_log_sumexp", "scale"),
    ]
