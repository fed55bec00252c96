"""Small models of transformers that read waves or make speech, as padded_models.py takes them."""

from __future__ import annotations

from typing import Any

from torch import nn

from padded_batches import Of


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
