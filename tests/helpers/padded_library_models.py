"""Models of other libraries, and how they are asked: small, random weights, unmodified, told nothing of padding.

At most five are of one library. A library that is not installed is not asked, and the page says so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from padded_batches import Model, Of

MODELS: list[Model] = []
PAIR = ("steps", "more steps")
GRAPH = ("steps", "graph")
IMAGE = ("image",)
WAVE = ("wave",)


def ask(
    path: str,
    *arguments: Any,
    as_: str = "",
    run: Callable[..., Any] | None = None,
    inputs: tuple[str, ...] = ("steps",),
    least: int = 1,
    times: int = 1,
    exact: bool = True,
    **options: Any,
) -> None:
    """Ask the class at `package.module:name`, made with `arguments` and `options`, under the name `as_`.

    run   what is done with the module and the inputs, if not module(*inputs)
    """

    def build() -> nn.Module:
        made = load(path)(*arguments, **options)
        return made if run is None else Of(lambda of, *each: run(of.made, *each), made=made)

    ask_as(path.split(".")[0].split(":")[0], as_ or path.partition(":")[2], build, inputs, least, times, exact)


def ask_as(library: str, name: str, build: Callable[[], nn.Module], *how: Any) -> None:
    MODELS.append(Model(name, build, *how, library=library))


def load(path: str) -> Any:
    """What is at `package.module:name`."""
    without_compiled_operators()
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def without_compiled_operators() -> None:
    """Let torchvision and torchaudio be imported beside any build of torch: what is asked of them is plain Python.

    The index has them compiled for one build of torch, another than the one for CPUs.
    """
    if importlib.util.find_spec("torchvision") is not None:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    compiled: Any = ModuleType("torchaudio._extension")
    compiled._IS_TORCHAUDIO_EXT_AVAILABLE = False
    compiled.fail_if_no_align = lambda function: function
    sys.modules.setdefault(compiled.__name__, compiled)


def channels_first(module: nn.Module, x: Tensor) -> Tensor:
    """What a module that takes channels before positions makes of steps."""
    return module(x.transpose(1, 2))


def one_channel(module: nn.Module, x: Tensor) -> Tensor:
    """What a module that takes channels makes of waves, or of one picture of features."""
    return module(x[:, None])


def first(module: nn.Module, *inputs: Tensor) -> Tensor:
    """The first result of several."""
    return module(*inputs)[0]


def speech(name: str, **options: Any) -> nn.Module:
    """A small model of transformers that reads waves, with random weights."""
    import transformers

    config = getattr(transformers, f"{name}Config")(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8, 8),
        conv_kernel=(10, 3, 3),
        conv_stride=(5, 2, 2),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        attn_implementation="eager",
        **options,
    )
    return Of(lambda m, x: m.model(x).last_hidden_state, model=getattr(transformers, f"{name}Model")(config))


def prenet() -> nn.Module:
    """What SpeechT5 does before its decoder: a speaker's vector is joined to every step."""
    from transformers.models.speecht5.modeling_speecht5 import SpeechT5Config, SpeechT5SpeechDecoderPrenet

    config = SpeechT5Config(
        hidden_size=8, num_mel_bins=4, speech_decoder_prenet_units=8, speaker_embedding_dim=4, max_speech_positions=16
    )
    layer = SpeechT5SpeechDecoderPrenet(config)
    layer._consistent_dropout = lambda x, p: x  # it drops in eval(), too
    return Of(lambda m, x, speaker: m.layer(x, speaker_embeddings=speaker), layer=layer)


# transformers ---------------------------------------------------------------------------------------------------------

POINTS = ("steps", "points")
HEADS = {"heads": 2, "dim_head": 2}


def hugging(name: str, run: Callable[..., Any] | None = None, exact: bool = True, **options: Any) -> None:
    """Ask a model of transformers, which takes embeddings if `run` isn't given."""

    def build() -> nn.Module:
        config = load(f"transformers:{name}Config")(attn_implementation="eager", vocab_size=5, **options)
        model = load(f"transformers:{name}Model")(config)
        return Of(lambda of, x: (run or embedded)(of.model, x), model=model)

    ask_as("transformers", name, build, ("steps",), 1, 1, exact)


