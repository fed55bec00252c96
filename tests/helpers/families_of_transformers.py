"""Small models of transformers with random weights, padded batches, and the loop over their unpadded samples.

Each family is made from its configuration: nothing is downloaded. In float64 but for what transformers itself computes
in float32 (the loss of a causal model, rotary angles), without dropout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import masked_dispatch as md
from masked_dispatch import interop

LENGTHS = (6, 2, 4)
WORDS = 37
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = SIZES | NO_DROPOUT
DECODER = SIZES | {"num_key_value_heads": 1}
# The kernel that multiplies by one matrix an expert takes no float64: see `by_grouped_products`.
EXPERTS = DECODER | {"num_experts_per_tok": 2, "output_router_logits": True, "experts_implementation": "eager"}


class Family(NamedTuple):
    """A class of transformers with its configuration's class and arguments."""

    model: str
    config: str
    arguments: dict[str, Any]

    def build(self) -> Any:
        import transformers  # takes seconds, in any process that collects

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.arguments)
        return getattr(transformers, self.model)(config).double()


FAMILIES = {
    "BERT": Family("BertForMaskedLM", "BertConfig", ENCODER),
    "RoBERTa": Family("RobertaForMaskedLM", "RobertaConfig", ENCODER),
    "XLM-R": Family("XLMRobertaForMaskedLM", "XLMRobertaConfig", ENCODER),
    "DistilBERT": Family(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "pad_token_id": 0}
        | {"dropout": 0.0, "attention_dropout": 0.0},
    ),
    "ELECTRA": Family("ElectraForMaskedLM", "ElectraConfig", ENCODER | {"embedding_size": 16}),
    "DeBERTa-v2": Family(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
    ),
    "ModernBERT": Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        SIZES
        | {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
        | {"local_attention": 4, "global_attn_every_n_layers": 2},
    ),
    "ALBERT": Family("AlbertForMaskedLM", "AlbertConfig", ENCODER | {"embedding_size": 16}),
    "MPNet": Family("MPNetForMaskedLM", "MPNetConfig", ENCODER),
    "ConvBERT": Family(
        "ConvBertForMaskedLM",
        "ConvBertConfig",
        ENCODER | {"embedding_size": 16, "head_ratio": 1, "conv_kernel_size": 3},
    ),
    "GPT-2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": WORDS, "n_positions": 40, "n_embd": 16, "n_layer": 2, "n_head": 2}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "GPT-NeoX": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES | {"bos_token_id": 1, "eos_token_id": 2}),
    "OPT": Family("OPTForCausalLM", "OPTConfig", SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}),
    "BLOOM": Family(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "Llama": Family("LlamaForCausalLM", "LlamaConfig", DECODER),
    "Mistral": Family("MistralForCausalLM", "MistralConfig", DECODER | {"sliding_window": 3}),
    "Qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "Gemma": Family("GemmaForCausalLM", "GemmaConfig", DECODER | {"head_dim": 8}),
    "Phi": Family("PhiForCausalLM", "PhiConfig", DECODER),
    "Mixtral": Family("MixtralForCausalLM", "MixtralConfig", EXPERTS | {"num_local_experts": 4}),
    "Qwen2-MoE": Family(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        EXPERTS | {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12},
    ),
    "OLMoE": Family("OlmoeForCausalLM", "OlmoeConfig", EXPERTS | {"num_experts": 4}),
    "T5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0},
    ),
    "BART": Family(
        "BartForConditionalGeneration",
        "BartConfig",
        {"vocab_size": WORDS, "d_model": 16, "max_position_embeddings": 40, "dropout": 0.0, "pad_token_id": 0}
        | {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 24))}
        | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 2},
    ),
}


def by_grouped_products(name: str) -> Any:
    """A mixture of experts in float32, by one product of all groups of rows, as transformers computes it by itself."""
    model, config, arguments = FAMILIES[name]
    sizes = {"intermediate_size": 32}
    if name == "Qwen2-MoE":
        sizes |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return Family(model, config, {**arguments, **sizes, "experts_implementation": "grouped_mm"}).build().float()


