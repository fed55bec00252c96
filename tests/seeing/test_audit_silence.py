"""A right training step is silent in an audit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import masked_dispatch as md
from audited_calls import IN_EXTENT, LABELS, batch


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.head = nn.LSTM(8, 6, batch_first=True, bidirectional=True), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, _) = self.steps(x)
        return self.head(torch.cat([h[0], h[1]], -1))


class Chomp(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[..., : -self.size]


class Convolutional(nn.Module):
    """Causal convolutions, as temporal convolutional networks have them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(8, 8, 3, padding=2 * d, dilation=d), Chomp(2 * d), nn.ReLU()) for d in (1, 2)
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.transpose(1, 2)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h.mean(-1))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class CutAtSizes(Convolutional):
    """Causal convolutions that are cut at the size of their input; what stays too long meets the input again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv1d(8, 8, 3, padding=2 * d, dilation=d) for d in (1, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = x.transpose(1, 2)
        for block in self.blocks:
            h = h + block(h)[..., : h.size(-1)].relu()
        return self.head(h.mean(-1))


class Attention(nn.Module):
    """Attention by hand, as many code bases have it, with positions and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.out, self.positions = nn.Linear(8, 24), nn.Linear(8, 2), nn.Embedding(9, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        x = x + self.positions(torch.arange(t, device=x.device)[None])
        q, k, v = self.queries(x).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (d // 2) ** 0.5
        causal = torch.ones(t, t, device=x.device).tril() == 0
        attention = F.dropout(scores.masked_fill(causal[None, None], float("-inf")).softmax(-1), 0.1)
        return self.out((attention @ v).transpose(1, 2).reshape(b, t, d)).mean(1)


class Conformer(nn.Module):
    """A block of a Conformer: half a step of a feed-forward layer, attention, a gated convolution, and half a step."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.SiLU(), nn.Dropout(0.1), nn.Linear(16, 8)) for _ in "12"
        )
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, 0.1, batch_first=True)
        self.gate = nn.Sequential(nn.Conv1d(8, 16, 1), nn.GLU(1), nn.Conv1d(8, 8, 3, padding="same", groups=8))
        self.convolved = nn.Sequential(nn.BatchNorm1d(8), nn.SiLU(), nn.Conv1d(8, 8, 1))
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.before(x)
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        x = x + self.convolved(self.gate(x.mT)).mT
        return self.head(x + 0.5 * self.after(x)).mean(1)


class UNet(nn.Module):
    """Half as many positions and again as many, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.pool = nn.Conv1d(8, 4, 3, padding=1), nn.MaxPool1d(2, ceil_mode=True)
        self.middle, self.up = nn.Conv1d(4, 4, 3, padding=1), nn.ConvTranspose1d(4, 4, 2, stride=2)
        self.out = nn.Conv1d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x.mT).relu()
        up = self.up(self.middle(self.pool(skip)).relu())
        return self.out(torch.cat([skip, up[..., : skip.shape[-1]]], 1)).mean(-1)


class Last(Recurrent):
    """Wrong: it takes the last step of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.steps(x)[0][:, -1])


def step(model: nn.Module, x: Tensor) -> md.Audit:
    optimizer = torch.optim.AdamW(model.parameters())
    with md.audit() as report:
        F.cross_entropy(model(x), LABELS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return report


@pytest.mark.parametrize("model", [Attending, Attention, Recurrent, Convolutional, CutAtSizes, Conformer, UNet])
def test_a_right_training_step_is_silent(model: Callable[[], nn.Module]) -> None:
    report = step(model(), batch(8))
    assert not report
    assert str(report) == f"audit: nothing found in {report._calls} calls"
    assert report._calls > 10


@pytest.mark.filterwarnings("ignore::masked_dispatch.BatchEndWarning")
def test_a_wrong_training_step_is_not() -> None:
    assert [f.kind for f in step(Last(), batch(8)).findings] == ["batch end"]


@pytest.mark.parametrize("head", ["sequence", "tokens"])
def test_bert_is_silent(head: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, num_labels=2,
    )  # fmt: skip
    kind = transformers.BertForSequenceClassification if head == "sequence" else transformers.BertForMaskedLM
    model = kind(config)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    labels = LABELS if head == "sequence" else torch.randint(20, (3, 5)).masked_fill(~IN_EXTENT, -100)
    with md.audit() as report:
        model(inputs_embeds=batch(8), attention_mask=IN_EXTENT.long(), labels=labels).loss.backward()
        optimizer.step()
    assert report.findings == ()
    assert report._calls > 100


@pytest.mark.parametrize("kind", ["another count that is the size", "numbers of which some are the size"])
def test_a_number_that_only_looks_like_a_size(kind: str) -> None:
    """A recall: hits, divided by the number of what could be hit."""
    hits = md.masked_tensor(torch.ones(3, 4), torch.tensor([[True, True, False, False]] * 3))
    could_be = md.masked_tensor(torch.ones(3, 9), torch.arange(9) < 4)
    with md.audit() as report:
        _ = hits.sum(1) / (could_be.count(1) if kind.startswith("another") else torch.tensor([4, 4, 3]))
    assert report.findings == ()
    with md.audit() as report:
        _ = hits.sum(1) / torch.tensor([4, 4, 4])
    assert [finding.kind for finding in report.findings] == ["divided by size"]
