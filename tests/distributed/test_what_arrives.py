"""What a file, a copy, a process, a module or a checkpoint brings is what was sent: values, mask and extent.

Each way is asked with each kind of extent in each storage, after writes, and with views that are written to later.

tests/helpers/table_of_collectives.py asks the same of collectives.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import multiprocessing, nn
from torch.distributed import checkpoint

import masked_dispatch as md
from kinds_of_extents import FORMS, LENGTHS, OTHERS, STORED, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::masked_dispatch.MaskDroppedWarning"),
]


NOTHING = md.masked_tensor(torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.bool))
# Writes to the first row of a batch of a form; the shorter sample leaves fewer positions there.
WRITES: dict[str, Callable[[Any, str], Any]] = {
    "none": lambda row, form: row,
    "numbers": lambda row, form: row.fill_(7.0),
    "holes": lambda row, form: row.copy_(NOTHING),
    "shorter": lambda row, form: row.copy_(FORMS[form](torch.tensor([1, 1, 1]))[0]),
}
# Tensors that are sent together, and what is written to later.
GROUPS: dict[str, Callable[[Any], list[Any]]] = {
    "itself": lambda x: [x],
    "base and view": lambda x: [x, x[0]],
    "view and base": lambda x: [x[0], x],
    "views alone": lambda x: [x[0], x[0:2]],
}


def writes(*names: str) -> list[tuple[str, str]]:
    """Each write before, and each one later, in pairs that depend on what else a test is asked with."""
    turn = crc32("".join(names).encode())
    return [(before, list(WRITES)[(i + turn) % len(WRITES)]) for i, before in enumerate(WRITES)]


def by_torch(x: Any, **options: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(x, buffer, **options)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def through_queue(x: Any) -> Any:
    queue = multiprocessing.SimpleQueue()
    queue.put(x)
    return queue.get()


COPIES: dict[str, Callable[[Any], Any]] = {
    "torch.save": by_torch,
    "deepcopy": copy.deepcopy,
    "copy": lambda x: list(map(copy.copy, x)) if isinstance(x, list) else copy.copy(x),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "pickle, first protocol": lambda x: pickle.loads(pickle.dumps(x, 2)),
    "a queue": through_queue,
}
# A pickle copies the memory of each tensor.
SEPARATED = ("pickle", "pickle, first protocol")


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", COPIES)
def test_copies_are_what_was_copied(way: str, form: str, storage: str) -> None:
    x = STORED[storage](FORMS[form](LENGTHS))
    same(COPIES[way](x), x)
    parameter = nn.Parameter(x)
    same(COPIES[way](parameter).detach(), x)


@pytest.mark.parametrize("storage", STORED)
def test_the_older_file_format_is_refused(storage: str) -> None:
    for form in FORMS.values():
        x = nn.ParameterDict({"x": STORED[storage](form(LENGTHS))})
        with pytest.raises(ValueError, match=r"older file format .* takes no masked tensors"):
            by_torch(x, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", COPIES)
def test_views_and_their_later_writes(way: str, form: str, group: str) -> None:
    """As without the copy, where a write before it and one after it each change something, or not."""
    for before, later in writes(way, form, group):
        tensors, expected = (GROUPS[group](FORMS[form](LENGTHS)) for _ in range(2))
        for one in (tensors[0], expected[0]):
            WRITES[before](one if one.ndim == 2 else one[0], form)
        copies = COPIES[way](tensors)
        for found, other in zip(copies, expected, strict=True):
            same(found, other)
        for one in (copies[0], expected[0]):
            WRITES[later](one if one.ndim == 2 else one[0], form)
        for found, other in list(zip(copies, expected, strict=True))[: 1 if way in SEPARATED else None]:
            same(found, other)


def by_module(source: Any, target: Any, folder: Path) -> Any:
    modules = nn.Module(), nn.Module()
    for module, x in zip(modules, (source, target), strict=True):
        module.x = nn.Buffer(x)
    modules[1].load_state_dict(by_torch(modules[0].state_dict()))
    return modules[1].x


def by_checkpoint(source: Any, target: Any, folder: Path) -> Any:
    state = {"x": target}
    checkpoint.save({"x": source}, checkpoint_id=folder)
    checkpoint.load(state, checkpoint_id=folder)
    return state["x"]


RESTORED = {"load_state_dict": by_module, "a checkpoint": by_checkpoint}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("into", FORMS)
@pytest.mark.parametrize("way", RESTORED)
def test_what_is_restored_replaces(way: str, into: str, form: str, tmp_path: Path) -> None:
    for number, (before, later) in enumerate(writes(way, into, form)):
        source, expected = (FORMS[form](LENGTHS) for _ in range(2))
        target = FORMS[into](OTHERS)
        view = target[0]
        for row in (source[0], expected[0]):
            WRITES[before](row, form)
        WRITES[before](view, into)
        found = RESTORED[way](source, target, tmp_path / str(number))
        same(found, expected)
        same(view, expected[0])
        for row in (view, expected[0]):
            WRITES[later](row, form)
        same(found, expected)
        same(view, expected[0])


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("way", RESTORED)
def test_what_is_restored_replaces_in_every_storage(way: str, storage: str, tmp_path: Path) -> None:
    for into, form in itertools.product(FORMS, FORMS):
        source, target = STORED[storage](FORMS[form](LENGTHS)), STORED[storage](FORMS[into](OTHERS))
        same(RESTORED[way](source, target, tmp_path / f"{into} {form}"), source)


def by_copy(source: Any, target: Any, folder: Path) -> Any:
    return target.copy_(source)


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("way", [*RESTORED, "copy_"])
def test_what_shares_the_memory_learns_of_it(way: str, storage: str, tmp_path: Path) -> None:
    # (an assignment from samples that lie at other places is refused)
    forms = [form for form in FORMS if form != "front" or way != "copy_"]
    for into, form in itertools.product(forms, forms):
        target = STORED[storage](FORMS[into](OTHERS))
        others = target.detach(), copy.copy(target)
        source = STORED[storage](FORMS[form](LENGTHS))
        found = {**RESTORED, "copy_": by_copy}[way](source, target, tmp_path / f"{into} {form}")
        for other in (target, *others, target.detach()):
            same(other, found)
