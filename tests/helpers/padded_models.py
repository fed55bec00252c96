"""Models that are asked whether a padded batch gives what its samples give: torch's own, and ones written by hand.

`python tests/helpers/padded_models.py` writes the page of these and of those of libraries.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import padded_library_models
from padded_batches import SIDES, WIDTH, Model, models_of, verdict


def channels_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


# ---------------------------------------------------------------------------------------------------------- by hand


def chomped(m: Any, x: Tensor) -> Tensor:
    x = channels_first(x)
    for dilation, layer in zip((1, 2), (m.first, m.second), strict=True):
        x = x + layer(x)[..., : -2 * dilation].tanh()
    return x.mean(2)


def attentive_statistics(m: Any, x: Tensor) -> Tensor:
    x = channels_first(x)
    mean, deviation = x.mean(2, keepdim=True), x.var(2, keepdim=True, correction=0).clamp(1e-9).sqrt()
    joined = torch.cat([x, mean.expand_as(x), deviation.expand_as(x)], 1)
    weights = m.out(m.hidden(joined).tanh()).softmax(2)
    mean = (weights * x).sum(2)
    return torch.cat([mean, (weights * x * x).sum(2) - mean * mean], 1)


def points(m: Any, x: Tensor) -> Tensor:
    h = m.first(x).relu()
    overall = h.amax(1, keepdim=True).expand_as(h)
    return m.second(torch.cat([h, overall], -1)).amax(1)


def edges(m: Any, x: Tensor) -> Tensor:
    n = x.shape[1]
    pairs = torch.cat([x[:, :, None].expand(-1, -1, n, -1), x[:, None].expand(-1, n, -1, -1)], -1)
    return x + m.message(pairs).relu().sum(2)


def relations(m: Any, x: Tensor) -> Tensor:
    n = x.shape[1]
    pairs = torch.cat([x[:, :, None].expand(-1, -1, n, -1), x[:, None].expand(-1, n, -1, -1)], -1)
    return m.out(m.pair(pairs).tanh().mean((1, 2)))


def unet(m: Any, x: Tensor) -> Tensor:
    first = m.down(channels_first(x)).tanh()
    low = m.low(F.max_pool1d(first, 2, ceil_mode=True)).tanh()
    up = m.up(low)[..., : first.shape[2]]
    return m.out(torch.cat([up, first], 1))


def unet_2d(m: Any, x: Tensor) -> Tensor:
    first = m.down(x).tanh()
    low = m.low(F.max_pool2d(first, 2, ceil_mode=True)).tanh()
    up = m.up(low)[..., : first.shape[2], : first.shape[3]]
    return m.out(torch.cat([up, first], 1))


def convnext(m: Any, x: Tensor) -> Tensor:
    h = m.depthwise(x).permute(0, 2, 3, 1)
    return x + m.back(F.gelu(m.wide(m.norm(h)))).permute(0, 3, 1, 2)


def conformer(m: Any, x: Tensor) -> Tensor:
    x = x + 0.5 * m.feed(x)
    h = m.norm(x)
    x = x + m.attention(h, h, h, need_weights=False)[0]
    h = F.glu(m.wide(channels_first(x)), 1)
    return m.last(x + channels_first(m.back(F.silu(m.batch_norm(m.depthwise(h))))))


def pointer(m: Any, x: Tensor, query: Tensor) -> Tensor:
    scores = m.score((m.keys(x) + m.query(query)[:, None]).tanh()).squeeze(-1)
    return scores.log_softmax(1)


def both_ways(m: Any, x: Tensor, y: Tensor) -> Tensor:
    scores = x @ y.transpose(1, 2)
    to_y = scores.softmax(2) @ y
    to_x = scores.amax(2).softmax(1)[:, None] @ x
    return m.out(torch.cat([x, to_y, x * to_y, x * to_x.expand_as(x)], -1))


def cnn_lstm(m: Any, x: Tensor) -> Tensor:
    h = channels_first(m.conv(channels_first(x)).relu())
    out, _ = m.lstm(h)
    return m.head(out.mean(1))


def squeeze_excitation(m: Any, x: Tensor) -> Tensor:
    x = channels_first(x)
    return m.conv(x * m.gate(x.mean(2)).sigmoid().unsqueeze(2))


def recurrence(m: Any, x: Tensor) -> Tensor:
    state, states = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype), []
    for t in range(x.shape[1]):
        state = (m.cell(x[:, t]) + m.carry(state)).tanh()
        states.append(state)
    return torch.stack(states, 1).mean(1)


def bahdanau(m: Any, x: Tensor, query: Tensor) -> Tensor:
    joined = torch.cat([x, query[:, None].expand(-1, x.shape[1], -1)], -1)
    return (m.score(m.hidden(joined).tanh()).softmax(1) * x).sum(1)


def zero_padded(m: Any, x: Tensor) -> Tensor:
    return m.conv(F.pad(channels_first(x), (1, 1))).mean(2)


def same_padded(m: Any, x: Tensor) -> Tensor:
    return m.second(m.first(channels_first(x))[..., :-1].tanh()).mean(2)


def upsampled(m: Any, x: Tensor) -> Tensor:
    return m.conv(F.interpolate(channels_first(x), scale_factor=2.0, mode="linear"))


def transposed(m: Any, x: Tensor) -> Tensor:
    return m.conv(channels_first(x))[..., 1:-1]


def patches(m: Any, x: Tensor) -> Tensor:
    tokens = m.patch(x).flatten(2).transpose(1, 2)
    return tokens + m.attention(tokens, tokens, tokens, need_weights=False)[0]


def with_class_token(m: Any, x: Tensor) -> Tensor:
    token = torch.ones(x.shape[0], 1, WIDTH, dtype=x.dtype)
    joined = torch.cat([token, x], 1)
    return m.layer(joined)[:, 0]


def registers(m: Any, x: Tensor) -> Tensor:
    extra = torch.full((x.shape[0], 2, WIDTH), 0.2, dtype=x.dtype)
    return m.layer(torch.cat([x, extra], 1))[:, :-2]


def differences(m: Any, x: Tensor) -> Tensor:
    return m.out((x[:, 1:] - x[:, :-1]).abs())


def both_directions(m: Any, x: Tensor) -> Tensor:
    return torch.cat([m.forth(x)[0], m.back(x.flip(1))[0].flip(1)], -1)


def joint_attention(m: Any, x: Tensor, y: Tensor) -> Tensor:
    joined = torch.cat([x, y], 1)
    return m.layer(joined)[:, x.shape[1] :]


def speaker(m: Any, x: Tensor) -> Tensor:
    vector = torch.full((3,), 0.5, dtype=x.dtype).expand(x.shape[0], x.shape[1], 3)
    return m.layer(m.join(torch.cat([x, vector], -1)))


def mixture(m: Any, x: Tensor) -> Tensor:
    gates = m.gate(x).softmax(-1)
    return sum(gates[..., n, None] * expert(x) for n, expert in enumerate((m.one, m.two)))


def heads_by_hand(m: Any, x: Tensor) -> Tensor:
    b, t, _ = x.shape
    q, k, v = (layer(x).view(b, t, 2, 2).transpose(1, 2) for layer in (m.q, m.k, m.v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(2)
    return m.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, WIDTH))


# The layers that several have, with the width of a step.


def conv(i: int, o: int, k: int, **options: Any) -> nn.Conv1d:
    return nn.Conv1d(i, o, k, **options)


def conv2d(i: int, o: int, k: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(i, o, k, **options)


def linear(i: int = WIDTH, o: int = WIDTH) -> nn.Linear:
    return nn.Linear(i, o)


def recurrent(kind: type[nn.RNNBase], **options: Any) -> nn.RNNBase:
    return kind(WIDTH, 3, batch_first=True, **options)


def attention() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(WIDTH, 2, batch_first=True)


def encoder(layers: int, **options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(encoder_layer(**options), layers, enable_nested_tensor=False)


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True, **options)


def decoder() -> nn.TransformerDecoder:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True), 1)


PAIR, IMAGE, QUERY = ("steps", "more steps"), ("image",), ("steps", "vector")

# First torch's own, then those that are written by hand.
TABLE = """
torch | encoder(2) | | TransformerEncoder
torch | encoder(1, norm_first=True) | | TransformerEncoder, norm first
torch | decoder() | inputs=PAIR | TransformerDecoder
torch | Of(lambda m, x: m.a(x, x, x, need_weights=False)[0], a=attention()) | | self-attention
torch | Of(lambda m, x: m.a(x, x, x)[1], a=attention()) | | attention weights
torch | Of(lambda m, x, y: m.a(x, y, y)[0], a=attention()) | inputs=PAIR | cross-attention
torch | Of(lambda m, x: m.r(x)[0], r=recurrent(nn.LSTM)) | | LSTM
torch | Of(lambda m, x: m.r(x)[1][0][0], r=recurrent(nn.LSTM)) | | LSTM, last state
torch | Of(lambda m, x: m.r(x)[0], r=recurrent(nn.GRU)) | | GRU
torch | Of(lambda m, x: m.r(x)[0], r=recurrent(nn.LSTM, bidirectional=True)) | | LSTM, both ways
torch | nn.Sequential(conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True),
    conv2d(4, 2, 1)) | inputs=IMAGE | Conv2d, BatchNorm2d, MaxPool2d