def embedded(model: Any, x: Tensor) -> Tensor:
    return model(inputs_embeds=x)[0]


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
STATES = {"hidden_size": 4, "use_cache": False}
ENCODER = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
LATENTS = {
    "num_latents": 3,
    "d_latents": 8,
    "d_model": 4,
    "num_blocks": 1,
    "num_self_attends_per_block": 1,
    "num_self_attention_heads": 2,
    "num_cross_attention_heads": 2,
    "attention_probs_dropout_prob": 0.0,
}

ask_as("transformers", "Wav2Vec2", lambda: speech("Wav2Vec2", feat_extract_norm="layer"), WAVE)
ask_as("transformers", "Wav2Vec2, group norm", lambda: speech("Wav2Vec2"), WAVE)
ask_as("transformers", "HuBERT", lambda: speech("Hubert"), WAVE)
ask_as("transformers", "WavLM", lambda: speech("WavLM", num_buckets=8), WAVE)
ask_as("transformers", "SpeechT5 decoder prenet", prenet, ("steps", "vector"))
hugging("Bert", **ENCODER, **NO_DROPOUT)
hugging("XLNet", d_model=4, n_layer=1, n_head=2, d_inner=8, dropout=0.0)
hugging("Perceiver", lambda model, x: model(x).last_hidden_state, **LATENTS)
hugging("Mamba", exact=False, state_size=3, num_hidden_layers=1, conv_kernel=3, **STATES)
hugging("Rwkv", exact=False, num_hidden_layers=2, attention_hidden_size=4, intermediate_size=8, **STATES)

# x-transformers -------------------------------------------------------------------------------------------------------

SMALL = {"dim": 4, "depth": 1, "heads": 2, "attn_dim_head": 2}


def with_memory_tokens() -> nn.Module:
    layers = load("x_transformers:Encoder")(**SMALL)
    return load("x_transformers:ContinuousTransformerWrapper")(
        dim_in=4, dim_out=2, max_seq_len=16, num_memory_tokens=2, attn_layers=layers
    )


# (Their softmax computes in float32.)
ROUNDED: dict[str, Any] = {**SMALL, "exact": False}
ask("x_transformers:Encoder", as_="Encoder, rotary", rotary_pos_emb=True, **ROUNDED)
ask("x_transformers:Decoder", as_="Decoder, selective, T5 bias", attn_selective=True, rel_pos_bias=True, **ROUNDED)
ask("x_transformers:Decoder", as_="Decoder, ALiBi, shifted", alibi_pos_bias=True, shift_tokens=1, **ROUNDED)
ask("x_transformers:CrossAttender", inputs=PAIR, run=lambda made, x, y: made(x, context=y), **ROUNDED)
ask_as("x_transformers", "ContinuousTransformerWrapper, memory tokens", with_memory_tokens, ("steps",), 1, 1, False)

# other kinds of attention ---------------------------------------------------------------------------------------------

