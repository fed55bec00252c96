"""Models of other libraries, and how they are asked: small, random weights, unmodified, told nothing of padding.

At most five are of one library. A library that is not installed is not asked, and the page says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from padded_batches import Of, load, models_of

PAIR, GRAPH, POINTS = ("steps", "more steps"), ("steps", "graph"), ("steps", "points")
IMAGE, WAVE = ("image",), ("wave",)

# Sizes that several models share.
HEADS = {"heads": 2, "dim_head": 2}
SMALL = {"dim": 4, "depth": 1, "heads": 2, "attn_dim_head": 2}
STATES = {"hidden_size": 4, "use_cache": False}
ENCODER = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONVOLUTIONS = {"conv_dim": (8, 8, 8), "conv_kernel": (10, 3, 3), "conv_stride": (5, 2, 2)}
STAGES = {f"s{n}_{what}": size for n in (1, 2, 3) for what, size in (("emb_dim", 4), ("depth", 1), ("heads", 1))}
PLANE = {"spatial_dims": 2, "in_channels": 4, "out_channels": 2}

# Where a model is from | how it is made | how it is asked | its name: see `models_of`.
TABLE = """
transformers | speech("Wav2Vec2", feat_extract_norm="layer") | inputs=WAVE | Wav2Vec2
transformers | speech("Wav2Vec2") | inputs=WAVE | Wav2Vec2, group norm
transformers | speech("Hubert") | inputs=WAVE | HuBERT
transformers | speech("WavLM", num_buckets=8) | inputs=WAVE | WavLM
transformers | prenet() | inputs=("steps", "vector") | SpeechT5 decoder prenet
transformers | hugging("Bert", **ENCODER, **NO_DROPOUT) | | Bert
transformers | hugging("XLNet", d_model=4, n_layer=1, n_head=2, d_inner=8, dropout=0.0) | | XLNet
transformers | hugging("Perceiver", last_hidden, num_latents=3, d_latents=8, d_model=4, num_blocks=1,
    num_self_attends_per_block=1, num_self_attention_heads=2, num_cross_attention_heads=2,
    attention_probs_dropout_prob=0.0) | | Perceiver
transformers | hugging("Mamba", state_size=3, num_hidden_layers=1, conv_kernel=3, **STATES) | exact=False | Mamba
transformers | hugging("Rwkv", num_hidden_layers=2, attention_hidden_size=4, intermediate_size=8, **STATES)
    | exact=False | Rwkv
x_transformers | Encoder(rotary_pos_emb=True, **SMALL) | exact=False | Encoder, rotary
x_transformers | Decoder(attn_selective=True, rel_pos_bias=True, **SMALL) | exact=False | Decoder, selective, T5 bias
x_transformers | Decoder(alibi_pos_bias=True, shift_tokens=1, **SMALL) | exact=False | Decoder, ALiBi, shifted
x_transformers | CrossAttender(**SMALL) | inputs=PAIR, run=with_context, exact=False
x_transformers | with_memory_tokens() | exact=False | ContinuousTransformerWrapper, memory tokens
conformer | Conformer(4, depth=1, ff_mult=2, conv_kernel_size=3, **HEADS)
conformer | ConformerConvModule(4, causal=True, kernel_size=3) | | ConformerConvModule, causal
local_attention | LocalAttention(3, autopad=True, dim=4) | run=of_itself_turned, exact=False
local_attention.transformer | LocalMHA(dim=4, window_size=3, causal=True, **HEADS) | exact=False
linear_attention_transformer | LinearAttentionTransformer(4, 1, 16, heads=2)
linear_attention_transformer | LinearAttentionTransformer(4, 1, 16, heads=2, causal=True, shift_tokens=True)
    | | LinearAttentionTransformer, causal, shifted
performer_pytorch | SelfAttention(4, heads=2, dim_head=4, nb_features=6)
performer_pytorch | SelfAttention(4, heads=2, dim_head=4, nb_features=6, generalized_attention=True)
    | | SelfAttention, ReLU features
perceiver_pytorch | Perceiver(num_freq_bands=2, max_freq=4.0, input_channels=4, input_axis=1, num_classes=2, depth=1,
    num_latents=3, latent_dim=4, latent_heads=2, cross_dim_head=4, latent_dim_head=4)