torch | Of(lambda m, x: m.n(channels_first(x)), n=nn.GroupNorm(2, 4)) | | GroupNorm
torch | Of(lambda m, x: m.n(channels_first(x)), n=nn.InstanceNorm1d(4, affine=True)) | least=2 | InstanceNorm1d
torch | Of(lambda m, x: m.p(channels_first(x)), p=nn.AdaptiveAvgPool1d(2)) | | AdaptiveAvgPool1d
torch | Of(chomped, first=conv(4, 4, 3, padding=2), second=conv(4, 4, 3, padding=4, dilation=2)) | | TCN with chomp
torch | Of(lambda m, x: torch.cat([x.mean(1), x.var(1, correction=0)], -1)) | | mean and deviation
torch | Of(attentive_statistics, hidden=conv(12, 4, 1), out=conv(4, 4, 1)) | | attentive statistics
torch | Of(points, first=linear(), second=linear(8)) | | point cloud
torch | Of(edges, message=linear(8)) | | edge network
torch | Of(relations, pair=linear(8), out=linear(4, 2)) | | relation network
torch | Of(unet, down=conv(4, 4, 3, padding=1), low=conv(4, 4, 3, padding=1), up=nn.ConvTranspose1d(4, 4, 2, stride=2),
    out=conv(8, 4, 3, padding=1)) | | U-Net, 1-D
