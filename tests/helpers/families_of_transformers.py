"""Small models of transformers with random weights, padded batches, and the loop over their unpadded samples.

Each family is made from its configuration: nothing is downloaded. In float64 but for what transformers itself computes
in float32 (the loss of a causal model, rotary angles), without dropout.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
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


# Its name | the class that is asked, from whose name that of its configuration follows | what is configured.
TABLE = """
BERT | BertForMaskedLM | **ENCODER
RoBERTa | RobertaForMaskedLM | **ENCODER
XLM-R | XLMRobertaForMaskedLM | **ENCODER
DistilBERT | DistilBertForMaskedLM | vocab_size=WORDS, dim=16, n_layers=2, n_heads=2, hidden_dim=24, pad_token_id=0,
    dropout=0.0, attention_dropout=0.0
ELECTRA | ElectraForMaskedLM | embedding_size=16, **ENCODER
DeBERTa-v2 | DebertaV2ForMaskedLM | relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8, **ENCODER
ModernBERT | ModernBertForMaskedLM | bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, local_attention=4,
    global_attn_every_n_layers=2, **SIZES
ALBERT | AlbertForMaskedLM | embedding_size=16, **ENCODER
MPNet | MPNetForMaskedLM | **ENCODER
ConvBERT | ConvBertForMaskedLM | embedding_size=16, head_ratio=1, conv_kernel_size=3, **ENCODER
GPT-2 | GPT2LMHeadModel | vocab_size=WORDS, n_positions=40, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
    embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2
GPT-NeoX | GPTNeoXForCausalLM | bos_token_id=1, eos_token_id=2, **SIZES
OPT | OPTForCausalLM | ffn_dim=24, word_embed_proj_dim=16, dropout=0.0, **SIZES
BLOOM | BloomForCausalLM | vocab_size=WORDS, hidden_size=16, n_layer=2, n_head=2, pad_token_id=0, hidden_dropout=0.0,
    attention_dropout=0.0
Llama | LlamaForCausalLM | **DECODER
Mistral | MistralForCausalLM | sliding_window=3, **DECODER
Qwen2 | Qwen2ForCausalLM | **DECODER
Gemma | GemmaForCausalLM | head_dim=8, **DECODER
Phi | PhiForCausalLM | **DECODER
Mixtral | MixtralForCausalLM | num_local_experts=4, **EXPERTS
Qwen2-MoE | Qwen2MoeForCausalLM | num_experts=4, moe_intermediate_size=12, shared_expert_intermediate_size=12, **EXPERTS
OLMoE | OlmoeForCausalLM | num_experts=4, **EXPERTS
T5 | T5ForConditionalGeneration | vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
    dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0
BART | BartForConditionalGeneration | vocab_size=WORDS, d_model=16, max_position_embeddings=40, dropout=0.0,
    pad_token_id=0, encoder_layers=2, encoder_ffn_dim=24, decoder_layers=2, decoder_ffn_dim=24,
    encoder_attention_heads=2, decoder_attention_heads=2, decoder_start_token_id=2
"""


def families() -> Iterator[tuple[str, Family]]:
    for row in re.sub(r"\n +", " ", TABLE.strip()).splitlines():
        name, model, arguments = row.split(" | ")
        config = re.split("For|LMHead", model)[0] + "Config"
        yield name, Family(model, config, eval(f"dict({arguments})", globals()))


FAMILIES = dict(families())


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
