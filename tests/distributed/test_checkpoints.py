"""Checkpoints of masked tensors in one process: what fits is loaded whole, and what does not leaves all as it was.

What several processes save and load is in tests/helpers/checkpoints_of_ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

import masked_dispatch as md
from checkpoints_of_ranks import DATA, MASK, SAVED, emptied
from masked_collectives import same
from masked_dispatch.distributed.checkpoints import MaskedProperties

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*FutureWarning"),
]


def dense() -> Any:
    return md.masked_tensor(DATA, MASK)


STAGERS: dict[str, Callable[[], Any]] = {
    "torch's own": lambda: None,
    "in another thread": lambda: DefaultStager(StagingOptions(False, False, True, False)),
    "blocking": BlockingAsyncStager,
}


@pytest.mark.parametrize("name", STAGERS)
def test_what_is_saved_asynchronously_is_what_was_there(name: str, tmp_path: Path) -> None:
    tensors: Any = {name: x.clone() for name, x in SAVED.items()}
    nested = {"model": tensors, "list": [dense(), torch.ones(2)], "step": 3}
    response: Any = checkpoint.async_save(nested, checkpoint_id=tmp_path, async_stager=STAGERS[name](), no_dist=True)
    if hasattr(response, "staging_completion"):
        response.staging_completion.result()
    for x in tensors.values():
        x.zero_()
    (response.upload_completion if hasattr(response, "upload_completion") else response).result()
    found: Any = {
        "model": {name: emptied(name) for name in SAVED},
        "list": [emptied("dense"), torch.zeros(2)],
        "step": 0,
    }
    checkpoint.load(found, checkpoint_id=tmp_path)
    for name, x in SAVED.items():
        same(found["model"][name], x)
    same(found["list"][0], dense())
    assert found["step"] == 3


def test_a_parameter_stays_itself_and_what_shares_its_mask_keeps_its_own(tmp_path: Path) -> None:
    checkpoint.save({"x": dense()}, checkpoint_id=tmp_path)
    x = torch.nn.Parameter(md.masked_tensor(torch.zeros(4, 6), ~MASK))
    view, result = x.data[1], x.detach() + 0
    checkpoint.load({"x": x}, checkpoint_id=tmp_path)
    same(x.detach(), dense())
    same(view, dense()[1])
    same(result, md.masked_tensor(torch.zeros(4, 6), ~MASK))
    assert x.is_leaf
    assert x.requires_grad


# What was saved, what it is to be loaded into, and what the error says.
FOREIGN: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], str]] = {
    "another storage": (
        lambda: dense().to_sparse(),
        lambda: dense().to_sparse_csr(),
        "'x' is masked float32 of shape (4, 6), stored as torch.sparse_coo in the checkpoint, and masked float32 of "
        "shape (4, 6), stored as torch.sparse_csr here.",
    ),
    "other blocks": (
        lambda: dense().to_sparse_bsr((2, 2)),
        lambda: dense().to_sparse_bsr((2, 3)),
        "'x' is masked float32 of shape (4, 6), stored as torch.sparse_bsr in blocks of (2, 2) in the checkpoint, and "
        "masked float32 of shape (4, 6), stored as torch.sparse_bsr in blocks of (2, 3) here.",
    ),
    "another dtype": (
        dense,
        lambda: dense().double(),
        "'x' is masked float32 of shape (4, 6) in the checkpoint, and masked float64 of shape (4, 6) here.",
    ),
    "another shape": (
        dense,
        lambda: dense()[:2].clone(),
        "'x' is masked float32 of shape (4, 6) in the checkpoint, and masked float32 of shape (2, 6) here.",
    ),
    "plain where masked is wanted": (
        lambda: DATA,
        dense,
        "'x' is plain float32 of shape (4, 6) in the checkpoint, and masked float32 of shape (4, 6) here. It has no "
        "mask: load it into a plain tensor, and choose the mask, masked_dispatch.as_masked_tensor.",
    ),
    "masked where plain is wanted": (
        dense,
        lambda: torch.zeros(4, 6),
        "'x' is masked float32 of shape (4, 6) in the checkpoint, and plain float32 of shape (4, 6) here. A plain "
        "tensor has no place for the mask: load it into masked_dispatch.as_masked_tensor(x).",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_checkpoint_is_refused_and_nothing_is_loaded(name: str, tmp_path: Path) -> None:
    saved, target, text = FOREIGN[name]
    checkpoint.save({"a": torch.ones(2), "m": dense(), "x": saved()}, checkpoint_id=tmp_path)
    into = {"a": torch.zeros(2), "m": emptied("dense"), "x": target()}
    before = target()
    with pytest.raises(checkpoint.CheckpointException) as raised:
        checkpoint.load(into, checkpoint_id=tmp_path)
    assert f"ValueError: this checkpoint does not fit, and nothing was loaded: {text}" in str(raised.value)
    assert into["a"].tolist() == [0, 0]
    same(into["m"], emptied("dense"))
    same(into["x"], before)


def test_an_object_where_a_masked_tensor_is_wanted_is_refused(tmp_path: Path) -> None:
    checkpoint.save({"x": "text"}, checkpoint_id=tmp_path)
    with pytest.raises(checkpoint.CheckpointException, match="'x' is an object in the checkpoint, and masked float32"):
        checkpoint.load({"x": dense()}, checkpoint_id=tmp_path)


def test_plain_checkpoints_are_none_of_our_business(tmp_path: Path) -> None:
    checkpoint.save({"x": DATA, "text": "a"}, checkpoint_id=tmp_path)
    into = {"x": torch.zeros(4, 6).double(), "text": ""}
    checkpoint.load(into, checkpoint_id=tmp_path)
    torch.testing.assert_close(into["x"], DATA.double())
    assert into["text"] == "a"


def test_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(MaskedProperties, "__getstate__", lambda self: (super(type(self), self).__getstate__(), "", 99))
        checkpoint.save({"x": dense()}, checkpoint_id=tmp_path)
    with pytest.raises(checkpoint.CheckpointException, match="'x' has format version 99, and this library reads"):
        checkpoint.load({"x": dense()}, checkpoint_id=tmp_path)


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_checkpoint_is_refused_and_nothing_is_loaded(share: float, tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(2), "x": dense(), "y": dense().to_sparse()}, checkpoint_id=tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    size = file.stat().st_size
    cut(file, share)
    into = {"a": torch.zeros(2), "x": emptied("dense"), "y": emptied("coo")}
    with pytest.raises(checkpoint.CheckpointException) as raised:
        checkpoint.load(into, checkpoint_id=tmp_path)
    expected = f"{file.name} has {int(share * size)} bytes, and should have at least {size}."
    assert f"this checkpoint is not complete, and nothing was loaded: {expected}" in str(raised.value)
    file.unlink()
    with pytest.raises(checkpoint.CheckpointException, match=rf"nothing was loaded: {file.name} is missing\."):
        checkpoint.load(into, checkpoint_id=tmp_path)
    assert into["a"].tolist() == [0, 0]
    same(into["x"], emptied("dense"))
    same(into["y"], emptied("coo"))


def test_truncated_metadata_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    checkpoint.save({"x": dense()}, checkpoint_id=tmp_path)
    cut(tmp_path / ".metadata", 0.7)
    x = emptied("dense")
    with pytest.raises(checkpoint.CheckpointException):  # in torch's words
        checkpoint.load({"x": x}, checkpoint_id=tmp_path)
    same(x, emptied("dense"))


def test_a_conversion_that_would_lose_masks_is_refused(tmp_path: Path) -> None:
    checkpoint.save({"x": dense()}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(checkpoint.CheckpointException, match="A plain tensor has no place for the mask"):
        dcp_to_torch_save(tmp_path / "saved", tmp_path / "converted")
    assert not (tmp_path / "converted").exists()
