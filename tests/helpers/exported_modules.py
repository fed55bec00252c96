"""Modules that are exported: what stands for masked tensors in a program, modules that store a padded batch sparsely
inside, and models of frames. Programs are compared with their modules, for other sizes, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masked_dispatch as md
from comparison import same

BATCH, LENGTH = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2)


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """What a program takes in place of a masked tensor; NaN where it is invalid."""
    return x.to_dense().to_tensor(torch.nan), x.get_mask()


def expected(y: Any) -> Any:
    """What a program returns in place of masked tensors."""
    return torch.utils._pytree.tree_map(lambda t: (t.to_tensor(0), t.get_mask()) if md.is_masked_tensor(t) else t, y)


# A padded batch that is stored sparsely -------------------------------------------------------------------------------


class StoredSparsely(nn.Module):
    """A padded batch that is stored sparsely inside of the module."""

    def __init__(self, stored: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.stored = nn.Linear(4, 3), stored

    def forward(self, data: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(self.stored(md.from_lengths(data, lengths)))
        return y.sum(1).to_tensor(0.0), y.to_tensor(7.0)


STORED = {
    "packed": lambda x: x.to_packed(),
    "COO": lambda x: x.to_sparse(),
    "hybrid": lambda x: x.to_sparse(2),
    "CSR": lambda x: x.to_layout(torch.sparse_csr),
    "BSR": lambda x: x.to_sparse_bsr((1, 1), dense_dim=1),
    "sparse_threshold": lambda x: md.sparse_threshold(x, 0.0),
    "sparse_topk": lambda x: md.sparse_topk(x, 2),
    "from packed": lambda x: x.to_packed().to_sparse(2),
}


def check_sparse_storage(name: str, strict: bool) -> None:
    """How much is stored is known when the program runs; its batch and its length may be others, too."""
    net = StoredSparsely(STORED[name])
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=2, max=64)}
    program = torch.export.export(
        net,
        (torch.randn(3, 5, 4), torch.tensor([2, 5, 1])),
        strict=strict,
        dynamic_shapes={"data": sizes, "lengths": {0: sizes[0]}},
    )
    plain = program.run_decompositions()
    assert not any("masked_dispatch" in str(node.target) for node in plain.graph.nodes)
    for form in (program, plain):
        for lengths in ([2, 5, 1], [0, 4, 6, 1]):
            data = torch.randn(len(lengths), max(lengths), 4)
            gradients = []
            for module in (net, form.module()):
                leaf = data.clone().requires_grad_()
                result = module(leaf, torch.tensor(lengths))
                gradients.append(torch.autograd.grad(sum(r.square().sum() for r in result), leaf)[0])
            same(form.module()(data, torch.tensor(lengths)), net(data, torch.tensor(lengths)))
            same(*gradients)


# Models that take frames (batch, length, 8), shorten them and move their dimensions, as encoders of speech do -------


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


MODELS_OF_FRAMES: dict[str, Callable[[], nn.Module]] = {
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
LEAST = dict.fromkeys(MODELS_OF_FRAMES, 3) | {"stride 3": 4, "two": 5, "images": 12}
LEAST |= dict.fromkeys(("residual", "batch norm", "averages", "norms", "attention"), 4)


def frames(kind: str, rows: int, length: int) -> md.MaskedTensor:
    data = torch.randn(rows, length, 8)
    padded = md.from_lengths(data, torch.arange(length, length - 2 * rows, -2))
    return padded if kind == "padded" else md.masked_tensor(data, torch.rand(data.shape) > 0.3)


def check_model_of_frames(name: str, kind: str) -> None:
    """md.export takes the lengths that torch.export takes of the plain model, and the program has eager's results."""
    torch.manual_seed(0)
    net, least = MODELS_OF_FRAMES[name]().eval(), LEAST[name]
    shapes = ({0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=least)},)
    torch.export.export(net, (torch.randn(3, 21, 8),), dynamic_shapes=shapes)
    program = md.export(net, (frames(kind, 3, 21),), dynamic_shapes=shapes).module()
    for rows, length in ((2, 30), (3, least + 12)):
        x = frames(kind, rows, length)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", md.EmptiedSampleWarning)
            wanted = net(x)
        found = program((x.get_data(), x.get_mask()))
        same(tuple(found)[:2], (wanted.to_tensor(0.0).detach(), wanted.get_mask()))
