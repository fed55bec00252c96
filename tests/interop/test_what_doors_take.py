"""Every door says by its own name what it takes, whatever it is given in place of it."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import masked_dispatch as md
from masked_dispatch import interop
from masked_dispatch.interop import DOORS

NAMES = [name for name in (*md.__all__, *interop.__all__) if name.startswith(("from_", "to_", "pad_"))]
WRONG = {"a list": [1, None], "None": None, "a string": "text", "a number": 3, "a nested tuple": ((1.0, 2.0), (3.0,))}


@pytest.fixture(scope="module")
def right() -> dict[str, Any]:
    """What the other parameters of a door that needs several are given."""
    from torch.nn.attention.flex_attention import create_block_mask

    return {
        "data": torch.ones(2, 3),
        "lengths": torch.tensor([1, 2]),
        "attention_mask": torch.ones(2, 3, dtype=torch.int64),
        "key_padding_mask": torch.zeros(2, 3, dtype=torch.bool),
        "scores": torch.ones(1, 1, 2, 2),
        "block_mask": create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 2, 2, device="cpu"),
        "batch": {"input_ids": md.masked_tensor(torch.ones(2, 3))},
        "padding": {"input_ids": 0},
    }


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(DOORS.get(name, ("", "torch"))[1]) is not None


def door(name: str) -> Callable[..., Any]:
    if not is_installed(name):
        pytest.skip(f"the library behind {name} is not installed")
    return getattr(interop if name in DOORS else md, name)


def needed(door: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(door).parameters.values() if p.default is p.empty]


@pytest.mark.parametrize("thing", WRONG)
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_thing_is_refused_by_the_name_of_the_door(name: str, thing: str, right: dict[str, Any]) -> None:
    function = door(name)
    names = needed(function)
    for parameter in names:
        given = {other: right[other] for other in names if other != parameter}
        with pytest.raises((TypeError, ValueError)) as caught:
            function(**given, **{parameter: WRONG[thing]})
        text = str(caught.value)
        assert text.startswith(name), text
        assert re.search(r"takes|needs", text), text


def test_right_things_beside_it_are_taken(right: dict[str, Any]) -> None:
    asked = []
    for name in NAMES:
        parameters = needed(door(name)) if is_installed(name) else []
        if len(parameters) > 1:
            door(name)(**{parameter: right[parameter] for parameter in parameters})
            asked.append(name)
    assert {"from_lengths", "from_block_mask", "to_batch_encoding"} <= set(asked)


@pytest.mark.parametrize(
    "call, text",
    [
        (
            lambda: interop.from_pandas([1, None]),  # type: ignore[arg-type]
            "from_pandas takes a Series, DataFrame, Index or ExtensionArray of pandas as data, not a list: "
            "pass pandas.Series(data), where None is missing",
        ),
        (lambda: md.padded(None), "padded takes a tensor as x, not None"),  # type: ignore[arg-type]
        (lambda: md.last("text"), "last takes a tensor as x, not a str"),  # type: ignore[type-var]
        (lambda: interop.to_lengths([[1, 2]]), "to_lengths takes a tensor as x, not a list: pass torch.as_tensor(x)"),  # type: ignore[arg-type]
        (
            lambda: interop.from_attention_mask(torch.ones(1, 2), attention_mask=[[1, 0]]),  # type: ignore[arg-type]
            "from_attention_mask takes a tensor as attention_mask, not a list: pass torch.as_tensor(attention_mask)",
        ),
        (
            lambda: md.pad_sequence([[1.0, 2.0], [3.0]]),  # type: ignore[list-item]
            "pad_sequence takes a list of tensors, plain or masked, and sequences has a list: pass "
            "[torch.as_tensor(part) for part in sequences]",
        ),
        (
            lambda: md.from_nan([1.0, None]),  # type: ignore[arg-type]
            "from_nan takes data that torch.as_tensor converts, not a list (Could not infer dtype of NoneType). "
            "For missing numbers write float('nan') and use masked_dispatch.from_nan(data)",
        ),
    ],
)
def test_the_texts(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        call()


def test_a_decorator_that_names_other_parameters_than_its_door_is_refused() -> None:
    from masked_dispatch.interop.crossing import takes

    with pytest.raises(TypeError, match=r"takes\(\.\.\.\) names \['y'\], and to_it begins with \['x'\]"):

        @takes(y=torch.Tensor)
        def to_it(x: torch.Tensor) -> None: ...
