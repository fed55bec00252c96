"""A padded batch gives what its samples give, one by one: values, and gradients of inputs and parameters.

Where it doesn't, something says so: an error, a warning, or an audit.
"""

from __future__ import annotations

import pytest

from padded_batches import SIDES, Model, verdict
from padded_models import MODELS, PAGE
from repository import ROOT

ROWS = [line.split(" | ") for line in (ROOT / "docs/results/padded-models.md").read_text("utf-8").splitlines()]
CELLS = {(row[0].split()[1], row[1]): row[2:] for row in ROWS if len(row) == 2 + len(SIDES)}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.library}, {model.name}")
def test_a_padded_batch_is_its_samples_or_something_says_that_it_is_not(model: Model, side: str) -> None:
    if model.missing:
        pytest.skip(model.missing)
    outcome, _, said = verdict(model, side).partition(":")
    assert outcome in ("right", "refused", "warned", "audit"), said
    assert CELLS[model.library, model.name][SIDES.index(side)].startswith(outcome)


def test_the_page_has_every_model() -> None:
    page = (ROOT / "docs/results/padded-models.md").read_text("utf-8")
    assert page.startswith(PAGE)
    assert [*CELLS][1:] == [(m.library, m.name) for m in MODELS]


def test_models_of_torch_and_written_by_hand_are_right_padded_behind() -> None:
    assert all(CELLS["torch", model.name][0] == "right" for model in MODELS if model.library == "torch")
