"""What is tried first by people who have read a page or two: what is refused names what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
import torch

import masked_dispatch as md
from masked_dispatch import missing
from op_registry import registry
from op_registry.authoring import lowest, reduction, scan

X = md.from_nan(torch.tensor([[1.0, float("nan")], [2.0, 3.0]]))
FRAME = pd.DataFrame({"age": [22, None], "height": [1.7, 1.8]}).convert_dtypes()
IMAGES = torch.rand(2, 3, 4, 4)
NET = torch.nn.Linear(2, 1)


@torch.library.custom_op("firsttries::rms", mutates_args=())
def rms(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.square().mean(dim).sqrt()


OP = torch.ops.firsttries.rms

TRIES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "masked_tensor(frame)": (lambda: md.masked_tensor(FRAME), TypeError, r"DataFrame .*Use .*interop\.from_pandas"),
    "from_nan(series)": (lambda: md.from_nan(FRAME["age"]), TypeError, r"Series .*Use .*interop\.from_pandas\(data\)"),  # type: ignore[arg-type]
    "masked_tensor(arrow)": (lambda: md.masked_tensor(pa.array([1, None])), TypeError, r"interop\.from_arrow\(data\)"),
    "masked_tensor(None in a list)": (lambda: md.masked_tensor([1.0, None]), TypeError, r"float\('nan'\) and use"),
    "masked_tensor(tensors)": (
        lambda: md.masked_tensor([torch.ones(2), torch.ones(3)]),
        TypeError,
        r"masked_dispatch\.pad_sequence\(tensors, batch_first=True\)",
    ),
    "masked_tensor(list with an invalid number)": (
        lambda: md.masked_tensor([X[0, 0], X[0, 1]]),
        md.InvalidValueError,
        r"x\.to_tensor\(",
    ),
    "masked_tensor(dict)": (lambda: md.masked_tensor({"a": 1}), TypeError, r"from_batch_encoding\(batch\)"),
    "masked_tensor(object)": (lambda: md.masked_tensor(object()), TypeError, "Pass a tensor, a number, nested lists"),
    "a mask without channels": (
        lambda: md.masked_tensor(IMAGES, torch.ones(2, 4, 4, dtype=torch.bool)),
        ValueError,
        r"data's shape \(2, 3, 4, 4\): pass mask\.unsqueeze\(1\)$",
    ),
    "a mask of one number a row": (
        lambda: md.masked_tensor(torch.ones(2, 5), torch.ones(2, dtype=torch.bool)),
        ValueError,
        r"\(2, 5\): pass mask\.unsqueeze\(1\)$",
    ),
    "a mask that fits nowhere": (
        lambda: md.masked_tensor(IMAGES, torch.ones(5, dtype=torch.bool)),
        ValueError,
        r"data's shape \(2, 3, 4, 4\)$",
    ),
    "export(module, x)": (lambda: md.export(NET, X), TypeError, r"export\(module, \(x,\)\), not a MaskedTensor"),  # type: ignore[arg-type]
    "export(shapes for the pair)": (
        lambda: md.export(NET, (X,), dynamic_shapes=({}, {})),
        ValueError,
        r"dynamic_shapes has 2 entries, and the module takes 1 arguments \(input\): write one for each",
    ),
    "x.coalesce() of dense storage": (
        lambda: X.coalesce(),
        RuntimeError,
        r"^coalesce expected sparse coordinate tensor layout but got Strided, of a masked tensor of shape \(2, 2\)$",
    ),
    "the operator coalesce": (
        lambda: torch.ops.aten.coalesce(X.to_sparse()),
        md.MaskedSemanticsError,
        r"nothing to coalesce\. Call the methods, x\.is_coalesced\(\) and x\.coalesce\(\)",
    ),
    "no rule yet": (
        lambda: torch.ops.firsttries.rms(X, 1),
        md.MaskedSemanticsError,
        r"reduction, if it gives one number for each slice, or scan, .*\n.*reduction\(torch\.ops\.firsttries\.rms, id",
    ),
    "reduction without identity": (
        lambda: reduction(OP),
        TypeError,
        r"^reduction at .*/test_first_tries\.py:\d+: it needs identity=\.+, .*@masked_rule\(.*, category=REDUCTION\)",
    ),
    "scan without identity": (lambda: scan(OP), TypeError, r"^scan at .*category=SCAN\)$"),
    "a custom_op for its operator": (
        lambda: reduction(rms, identity=lowest),
        TypeError,
        r"CustomOpDef.* is no operator of torch's dispatcher.*: pass torch\.ops\.firsttries\.rms",
    ),
}


@pytest.mark.parametrize("name", TRIES)
def test_what_is_refused_says_what_to_write(name: str) -> None:
    call, error, text = TRIES[name]
    with registry.overlay(), pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        (md, "from_pandas", r"no attribute 'from_pandas'; here it is written masked_dispatch\.interop\.from_pandas$"),
        (md, "groupby", r"here it is written masked_dispatch\.missing\.groupby$"),
        (md, "LazyAdam", r"here it is written masked_dispatch\.optim\.LazyAdam$"),
        (md, "vmap", r"here it is written masked_dispatch\.functional\.vmap$"),
        (md, "no_such_name", r"module 'masked_dispatch' has no attribute 'no_such_name'$"),
        (md, "isna", r"here it is written ~x\.get_mask\(\)$"),
        (md, "interpolate", r"here it is written masked_dispatch\.missing\.interpolate$"),
        (missing, "isna", r"here it is written ~x\.get_mask\(\)$"),
        (missing, "group_median", r"it has GroupBy, .*bfill, dropna, .*groupby"),
        (md.optim, "Adam", "here it is written LazyAdam, which is Adam but for elements without a gradient"),
        (md.optim, "Adams", "it has SGD, Adadelta"),
    ],
)
def test_a_name_that_a_module_does_not_have(module: Any, name: str, text: str) -> None:
    assert not hasattr(module, name)
    with pytest.raises(AttributeError, match=text):
        getattr(module, name)
