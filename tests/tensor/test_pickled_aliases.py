"""What shares data after it has been pickled, shares validity, as it did before."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import masked_dispatch as md

NAN = float("nan")


def by_torch(x: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "pickle, first protocol": lambda x: pickle.loads(pickle.dumps(x, 2)),
    "torch.save": by_torch,
    "deepcopy": copy.deepcopy,
}
VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "t()": lambda x: x.t(),
    "[1:]": lambda x: x[1:],
    "[:, 1]": lambda x: x[:, 1],
    "detach": lambda x: x.detach(),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "copy of a copy": lambda v: copy.copy(copy.copy(v)),
    "detach": lambda v: v.detach(),
    "view": lambda v: v[...],
}
STARTS: dict[str, Callable[[], Any]] = {
    "a mask": lambda: md.masked_tensor(torch.ones(3, 3), torch.eye(3) > 0),
    "an extent": lambda: md.padded(md.masked_tensor(torch.ones(3, 3), torch.ones(3, 3).tril() > 0)),
    "no mask": lambda: md.as_masked_tensor(torch.ones(3, 3)),
    "written to": lambda: md.masked_tensor(torch.ones(3, 3), torch.eye(3) > 0).mul_(2).fill_(1.0),
    "coo": lambda: md.masked_tensor(torch.ones(3, 3), torch.eye(3) > 0).to_sparse(),
}
CASES = [(s, v) for s, v in itertools.product(STARTS, VIEWS) if s != "coo" or v in ("itself", "detach")]


def data_of(x: Any) -> Any:
    return x._kept.values if x.storage_layout is not torch.strided else x._data


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize(("start", "view"), CASES)
def test_what_shares_data_shares_validity(start: str, view: str, copied: str, way: str) -> None:
    x = STARTS[start]()
    v = VIEWS[view](x)
    for tensors in ([v, COPIES[copied](v)], [COPIES[copied](v), x, v]):
        loaded = WAYS[way](tensors)
        for a, b in itertools.permutations(loaded, 2):
            together = data_of(a).untyped_storage().data_ptr() == data_of(b).untyped_storage().data_ptr()
            a.copy_(md.masked_tensor(torch.full(a.shape, NAN), torch.zeros(a.shape, dtype=torch.bool)))
            if together and a.numel() >= b.numel():
                assert not b.to_dense().get_mask().any()
            for t in loaded:
                assert not t.compressed().isnan().any()
            a.fill_(1.0)