torch | Of(unet_2d, down=conv2d(4, 4, 3, padding=1), low=conv2d(4, 4, 3, padding=1),
    up=nn.ConvTranspose2d(4, 4, 2, stride=2), out=conv2d(8, 4, 3, padding=1)) | inputs=IMAGE | U-Net, 2-D
torch | Of(convnext, depthwise=conv2d(4, 4, 7, padding=3, groups=4), norm=nn.LayerNorm(4), wide=linear(4, 8),
    back=linear(8)) | inputs=IMAGE | ConvNeXt block
torch | Of(conformer, feed=nn.Sequential(nn.LayerNorm(4), linear(4, 8), nn.SiLU(), linear(8)), norm=nn.LayerNorm(4),
    attention=attention(), wide=conv(4, 8, 1), depthwise=conv(4, 4, 3, padding=1, groups=4),
    batch_norm=nn.BatchNorm1d(4), back=conv(4, 4, 1), last=nn.LayerNorm(4)) | | Conformer block
torch | Of(pointer, keys=linear(), query=linear(), score=linear(4, 1)) | inputs=QUERY | pointer network
torch | Of(both_ways, out=linear(16)) | inputs=PAIR | two-way attention
torch | Of(cnn_lstm, conv=conv(4, 4, 3, padding=1), lstm=recurrent(nn.LSTM), head=linear(3, 2)) | | CNN, LSTM
torch | Of(squeeze_excitation, gate=linear(), conv=conv(4, 4, 3, padding=1)) | | squeeze and excitation
torch | Of(recurrence, cell=linear(), carry=linear()) | | recurrence by hand
torch | Of(bahdanau, hidden=linear(8), score=linear(4, 1)) | inputs=QUERY | additive attention
torch | Of(zero_padded, conv=conv(4, 4, 3)) | | ZeroPad1d
torch | Of(same_padded, first=conv(4, 4, 4, padding=2), second=conv(4, 4, 3, padding=1)) | | SamePad
torch | Of(upsampled, conv=conv(4, 4, 3, padding=1)) | | interpolated
torch | Of(transposed, conv=nn.ConvTranspose1d(4, 4, 4, stride=2)) | | transposed, trimmed
torch | Of(patches, patch=conv2d(4, 4, 3, stride=2, padding=1), attention=attention())
    | inputs=IMAGE | patches of images