ask("conformer:Conformer", 4, depth=1, ff_mult=2, conv_kernel_size=3, **HEADS)
ask("conformer:ConformerConvModule", 4, as_="ConformerConvModule, causal", causal=True, kernel_size=3)
ask("local_attention:LocalAttention", 3, autopad=True, dim=4, exact=False, run=lambda made, x: made(x, x.flip(-1), x))
ask("local_attention.transformer:LocalMHA", dim=4, window_size=3, causal=True, exact=False, **HEADS)
ask("linear_attention_transformer:LinearAttentionTransformer", 4, 1, 16, heads=2)
ask(
    "linear_attention_transformer:LinearAttentionTransformer",
    *(4, 1, 16),
    as_="LinearAttentionTransformer, causal, shifted",
    heads=2,
    causal=True,
    shift_tokens=True,
)
ask("performer_pytorch:SelfAttention", 4, heads=2, dim_head=4, nb_features=6)
ask(
    "performer_pytorch:SelfAttention",
    4,
    as_="SelfAttention, ReLU features",
    heads=2,
    dim_head=4,
    nb_features=6,
    generalized_attention=True,
)
ask(
    "perceiver_pytorch:Perceiver",
    num_freq_bands=2,
    max_freq=4.0,
    input_channels=4,
    input_axis=1,
    num_classes=2,
    depth=1,
    num_latents=3,
    latent_dim=4,
    latent_heads=2,
    cross_dim_head=4,
    latent_dim_head=4,
)
ask(
    "perceiver_pytorch:PerceiverIO",
    inputs=PAIR,
    run=lambda made, x, y: made(x, queries=y),
    depth=1,
    dim=4,
    queries_dim=4,
    num_latents=3,
    latent_dim=4,
    latent_heads=2,
    cross_dim_head=4,
    latent_dim_head=2,
)
ask("nystrom_attention:NystromAttention", 4, num_landmarks=2, residual_conv_kernel=3, **HEADS)
ask("linformer:LinformerSelfAttention", 4, 32, k=3, heads=2)
ask("reformer_pytorch.reformer_pytorch:FullQKAttention", causal=True, run=lambda made, x: made(x, x)[0])
ask("bidirectional_cross_attention:BidirectionalCrossAttention", dim=4, inputs=PAIR, **HEADS)
ask("entmax:Sparsemax", -2, as_="weights by Sparsemax", run=lambda made, x: made(x) * x)
ask("entmax:Entmax15", -2, as_="weights by Entmax15", run=lambda made, x: made(x) * x)

# recurrences and chains -----------------------------------------------------------------------------------------------


def likelihood(made: Any, x: Tensor) -> Tensor:
    return made(x, torch.zeros(x.shape[:2], dtype=torch.long), reduction="none")


ask("minGRU_pytorch:minGRU", 4, least=2)
ask("minGRU_pytorch.minLSTM:minLSTM", 4, least=2)
ask("gateloop_transformer:SimpleGateLoopLayer", 4, use_heinsen=True)
ask("gateloop_transformer:SimpleGateLoopLayer", 4, as_="SimpleGateLoopLayer, reversed", reverse=True)
ask("torchcrf:CRF", 4, batch_first=True, run=likelihood)
ask("pytorch_tcn:TCN", 4, [4, 4], as_="TCN, causal", kernel_size=2, dropout=0.0, run=channels_first)
ask(
    "pytorch_tcn:TCN",
    *(4, [4, 4]),
    as_="TCN, both ways",
    kernel_size=3,
    dropout=0.0,
    causal=False,
    use_skip_connections=True,
    run=channels_first,
)

# sets, points, graphs -------------------------------------------------------------------------------------------------


def without_noise(made: Any, x: Tensor) -> Tensor:
    """Slots that start at their mean."""
    with torch.no_grad():
        made.slots_logsigma.fill_(-torch.inf)
    return made(x)


def coarse(made: Any, x: Tensor, adjacency: Tensor) -> Tensor:
    """Assignments, features and adjacency of clusters; not the losses, which mix graphs."""
    return made(x, adjacency)[:3]


