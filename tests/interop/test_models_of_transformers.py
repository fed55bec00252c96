"""Beam search; what models give of a batch is in tests/thorough/interop/test_families_of_transformers.py."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

import masked_dispatch as md
from masked_dispatch import interop

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_beam_search_of_left_padded_texts(name: str) -> None:
    """The recipe of docs/recipes/language-models.md: each text gets the tokens that it gets alone."""
    model = decoder(name)
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 5]])
    there = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    tokens = interop.from_attention_mask(ids, there)
    options = {"num_beams": 3, "max_new_tokens": 4, "do_sample": False}
    with md.updates("silent"):  # the code writes the texts into a plain buffer
        padded = model.generate(input_ids=tokens, attention_mask=there, **options)
        found = model.generate(input_ids=tokens.without_extent(), attention_mask=there, **options)
    plain = model.generate(input_ids=ids, attention_mask=there, **options)
    for result in (padded, found):
        assert torch.equal(result.to_tensor(0)[:, 2:], plain[:, 2:])
        for row, text, where in zip(result, ids, there, strict=True):
            alone = model.generate(input_ids=text[where.bool()][None], **options)[0]
            assert row[int((where == 0).sum()) :].to_tensor(0).tolist()[: len(alone)] == alone.tolist()


def decoder(name: str) -> Any:
    """A small decoder that ends no text."""
    import transformers  # takes seconds, in any process that collects

    special = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": None}
    torch.manual_seed(0)
    if name == "GPT2":
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, **special)
        return transformers.GPT2LMHeadModel(config).eval()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **special)).eval()