torch | Of(with_class_token, layer=encoder_layer()) | | class token
torch | Of(registers, layer=encoder_layer()) | | registers
torch | Of(differences, out=linear(4, 2)) | least=2 | differences
torch | Of(both_directions, forth=recurrent(nn.GRU), back=recurrent(nn.GRU)) | | two directions
torch | Of(joint_attention, layer=encoder_layer()) | inputs=PAIR | joint attention
torch | Of(speaker, join=linear(7), layer=encoder_layer()) | | speaker vector
torch | Of(mixture, gate=linear(4, 2), one=linear(), two=linear()) | | mixture of experts
torch | Of(heads_by_hand, q=linear(), k=linear(), v=linear(), out=linear()) | | heads by hand
"""
MODELS = models_of(TABLE, globals()) + padded_library_models.MODELS


# ------------------------------------------------------------------------------------------------------------ the page

PAGE = """# A padded batch is its samples: by model

Written by `python tests/helpers/padded_models.py > docs/results/padded-models.md`. For each model, three batches: the
results, the gradients of the inputs and the gradients of the parameters of a batch are compared with those of a loop
over its samples. No model is told what is padding, and the code of libraries is unmodified. The outcomes are:

- *right*: no element differs by more than 1e-9 (by more than 1e-4 in models that compute in float32 whatever they are
  given), and none is missing.
- *refused*: an error says that the call is refused, and why.
- *warned*: the result is another, and a warning names the line.
- *audit*: the result is another, and `masked_dispatch.audit()` names the line, with this kind of finding.

| library | model | padded behind | padded in front | on both sides |
|---|---|---|---|---|
"""


def cell(model: Model, side: str) -> str:
    """The outcome and the first clause of what was said."""
    said = re.sub(r" of a tensor of shape \([^)]*\)| \(\w+\)(?=: )", "", model.missing or verdict(model, side))
    return re.split(r" \(|[.;] |, where|: which", said)[0]


def row_of_table(model: Model) -> str:
    return f"| {' | '.join([model.version, model.name, *(cell(model, side) for side in SIDES)])} |"


if __name__ == "__main__":
    words = sys.argv[1:]  # of libraries or models, to ask these alone
    print(PAGE, end="")
    for model in MODELS:
        if not words or any(word in f"{model.library} {model.name}" for word in words):
            print(row_of_table(model), flush=True)
