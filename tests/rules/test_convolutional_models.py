"""Convolutional models on padded batches, under windows("padding"), equal the loop over their samples without padding.

In float64, values and gradients of all parameters, for three amounts of padding. BatchNorm in training takes its
statistics from all valid positions: its loop is run on the samples' concatenation, one layer at a time.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masked_dispatch as md
from padded_speech_models import speech

CHANNELS = 3


class TemporalBlock(nn.Module):
    """Of a temporal convolutional network: causal, dilated, residual."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.before = 2 * dilation
        self.first = nn.Conv1d(channels, channels, 3, dilation=dilation)
        self.second = nn.Conv1d(channels, channels, 3, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(F.pad(x, (self.before, 0))))
        return F.relu(x + F.relu(self.second(F.pad(y, (self.before, 0)))))


class Unet(nn.Module):
    """Two levels, with skip connections; in one or two dimensions."""

    def __init__(self, n: int) -> None:
        super().__init__()
        conv, up = (nn.Conv1d, nn.Conv2d)[n - 1], (nn.ConvTranspose1d, nn.ConvTranspose2d)[n - 1]
        self.pool = (nn.MaxPool1d, nn.MaxPool2d)[n - 1](2)
        self.down = conv(CHANNELS, 4, 3, padding=1)
        self.bottom = conv(4, 6, 3, padding=1)
        self.up = up(6, 4, 2, stride=2)
        self.out = conv(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.gelu(self.down(x))
        return self.out(torch.cat([skip, self.up(F.gelu(self.bottom(self.pool(skip))))], 1))


class Residual(nn.Module):
    """A basic or a bottleneck block of a residual network, strided, then global average pooling."""

    def __init__(self, bottleneck: bool) -> None:
        super().__init__()
        kernels = (1, 3, 1) if bottleneck else (3, 3)
        self.stem = nn.Sequential(nn.Conv2d(CHANNELS, 4, 7, 2, 3, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        layers: list[nn.Module] = []
        for number, kernel in enumerate(kernels):
            stride = 2 if number == kernels.index(3) else 1
            layers += [nn.Conv2d(4, 4, kernel, stride, kernel // 2, bias=False), nn.GroupNorm(2, 4), nn.ReLU()]
        self.branch = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Conv2d(4, 4, 1, 2, bias=False)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.head(F.relu(self.branch(y) + self.shortcut(y)))


class ConvNext(nn.Module):
    """A patchifying stem and a ConvNeXt block: depthwise 7×7, LayerNorm over channels, an inverted bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(CHANNELS, 4, 2, stride=2)
        self.depthwise = nn.Conv2d(4, 4, 7, padding=3, groups=4)
        self.mix = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x + self.mix(self.depthwise(x).movedim(1, -1)).movedim(-1, 1)


class ConvLstm(nn.Module):
    """Convolutions over time, then an LSTM; its state after the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(CHANNELS, 4, 3, 2, 1), nn.ReLU(), nn.Conv1d(4, 4, 3, padding=1))
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.conv(x).movedim(1, 2))[1][0][0]


class AudioEncoder(nn.Module):
    """The front of a speech model: strided convolutions without padding, normalised over time, and convolved positions
    of which the last is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(CHANNELS, 4, 4, 2, bias=False), nn.GroupNorm(4, 4)
        self.second = nn.Conv1d(4, 4, 3, 2, bias=False)
        self.positions = nn.Conv1d(4, 4, 4, padding=2, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.second(F.gelu(self.norm(self.first(x)))))
        return x + F.gelu(self.positions(x)[..., :-1])


def conv1d_stack() -> nn.Module:
    return nn.Sequential(nn.Conv1d(CHANNELS, 4, 5, padding=2), nn.GELU(), nn.Conv1d(4, 4, 3, padding=1), nn.Tanh())


MODELS = {
    "Conv1d stack": (1, conv1d_stack),
    "Conv2d stack": (
        2,
        lambda: nn.Sequential(nn.Conv2d(CHANNELS, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding="same")),
    ),
    "strided": (
        1,
        lambda: nn.Sequential(nn.Conv1d(CHANNELS, 4, 3, 2, 1), nn.ReLU(), nn.Conv1d(4, 4, 4, 3, 1), nn.AvgPool1d(2, 1)),
    ),
    "dilated": (
        1,
        lambda: nn.Sequential(*[nn.Conv1d(CHANNELS, CHANNELS, 3, padding=d, dilation=d) for d in (1, 2, 4)]),
    ),
    "transposed": (
        2,
        lambda: nn.Sequential(
            nn.ConvTranspose2d(CHANNELS, 4, 3, 2, 1, 1), nn.ReLU(), nn.ConvTranspose2d(4, 2, 4, 2, 1)
        ),
    ),
    "TCN": (1, lambda: nn.Sequential(*[TemporalBlock(CHANNELS, d) for d in (1, 2, 4)])),
    "U-Net 1-D": (1, lambda: Unet(1)),
    "U-Net 2-D": (2, lambda: Unet(2)),
    "ResNet basic": (2, lambda: Residual(False)),
    "ResNet bottleneck": (2, lambda: Residual(True)),
    "ConvNeXt": (2, ConvNext),
    "CNN-LSTM": (1, ConvLstm),
    "audio encoder": (1, AudioEncoder),
}
LENGTHS = {1: [(16,), (12,), (20,)], 2: [(16, 12), (12, 20), (20, 16)]}


def batch_of(samples: list[Tensor], padding: int) -> md.MaskedTensor:
    """The samples padded at their ends to the largest size and `padding` more, with NaN under the mask."""
    spatial = samples[0].ndim - 1
    shape = [max(s.shape[d] for s in samples) + padding for d in range(1, spatial + 1)]
    data = samples[0].new_full((len(samples), CHANNELS, *shape), torch.nan)
    mask = torch.zeros(data.shape, dtype=torch.bool)
    for number, sample in enumerate(samples):
        box = (number, slice(None), *(slice(n) for n in sample.shape[1:]))
        data[box], mask[box] = sample, True
    return md.masked_tensor(data, mask)


@pytest.mark.parametrize("padding", [0, 2, 6])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_does_not_see_padding(name, padding):
    torch.manual_seed(0)
    spatial, make = MODELS[name]
    model = make().double()
    samples = [torch.randn(CHANNELS, *size, dtype=torch.float64) for size in LENGTHS[spatial]]
    with md.windows("padding"):
        out = model(batch_of(samples, padding))
    alone = [model(sample.unsqueeze(0)).squeeze(0) for sample in samples]
    for got, expected in zip(out.unbind(0), alone, strict=True):
        inside = tuple(slice(n) for n in expected.shape)
        assert got.count() == expected.numel()
        torch.testing.assert_close(got[inside].to_tensor(0), expected, rtol=1e-12, atol=1e-12)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(out.square().sum(), parameters)
    expected_gradients = torch.autograd.grad(sum(y.square().sum() for y in alone), parameters)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert type(gradient) is Tensor
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("padding", [0, 2, 6])
def test_batch_norm_in_training_sees_the_valid_positions(padding):
    torch.manual_seed(0)
    first, norm = nn.Conv1d(CHANNELS, 4, 3, 2, 1).double(), nn.BatchNorm1d(4).double()
    last = nn.Conv1d(4, 2, 3, padding=1).double()
    samples = [torch.randn(CHANNELS, n, dtype=torch.float64) for (n,) in LENGTHS[1]]
    with md.windows("padding"):
        out = last(norm(first(batch_of(samples, padding))))
    running = norm.running_mean.clone()
    norm.reset_running_stats()
    between = [first(sample) for sample in samples]
    together = norm(torch.cat(between, 1).unsqueeze(0)).squeeze(0)
    parts = together.split([t.shape[1] for t in between], 1)
    for got, part in zip(out.unbind(0), parts, strict=True):
        expected = last(part)
        assert got.count() == expected.numel()
        torch.testing.assert_close(got[:, : expected.shape[1]].to_tensor(0), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.running_mean, running)


@pytest.mark.parametrize("padding", [0, 7, 40])
@pytest.mark.parametrize("norm", ["layer", "group"])
def test_wav2vec2_from_raw_audio_does_not_see_padding(norm: str, padding: int) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    model = speech("Wav2Vec2", feat_extract_norm=norm).double().eval()
    samples = [torch.randn(n, dtype=torch.float64) for n in (400, 300, 223)]
    lengths = torch.tensor([len(s) for s in samples])
    data = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=torch.nan)
    data = F.pad(data, (0, padding), value=torch.nan)
    with md.windows("padding"):
        out = model(md.from_lengths(data, lengths))
    alone = [model(sample[None])[0] for sample in samples]
    for got, expected in zip(out.unbind(0), alone, strict=True):
        assert got.count() == expected.numel()
        torch.testing.assert_close(got[: len(expected)].to_tensor(0), expected, rtol=1e-12, atol=1e-12)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)
    wanted = torch.autograd.grad(sum(y.square().sum() for y in alone), parameters, allow_unused=True)
    for gradient, expected in zip(found, wanted, strict=True):
        assert (gradient is None) == (expected is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)