perceiver_pytorch | PerceiverIO(depth=1, dim=4, queries_dim=4, num_latents=3, latent_dim=4, latent_heads=2,
    cross_dim_head=4, latent_dim_head=2) | inputs=PAIR, run=with_queries
nystrom_attention | NystromAttention(4, num_landmarks=2, residual_conv_kernel=3, **HEADS)
linformer | LinformerSelfAttention(4, 32, k=3, heads=2)
reformer_pytorch.reformer_pytorch | FullQKAttention(causal=True) | run=first_of_itself
bidirectional_cross_attention | BidirectionalCrossAttention(dim=4, **HEADS) | inputs=PAIR
entmax | Sparsemax(-2) | run=as_weights | weights by Sparsemax
entmax | Entmax15(-2) | run=as_weights | weights by Entmax15
minGRU_pytorch | minGRU(4) | least=2
minGRU_pytorch.minLSTM | minLSTM(4) | least=2
gateloop_transformer | SimpleGateLoopLayer(4, use_heinsen=True)
gateloop_transformer | SimpleGateLoopLayer(4, reverse=True) | | SimpleGateLoopLayer, reversed
torchcrf | CRF(4, batch_first=True) | run=likelihood
pytorch_tcn | TCN(4, [4, 4], kernel_size=2, dropout=0.0) | run=channels_first | TCN, causal
pytorch_tcn | TCN(4, [4, 4], kernel_size=3, dropout=0.0, causal=False, use_skip_connections=True)
    | run=channels_first | TCN, both ways
isab_pytorch | ISAB(dim=4, heads=2, num_latents=3)
slot_attention | SlotAttention(3, 4, hidden_dim=8) | run=without_noise
soft_moe_pytorch | SoftMoE(4, num_experts=2, num_slots=2, is_distributed=False, offload_unused_experts_to_cpu=False)
vector_quantize_pytorch | FSQ([5, 3, 3, 3]) | run=first, exact=False
vector_quantize_pytorch | SimVQ(dim=4, codebook_size=8) | run=first
egnn_pytorch | EGNN(4, m_dim=4, init_eps=0.5) | inputs=POINTS
egnn_pytorch | EGNN(4, m_dim=4, init_eps=0.5, num_nearest_neighbors=2) | inputs=POINTS, least=2 | EGNN, 2 neighbours
point_transformer_pytorch | PointTransformerLayer(dim=4, pos_mlp_hidden_dim=8) | inputs=POINTS
point_transformer_pytorch | PointTransformerLayer(dim=4, pos_mlp_hidden_dim=8, num_neighbors=2)
    | inputs=POINTS, least=3 | PointTransformerLayer, 2 neighbours
graph_transformer_pytorch | GraphTransformer(4, 1, edge_dim=1, with_feedforwards=True, **HEADS)
    | inputs=GRAPH, run=with_edges
torch_geometric.nn.dense | DenseGCNConv(4, 3) | inputs=GRAPH
torch_geometric.nn.dense | DenseGATConv(4, 3, heads=2) | inputs=GRAPH
torch_geometric.nn.dense | DenseSAGEConv(4, 3) | inputs=GRAPH
torch_geometric.nn.dense | DenseGINConv(nn.Linear(4, 3)) | inputs=GRAPH
torch_geometric.nn.dense | DMoNPooling(4, 3) | inputs=GRAPH, run=coarse
torchaudio.models | ConvTasNet(enc_kernel_size=4, enc_num_feats=4, msk_num_feats=4, msk_num_hidden_feats=4,
    msk_num_layers=2, msk_num_stacks=1) | inputs=WAVE, run=one_channel
torchaudio.models | DeepSpeech(4, n_hidden=4, n_class=3) | run=one_channel
torchaudio.models.conformer | ConformerLayer(4, 8, 2, 3) | run=time_first
torchaudio.models.tacotron2 | _Postnet(4, 4, 5, 2) | run=channels_first | Tacotron2 postnet
torchaudio.models.rnnt | _TimeReduction(2) | run=with_full_lengths, least=2 | RNN-T time reduction
speechbrain.lobes.models.ECAPA_TDNN | ECAPA_TDNN(4, channels=[4, 4, 4, 4, 6], kernel_sizes=[3, 3, 3, 3, 1],
    lin_neurons=3, attention_channels=4, res2net_scale=2, se_channels=4) | least=5