ask("isab_pytorch:ISAB", dim=4, heads=2, num_latents=3)
ask("slot_attention:SlotAttention", 3, 4, hidden_dim=8, run=without_noise)
ask(
    "soft_moe_pytorch:SoftMoE",
    4,
    num_experts=2,
    num_slots=2,
    is_distributed=False,
    offload_unused_experts_to_cpu=False,
)
ask("vector_quantize_pytorch:FSQ", [5, 3, 3, 3], run=first, exact=False)
ask("vector_quantize_pytorch:SimVQ", dim=4, codebook_size=8, run=first)
ask("egnn_pytorch:EGNN", 4, m_dim=4, init_eps=0.5, inputs=POINTS)
ask(
    "egnn_pytorch:EGNN",
    4,
    as_="EGNN, 2 neighbours",
    m_dim=4,
    init_eps=0.5,
    num_nearest_neighbors=2,
    inputs=POINTS,
    least=2,
)
ask("point_transformer_pytorch:PointTransformerLayer", dim=4, pos_mlp_hidden_dim=8, inputs=POINTS)
ask(
    "point_transformer_pytorch:PointTransformerLayer",
    as_="PointTransformerLayer, 2 neighbours",
    dim=4,
    pos_mlp_hidden_dim=8,
    num_neighbors=2,
    inputs=POINTS,
    least=3,
)
ask(
    "graph_transformer_pytorch:GraphTransformer",
    *(4, 1),
    edge_dim=1,
    with_feedforwards=True,
    inputs=GRAPH,
    run=lambda made, x, adjacency: made(x, adjacency[..., None])[0],
    **HEADS,
)
ask("torch_geometric.nn.dense:DenseGCNConv", 4, 3, inputs=GRAPH)
ask("torch_geometric.nn.dense:DenseGATConv", 4, 3, heads=2, inputs=GRAPH)
ask("torch_geometric.nn.dense:DenseSAGEConv", 4, 3, inputs=GRAPH)
ask("torch_geometric.nn.dense:DenseGINConv", nn.Linear(4, 3), inputs=GRAPH)
ask("torch_geometric.nn.dense:DMoNPooling", 4, 3, inputs=GRAPH, run=coarse)

# sounds ---------------------------------------------------------------------------------------------------------------


def time_first(made: Any, x: Tensor) -> Tensor:
    return made(x.transpose(0, 1), None).transpose(0, 1)


def speakers(made: Any, x: Tensor) -> Tensor:
    return made(x.transpose(1, 2)).movedim(0, 1)


def dual_path() -> nn.Module:
    intra, inter = (load("speechbrain.lobes.models.dual_path:SBRNNBlock")(4, 4, 1) for _ in range(2))
    return Of(speakers_of, made=load("speechbrain.lobes.models.dual_path:Dual_Path_Model")(4, 4, intra, inter, K=4))


def speakers_of(of: Any, x: Tensor) -> Tensor:
    return speakers(of.made, x)


ask(
    "torchaudio.models:ConvTasNet",
    inputs=WAVE,
    run=one_channel,
    enc_kernel_size=4,
    enc_num_feats=4,
    msk_num_feats=4,
    msk_num_hidden_feats=4,
    msk_num_layers=2,
    msk_num_stacks=1,
)
ask("torchaudio.models:DeepSpeech", 4, n_hidden=4, n_class=3, run=one_channel)
ask("torchaudio.models.conformer:ConformerLayer", 4, 8, 2, 3, run=time_first)
ask("torchaudio.models.tacotron2:_Postnet", 4, 4, 5, 2, as_="Tacotron2 postnet", run=channels_first)
ask(
    "torchaudio.models.rnnt:_TimeReduction",
    2,
    as_="RNN-T time reduction",
    least=2,
    run=lambda made, x: made(x, torch.full((x.shape[0],), x.shape[1]))[0],
)
ask(
    "speechbrain.lobes.models.ECAPA_TDNN:ECAPA_TDNN",
    4,
    least=5,
    channels=[4, 4, 4, 4, 6],
    kernel_sizes=[3, 3, 3, 3, 1],
    lin_neurons=3,
    attention_channels=4,
    res2net_scale=2,
    se_channels=4,
)
ask("speechbrain.lobes.models.ECAPA_TDNN:AttentiveStatisticsPooling", 4, 4, run=channels_first)
ask("speechbrain.nnet.RNN:QuasiRNN", 3, input_shape=[None, None, 4], bidirectional=True, run=first)
ask(
    "speechbrain.lobes.models.transformer.Conformer:ConformerEncoder",
    1,
    4,
    8,
    2,
    kernel_size=3,
    attention_type="regularMHA",
    run=first,
)
ask_as("speechbrain", "Dual_Path_Model", dual_path)
ask("encodec.modules:SEANetEncoder", 1, 4, 2, ratios=[2, 2], inputs=WAVE, run=one_channel)
ask("encodec.modules:SEANetDecoder", 1, 4, 2, ratios=[2, 2], run=channels_first, least=4)
ask("julius:LowPassFilter", 0.1, zeros=2, fft=False, inputs=WAVE)
ask("julius:ResampleFrac", 3, 2, zeros=2, inputs=WAVE)