@dataclass
class Result:
    """What a model gives: the logits of each sample (T_i, words), the loss, and the gradients of its parameters."""

    logits: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]

    def difference(self, other: Result) -> float:
        """The greatest absolute difference of any number."""
        assert self.gradients.keys() == other.gradients.keys()
        pairs = [*zip(self.logits, other.logits, strict=True), (self.loss, other.loss)]
        pairs += [(gradient, other.gradients[name]) for name, gradient in self.gradients.items()]
        return max(float((a - b).abs().max()) for a, b in pairs)


def samples() -> list[Tensor]:
    """Token ids, one sequence of each length, none of them padding."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, WORDS, (length,), generator=generator) for length in LENGTHS]


def labels_of(model: Any, ids: Tensor) -> Tensor:
    """An encoder and a causal model are asked for the ids themselves, a pair of both for another sequence."""
    return ids.flip(0) if model.config.is_encoder_decoder else ids


def alone(model: Any) -> Result:
    """Each sample by itself, without padding: losses weighted by the numbers of their targets, gradients summed.

    The loss that balances a router's experts is that of all samples' tokens together, which is how it is defined.
    """
    model.zero_grad()
    outputs, losses, targets = [], [], 0
    for ids in samples():
        labels = labels_of(model, ids)
        output = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], labels=labels[None])
        shift = int("Causal" in type(model).__name__ or "LMHead" in type(model).__name__)
        losses.append(cross_entropy(output.logits[0, : len(labels) - shift], labels[shift:], reduction="sum"))
        targets += len(labels) - shift
        outputs.append(output)
    loss = sum(losses) / targets
    if hasattr(outputs[0], "aux_loss"):
        routers = tuple(torch.cat(layer) for layer in zip(*(output.router_logits for output in outputs), strict=True))
        balance = sys.modules[type(model).__module__].load_balancing_loss_func(routers, 4, 2)
        loss = loss + model.config.router_aux_loss_coef * balance
    loss.backward()
    return Result([output.logits[0].detach() for output in outputs], loss.detach(), gradients_of(model))


def padded_batch(model: Any, side: str) -> dict[str, Tensor]:
    """What a tokenizer and a data collator give: input_ids, attention_mask and labels, -100 in their padding."""

    def padded(sequences: list[Tensor], number: int, side: str) -> Tensor:
        return pad_sequence(sequences, batch_first=True, padding_value=number, padding_side=side)

    ids = samples()
    batch = {"input_ids": padded(ids, 0, side), "attention_mask": padded([torch.ones_like(x) for x in ids], 0, side)}
    # A pair's labels have a length of their own, and lie at the beginning of the decoder whatever the encoder's do.
    side = "right" if model.config.is_encoder_decoder else side
    return {**batch, "labels": padded([labels_of(model, x) for x in ids], -100, side)}


def positions_within_samples(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """`position_ids` that count each sample's own tokens, as generate() makes them."""
    return {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def run(model: Any, batch: dict[str, Any], labels: Tensor) -> Result:
    """A step of the model on a batch, masked or plain; `labels` say where each sample's logits are."""
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    logits, there = output.logits, labels != -100
    if md.is_masked_tensor(logits):
        assert logits.get_mask()[there].all()
        logits = logits.to_tensor(torch.nan)
    found = [row[here].detach() for row, here in zip(logits, there, strict=True)]
    loss = output.loss.to_tensor(torch.nan) if md.is_masked_tensor(output.loss) else output.loss
    return Result(found, loss.detach(), gradients_of(model))


def masked(model: Any, side: str, change: Callable[..., dict[str, Any]] = lambda batch: {}, **how: bool) -> Result:
    """A step on `from_batch_encoding(batch, **how)`, with what `change` adds to it."""
    batch = padded_batch(model, side)
    names = ["input_ids"] if model.config.is_encoder_decoder else ["input_ids", "labels"]
    return run(model, {**interop.from_batch_encoding(batch, names, **how), **change(batch)}, batch["labels"])


def gradients_of(model: Any) -> dict[str, Tensor]:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(gradients) > 10
    assert not any(md.is_masked_tensor(gradient) for gradient in gradients.values())
    return {name: gradient.clone() for name, gradient in gradients.items()}
