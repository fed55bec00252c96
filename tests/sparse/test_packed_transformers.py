"""Models of transformers on packed `input_ids` stay packed, with the values and gradients of plain torch's batch.

That one is given the `attention_mask`; both run in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import masked_dispatch as md

LENGTHS = torch.tensor([6, 2, 4])
IDS = torch.arange(18).view(3, 6) % 11
SMALL = {"vocab_size": 11, "attn_implementation": "sdpa"}
BLOCKS = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}

MODELS: dict[str, dict[str, Any]] = {
    "Bert": BLOCKS,
    "DistilBert": {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12},
    "GPT2": {"n_embd": 8, "n_layer": 2, "n_head": 2},
    "Llama": {**BLOCKS, "num_key_value_heads": 1, "use_cache": False},
}


@pytest.mark.parametrize("name", MODELS)
def test_packed_ids(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **MODELS[name])
    model = getattr(transformers, f"{name}Model")(config).double().eval()
    mask = torch.arange(6) < LENGTHS[:, None]
    hidden = model(input_ids=IDS, attention_mask=mask.long()).last_hidden_state
    expected = hidden[mask]
    expected.square().mean().backward()
    gradients = {path: parameter.grad for path, parameter in model.named_parameters()}
    assert sum(gradient is not None for gradient in gradients.values()) > 10

    model.zero_grad()
    ids = md.from_lengths(torch.where(mask, IDS, 999), LENGTHS).to_packed()
    with md.densify("never"):
        found = model(input_ids=ids).last_hidden_state
        found.square().mean().backward()
    assert found.storage_layout is torch.jagged
    torch.testing.assert_close(found.to_tensor(0)[mask], expected)
    for path, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[path], msg=path)
