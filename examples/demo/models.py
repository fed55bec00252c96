"""Two ordinary models. Neither knows of masks: they run on plain and on masked tensors alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Forecaster(nn.Module):
    """A small Transformer: [batch, length] → [batch, horizon], forecast as a difference from the window's mean."""

    def __init__(self, length: int = 52, horizon: int = 13, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, horizon)

    def forward(self, past: Tensor) -> Tensor:
        level = past.mean(1, keepdim=True)
        weeks = self.embed((past - level).unsqueeze(-1)) + self.position
        return level + self.head(self.encoder(weeks).mean(1))


class Autoencoder(nn.Sequential):
    """A small convolutional autoencoder: [batch, 1, 8, 8] → [batch, 1, 8, 8] through `code` numbers."""

    def __init__(self, code: int = 24, channels: int = 16) -> None:
        super().__init__(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * channels * 16, code),
            nn.Linear(code, 2 * channels * 16),
            nn.ReLU(),
            nn.Unflatten(1, (2 * channels, 4, 4)),
            nn.ConvTranspose2d(2 * channels, channels, 2, stride=2),
            nn.ReLU(),
            nn.Conv2d(channels, 1, 3, padding=1),
        )