speechbrain.lobes.models.ECAPA_TDNN | AttentiveStatisticsPooling(4, 4) | run=channels_first
speechbrain.nnet.RNN | QuasiRNN(3, input_shape=[None, None, 4], bidirectional=True) | run=first
speechbrain.lobes.models.transformer.Conformer
    | ConformerEncoder(1, 4, 8, 2, kernel_size=3, attention_type="regularMHA") | run=first
speechbrain | dual_path() | run=speakers | Dual_Path_Model
encodec.modules | SEANetEncoder(1, 4, 2, ratios=[2, 2]) | inputs=WAVE, run=one_channel
encodec.modules | SEANetDecoder(1, 4, 2, ratios=[2, 2]) | run=channels_first, least=4
julius | LowPassFilter(0.1, zeros=2, fft=False) | inputs=WAVE
julius | ResampleFrac(3, 2, zeros=2) | inputs=WAVE
timm | create_model("convnext_atto", in_chans=4, num_classes=3, dims=(4, 8, 8, 8), depths=(1, 1, 1, 1))
    | inputs=IMAGE, times=32 | ConvNeXt
timm | create_model("resnet10t", in_chans=4, num_classes=3, stem_width=4, channels=(4, 8, 8, 8))
    | inputs=IMAGE, times=8 | ResNet
timm | create_model("mobilenetv3_small_050", in_chans=4, num_classes=3) | inputs=IMAGE, times=8 | MobileNetV3
timm | create_model("vit_tiny_patch16_224", in_chans=4, num_classes=3, dynamic_img_size=True, img_size=32, patch_size=4,
    embed_dim=8, depth=1, num_heads=2) | inputs=IMAGE, times=4 | ViT, any size
timm.models._efficientnet_blocks | InvertedResidual(4, 4, stride=2, pad_type="same")
    | inputs=IMAGE, times=3 | EfficientNet block, same padding
