"""1: the laws P1 to P5 and P9 on the device, beside oracles on the CPU, over all entries of torch's database.

The entries come in the order in which models use their operators, as calls of some models are counted.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from benchmarks.device.part import Row, die_with_the_device, spread
from op_registry.conformance.plain_torch import calls_of
from op_registry.conformance.samples import database, entries_by_overload
from op_registry.conformance.trials import Settings, run_operator
from op_registry.rule import packet_name
from op_registry.workers import Lost

LAWS = ("P1", "P2", "P3", "P4", "P5", "P9")
COLUMNS = ("what", "wrong", "repeat")
KINDS = ("operators",)


def rows(device: str, until: float) -> Iterator[Row]:
    names = in_order_of_use()
    yield {"what": "all entries", "entries": len(names)}
    settings = Settings(
        laws=LAWS,
        most=2,
        most_stored=1,
        masks=("unstored", "stored", "half", "empty"),
        storages=("csr", "packed"),
        also_stored=("csr",),
        device=device,
    )
    for answer in spread(functools.partial(kept_laws, settings), names, device, until):
        if isinstance(answer, Lost):
            repeat = answer.said or f"python -m op_registry check --op {answer.item} --law P1 --device {device}"
            yield {"what": answer.item, "wrong": answer.why, "repeat": repeat}
        else:
            yield answer


def kept_laws(settings: Settings, name: str, say: Callable[[str], None]) -> Row:
    """How often each law held for an entry, and the first trial in which one did not."""
    report = run_operator(name, settings, say)
    die_with_the_device(settings.device or "cpu")
    row: Row = {"what": name, "kind": "operators", "seconds": round(report.seconds, 2), "trials": report.counts}
    if report.failures:
        first = report.failures[0]
        row["wrong"] = f"{first.law}, {first.description}: {first.message}"
        row["repeat"] = first.repro
        row["others"] = [f"{f.law}, {f.description}: {f.message}" for f in report.failures[1:]]
    return row


def summary(found: Sequence[Row]) -> str:
    entries = next((row["entries"] for row in found if "entries" in row), 0)
    asked = [row for row in found if "trials" in row]
    trials: Counter[str] = Counter()
    for row in asked:
        for counts in row["trials"].values():
            trials.update(counts)
    wrong = sum("wrong" in row for row in found)
    counted = ", ".join(f"{n} {status}" for status, n in trials.most_common())
    return f"{len(asked)} of {entries} entries, {wrong} different; trials: {counted or 'none'}"


def in_order_of_use() -> list[str]:
    """Every entry; first, for each operator that the models call, the one named like it, the most frequent first."""
    used = Counter(op for step in models() for op in calls_of(step))
    entries = entries_by_overload()
    first = []
    for op, _ in used.most_common():
        packet = packet_name(op).rpartition("::")[2]
        if op in entries:
            first.append(min(entries[op], key=lambda name: (not name.endswith(packet), len(name))))
    return list(dict.fromkeys([*first, *database()]))


def models() -> list[Callable[[], None]]:
    """A step of training of models of four kinds, on plain batches."""
    torch.manual_seed(0)
    tokens, words = torch.randn(2, 6, 8), torch.tensor([[1, 2, 0], [3, 1, 4]])
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
    memory = nn.LSTM(8, 8, batch_first=True)
    pixels = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    head, table = nn.Linear(36, 5), nn.Embedding(5, 8)
    attention = nn.functional.scaled_dot_product_attention

    def of_images() -> None:
        nn.functional.cross_entropy(head(pixels(torch.randn(2, 3, 8, 8))), torch.tensor([1, 2])).backward()

    def of_words() -> None:
        x = table(words).unflatten(-1, (2, 4)).transpose(1, 2)
        scores = (x @ x.mT / 2).masked_fill(words[:, None, None] == 0, -torch.inf).softmax(-1)
        torch.cat([scores @ x, attention(x, x, x)], 1).sum((1, 2)).log_softmax(-1).mean().backward()

    return [
        lambda: (layer(tokens) - 1).square().mean().backward(),
        lambda: memory(tokens)[0].sum().backward(),
        of_images,
        of_words,
    ]
