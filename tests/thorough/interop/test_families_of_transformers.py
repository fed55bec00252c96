"""`model(**from_batch_encoding(batch))` gives at every token, in its loss and in its gradients what the samples give.

They are run one by one, without padding. What differs is named here, with the reason, and in the recipe
docs/recipes/padded-batches.md: a name whose difference is gone has to leave.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

import masked_dispatch as md
from families_of_transformers import (
    FAMILIES,
    Family,
    alone,
    by_grouped_products,
    masked,
    padded_batch,
    positions_within_samples,
    run,
    samples,
)
from masked_dispatch import interop

# The caches of sliding windows keep the batch's last columns, for tokens to come.
pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.filterwarnings("ignore::masked_dispatch.BatchEndWarning"),
]

# transformers computes the loss of a causal model and rotary angles in float32.
SAME = 1e-6

# They number positions by the columns of the batch, so padding in front shifts each sample's; in a plain batch too.
POSITIONS_OF_THE_BATCH = ["BERT", "DistilBERT", "ELECTRA", "DeBERTa-v2", "ALBERT", "ConvBERT", "GPT-2"]
# So does its encoder, and it takes no position_ids.
WITHOUT_POSITION_IDS = ["BART"]
LEFT = [*POSITIONS_OF_THE_BATCH, *WITHOUT_POSITION_IDS]

# They read attention_mask for more than attention: OPT for positions, the others for the loss that balances experts.
EXPERTS = ["Mixtral", "Qwen2-MoE", "OLMoE"]
READ_FOR_MORE = [("OPT", "left"), *((name, side) for name in EXPERTS for side in ("left", "right"))]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_gives_what_its_samples_give(name: str, side: str) -> None:
    model = FAMILIES[name].build()
    difference = masked(model, side).difference(alone(model))
    if side == "left" and name in LEFT:
        assert difference > 1000 * SAME, f"{name} is right without position_ids: take it out of the list and the recipe"
    else:
        assert difference < SAME


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_by_grouped_products(name: str, side: str) -> None:
    model = by_grouped_products(name)
    assert masked(model, side).difference(alone(model)) < 10 * SAME


@pytest.mark.parametrize("name", LEFT)
def test_positions_that_count_within_samples_make_left_padding_right(name: str) -> None:
    model = FAMILIES[name].build()
    difference = masked(model, "left", positions_within_samples).difference(alone(model))
    if name in WITHOUT_POSITION_IDS:
        assert difference > 1000 * SAME, f"{name} takes position_ids: change the list and the recipe"
    else:
        assert difference < SAME


@pytest.mark.parametrize("name", LEFT)
def test_a_plain_batch_with_padding_in_front_is_not_right_either(name: str) -> None:
    model = FAMILIES[name].build()
    batch = padded_batch(model, "left")
    assert run(model, batch, batch["labels"]).difference(alone(model)) > 1000 * SAME


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", FAMILIES)
def test_who_reads_attention_mask_for_attention_alone_needs_none(name: str, side: str) -> None:
    model = FAMILIES[name].build()
    difference = masked(model, side, keep_attention_mask=False).difference(masked(model, side))
    if (name, side) in READ_FOR_MORE:
        assert difference > 10 * SAME, f"{name} needs no attention_mask: take it out of the list and the recipe"
    else:
        assert difference < SAME


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_mean_over_tokens_of_modernbert_reads_it_too(side: str) -> None:
    family = FAMILIES["ModernBERT"]
    more = {"classifier_pooling": "mean"}
    model = Family("ModernBertForSequenceClassification", family.config, {**family.arguments, **more}).build().eval()
    expected = torch.cat([model(input_ids=x[None], attention_mask=torch.ones_like(x)[None]).logits for x in samples()])
    batch: dict[str, Any] = padded_batch(model, side)
    del batch["labels"]

    def logits(keep: bool) -> torch.Tensor:
        return model(**interop.from_batch_encoding(batch, keep_attention_mask=keep)).logits.to_tensor(0.0)

    torch.testing.assert_close(logits(True), expected, rtol=0, atol=SAME)
    assert (logits(False) - expected).abs().max() > 1000 * SAME


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", ["BERT", "RoBERTa", "DistilBERT", "GPT-2", "Llama"])
def test_packed_ids_stay_packed_with_the_mask_and_without(name: str, keep: bool) -> None:
    model = FAMILIES[name].build()

    def packed(batch: dict[str, Any]) -> dict[str, Any]:
        return {name: interop.from_batch_encoding(batch)[name].to_packed() for name in ("input_ids", "labels")}

    assert masked(model, "right", packed, keep_attention_mask=keep).difference(alone(model)) < SAME

    batch = interop.from_batch_encoding(padded_batch(model, "right"), ["input_ids"], keep_attention_mask=keep)
    del batch["labels"]  # the loss of a causal model moves its labels by one, onto the padding
    batch["input_ids"] = batch["input_ids"].to_packed()
    with md.densify("never"):
        assert model(**batch).logits.storage_layout is torch.jagged