vit_pytorch.cvt | CvT(num_classes=3, channels=4, **STAGES) | inputs=IMAGE, times=8
vit_pytorch.vit_1d | Transformer(4, 1, 2, 2, 8)
vit_pytorch.mobile_vit | MobileViTBlock(4, 1, 4, 3, (2, 2), 8) | inputs=IMAGE, times=2
vit_pytorch.max_vit | MBConv(4, 4, downsample=True) | inputs=IMAGE, times=2
vit_pytorch.vit_with_patch_merger | PatchMerger(4, 3)
product_key_memory | PKM(4, heads=2, num_keys=4, topk=2, dim_head=4)
lambda_networks | LambdaLayer(4, dim_k=2, r=3, heads=2) | inputs=IMAGE
axial_attention | AxialAttention(4, heads=2, dim_index=1) | inputs=IMAGE
axial_attention | AxialImageTransformer(4, 1, heads=2, reversible=False) | inputs=IMAGE
monai.networks.nets | UNet(channels=(4, 8), strides=(2,), **PLANE) | inputs=IMAGE, times=2
monai.networks.nets | BasicUNet(features=(4, 4, 4, 4, 4, 4), **PLANE) | inputs=IMAGE, times=16
monai.networks.nets | SegResNet(init_filters=8, blocks_down=(1, 1), blocks_up=(1,), **PLANE) | inputs=IMAGE, times=2
monai.networks.nets | DenseNet(init_features=4, growth_rate=2, block_config=(1, 1), **PLANE) | inputs=IMAGE, times=8
kornia.filters | GaussianBlur2d((3, 3), (1.0, 1.0)) | inputs=IMAGE, least=2
kornia.filters | Sobel() | inputs=IMAGE, least=2
kornia.geometry.subpix | SpatialSoftArgmax2d() | inputs=IMAGE, least=2
"""

# What is done with a module and its inputs ----------------------------------------------------------------------------


def channels_first(made: nn.Module, x: Tensor) -> Tensor:
    """What a module that takes channels before positions makes of steps."""
    return made(x.transpose(1, 2))


def one_channel(made: nn.Module, x: Tensor) -> Tensor:
    """What a module that takes channels makes of waves, or of one picture of features."""
    return made(x[:, None])


def time_first(made: Any, x: Tensor) -> Tensor:
    return made(x.transpose(0, 1), None).transpose(0, 1)


def first(made: nn.Module, *inputs: Tensor) -> Tensor:
    """The first result of several."""
    return made(*inputs)[0]


def first_of_itself(made: nn.Module, x: Tensor) -> Tensor:
    return made(x, x)[0]


def of_itself_turned(made: nn.Module, x: Tensor) -> Tensor:
    return made(x, x.flip(-1), x)


def as_weights(made: nn.Module, x: Tensor) -> Tensor:
    return made(x) * x


def with_context(made: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return made(x, context=y)


def with_queries(made: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return made(x, queries=y)


def with_edges(made: nn.Module, x: Tensor, adjacency: Tensor) -> Tensor:
    return made(x, adjacency[..., None])[0]


def coarse(made: Any, x: Tensor, adjacency: Tensor) -> Tensor:
    """Assignments, features and adjacency of clusters; not the losses, which mix graphs."""
    return made(x, adjacency)[:3]


def with_full_lengths(made: nn.Module, x: Tensor) -> Tensor:
    return made(x, torch.full((x.shape[0],), x.shape[1]))[0]


def likelihood(made: Any, x: Tensor) -> Tensor:
    return made(x, torch.zeros(x.shape[:2], dtype=torch.long), reduction="none")


def without_noise(made: Any, x: Tensor) -> Tensor:
    """Slots that start at their mean."""
    with torch.no_grad():
        made.slots_logsigma.fill_(-torch.inf)
    return made(x)


def speakers(made: Any, x: Tensor) -> Tensor:
    return made(x.transpose(1, 2)).movedim(0, 1)


def embedded(model: Any, x: Tensor) -> Tensor:
    return model(inputs_embeds=x)[0]


def last_hidden(model: Any, x: Tensor) -> Tensor:
    return model(x).last_hidden_state


# Modules that one call does not make ----------------------------------------------------------------------------------


def hugging(name: str, run: Callable[[Any, Tensor], Tensor] = embedded, **options: Any) -> nn.Module:
    """A model of transformers with random weights, which takes embeddings if `run` isn't given."""
    options = {"attn_implementation": "eager", "vocab_size": 5} | options
    model = load(f"transformers:{name}Model")(load(f"transformers:{name}Config")(**options))
    return Of(lambda of, x: run(of.model, x), model=model)


def speech(name: str, **options: Any) -> nn.Module:
    """A small model of transformers that reads waves."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    layers = {"num_feat_extract_layers": 3, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    return hugging(name, last_hidden, **sizes, **CONVOLUTIONS, **layers, **options)


def prenet() -> nn.Module:
    """What SpeechT5 does before its decoder: a speaker's vector is joined to every step."""
    from transformers.models.speecht5.modeling_speecht5 import SpeechT5Config, SpeechT5SpeechDecoderPrenet

    config = SpeechT5Config(
        hidden_size=8, num_mel_bins=4, speech_decoder_prenet_units=8, speaker_embedding_dim=4, max_speech_positions=16
    )
    layer = SpeechT5SpeechDecoderPrenet(config)
    layer._consistent_dropout = lambda x, p: x  # it drops in eval(), too
    return Of(lambda m, x, speaker: m.layer(x, speaker_embeddings=speaker), layer=layer)


def with_memory_tokens() -> nn.Module:
    return load("x_transformers:ContinuousTransformerWrapper")(
        dim_in=4, dim_out=2, max_seq_len=16, num_memory_tokens=2, attn_layers=load("x_transformers:Encoder")(**SMALL)
    )


def dual_path() -> nn.Module:
    intra, inter = (load("speechbrain.lobes.models.dual_path:SBRNNBlock")(4, 4, 1) for _ in range(2))
    return load("speechbrain.lobes.models.dual_path:Dual_Path_Model")(4, 4, intra, inter, K=4)


MODELS = models_of(TABLE, globals())