# timm -----------------------------------------------------------------------------------------------------------------


def timm(name: str, as_: str, times: int, **options: Any) -> None:
    def build() -> nn.Module:
        return load("timm:create_model")(name, in_chans=4, num_classes=3, **options)

    ask_as("timm", as_, build, IMAGE, 1, times)


timm("convnext_atto", "ConvNeXt", 32, dims=(4, 8, 8, 8), depths=(1, 1, 1, 1))
timm("resnet10t", "ResNet", 8, stem_width=4, channels=(4, 8, 8, 8))
timm("mobilenetv3_small_050", "MobileNetV3", 8)
timm(
    "vit_tiny_patch16_224",
    "ViT, any size",
    4,
    dynamic_img_size=True,
    img_size=32,
    patch_size=4,
    embed_dim=8,
    depth=1,
    num_heads=2,
)
ask(
    "timm.models._efficientnet_blocks:InvertedResidual",
    4,
    4,
    as_="EfficientNet block, same padding",
    stride=2,
    pad_type="same",
    inputs=IMAGE,
    times=3,
)

# vit-pytorch ----------------------------------------------------------------------------------------------------------

STAGES = {f"s{n}_{what}": size for n in (1, 2, 3) for what, size in (("emb_dim", 4), ("depth", 1), ("heads", 1))}

ask("vit_pytorch.cvt:CvT", num_classes=3, channels=4, inputs=IMAGE, times=8, **STAGES)
ask("vit_pytorch.vit_1d:Transformer", 4, 1, 2, 2, 8)
ask("vit_pytorch.mobile_vit:MobileViTBlock", 4, 1, 4, 3, (2, 2), 8, inputs=IMAGE, times=2)
ask("vit_pytorch.max_vit:MBConv", 4, 4, downsample=True, inputs=IMAGE, times=2)
ask("vit_pytorch.vit_with_patch_merger:PatchMerger", 4, 3)

# others ---------------------------------------------------------------------------------------------------------------

PLANE = {"spatial_dims": 2, "in_channels": 4, "out_channels": 2}

ask("lambda_networks:LambdaLayer", 4, dim_k=2, r=3, heads=2, inputs=IMAGE)
ask("axial_attention:AxialAttention", 4, heads=2, dim_index=1, inputs=IMAGE)
ask("axial_attention:AxialImageTransformer", 4, 1, heads=2, reversible=False, inputs=IMAGE)
ask("monai.networks.nets:UNet", channels=(4, 8), strides=(2,), inputs=IMAGE, times=2, **PLANE)
ask("monai.networks.nets:BasicUNet", features=(4, 4, 4, 4, 4, 4), inputs=IMAGE, times=16, **PLANE)
ask("monai.networks.nets:SegResNet", init_filters=8, blocks_down=(1, 1), blocks_up=(1,), inputs=IMAGE, times=2, **PLANE)
ask("monai.networks.nets:DenseNet", init_features=4, growth_rate=2, block_config=(1, 1), inputs=IMAGE, times=8, **PLANE)
ask("kornia.filters:GaussianBlur2d", (3, 3), (1.0, 1.0), inputs=IMAGE, least=2)
ask("kornia.filters:Sobel", inputs=IMAGE, least=2)
ask("kornia.geometry.subpix:SpatialSoftArgmax2d", inputs=IMAGE, least=2)
