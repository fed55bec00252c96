"""Models that take frames (batch, length, 8), shorten them and move their dimensions, as encoders of speech do; and
that md.export takes each length of them for which torch.export takes the plain model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masked_dispatch as md
from compiled_regions import same


class OfFrames(nn.Module):
    """A function of frames and of modules."""

    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts)


def conv(stride: int, **options: int) -> nn.Module:
    return nn.Conv1d(8, 8, 3, stride=stride, padding=1, **options)


def head() -> nn.Module:
    return nn.Linear(8, 4)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "stride 2": lambda: OfFrames(lambda x, c, h: h(c(x.mT).mT), conv(2), head()),
    "stride 3": lambda: OfFrames(lambda x, c, h: h(c(x.mT).mT), conv(3), head()),
    "two": lambda: OfFrames(lambda x, c, d, h: h(d(c(x.mT)).mT), conv(2), conv(2), head()),
    "GELU": lambda: OfFrames(
        lambda x, c, d, n, h: h(n(F.gelu(d(F.gelu(c(x.mT)))).permute(0, 2, 1))),
        conv(1),
        conv(2),
        nn.LayerNorm(8),
        head(),
    ),
    "residual": lambda: OfFrames(lambda x, c, h: h(c(x.mT).mT + x[:, ::2]), conv(2), head()),
    "by channel": lambda: OfFrames(lambda x, c, d, h: h(d(c(x.mT)).mT), conv(2, groups=8), nn.Conv1d(8, 8, 1), head()),
    "batch norm": lambda: OfFrames(lambda x, c, n, h: h(n(c(x.mT)).mT), conv(2), nn.BatchNorm1d(8), head()),
    "images": lambda: OfFrames(
        lambda x, c, d, h: h(F.relu(d(F.relu(c(x.unsqueeze(1))))).transpose(1, 2).flatten(2)),
        *(nn.Conv2d(1, 4, 3, 2), nn.Conv2d(4, 4, 3, 2), nn.Linear(4, 4)),
    ),
    "averages": lambda: OfFrames(lambda x, p, h: h(p(x.mT).mT), nn.AvgPool1d(2), head()),
    "norms": lambda: OfFrames(lambda x, p, h: h(p(x.mT).mT), nn.LPPool1d(2, 2), head()),
    "mean over time": lambda: OfFrames(lambda x, c, h: h(c(x.mT).mT).mean(1), conv(2), head()),
    "time first": lambda: OfFrames(lambda x, c, h: h(c(x.mT).permute(2, 0, 1)), conv(2), head()),
    "attention": lambda: OfFrames(
        lambda x, c, e: e(c(x.mT).mT), conv(2), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    ),
}

# From which length on torch.export takes the plain model.
LEAST = {
    "stride 2": 3,
    "stride 3": 4,
    "two": 5,
    "GELU": 3,
    "residual": 4,
    "by channel": 3,
    "batch norm": 4,
    "images": 12,
    "averages": 4,
    "norms": 4,
    "mean over time": 3,
    "time first": 3,
    "attention": 4,
}


def batch(kind: str, rows: int, length: int) -> md.MaskedTensor:
    data = torch.randn(rows, length, 8)
    padded = md.from_lengths(data, torch.arange(length, length - 2 * rows, -2))
    return padded if kind == "padded" else md.masked_tensor(data, torch.rand(data.shape) > 0.3)


def check_export(name: str, kind: str) -> None:
    """md.export takes the lengths that torch.export takes of the plain model, and the program has eager's results."""
    torch.manual_seed(0)
    net, least = MODELS[name]().eval(), LEAST[name]
    shapes = ({0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=least)},)
    torch.export.export(net, (torch.randn(3, 21, 8),), dynamic_shapes=shapes)
    program = md.export(net, (batch(kind, 3, 21),), dynamic_shapes=shapes).module()
    for rows, length in ((2, 30), (3, least + 12)):
        x = batch(kind, rows, length)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", md.EmptiedSampleWarning)
            wanted = net(x)
        found = program((x.get_data(), x.get_mask()))
        same(tuple(found)[:2], (wanted.to_tensor(0.0).detach(), wanted.get_mask()))
