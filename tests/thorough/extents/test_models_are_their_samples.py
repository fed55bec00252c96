"""A padded batch gives what its samples give, one by one: values, and gradients of inputs and parameters."""

from __future__ import annotations

import pytest

from padded_models import MODELS, PAGE, Model, verdict
from repository import ROOT

# What has no right answer for samples that are padded in front, and how that shows.
LEFT = {
    # A pool with a stride takes samples to the front, and meets a skip connection whose samples are not there.
    "U-Net, 1-D": "refused: cat: two operands have samples at different places along dimension 2",
    "U-Net, 2-D": "refused: cat: two operands have samples at different places along dimension 2",
    # One step that is not there makes the carried state invalid for good: masked_dispatch.audit() names it.
    "recurrence by hand": "differs by inf",
    # Its table of positions is a plain operand, which counts in the batch.
    "SpeechT5 decoder prenet": "differs by",
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_padded_behind(model: Model) -> None:
    assert verdict(model, "right") == "right"


@pytest.mark.filterwarnings("ignore:x.* 0. is an end of the batch:masked_dispatch.BatchEndWarning")  # in a loop
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_padded_in_front(model: Model) -> None:
    assert verdict(model, "left").startswith(LEFT.get(model.name, "right"))


def test_the_page_has_every_model() -> None:
    page = (ROOT / "docs/results/padded-models.md").read_text(encoding="utf-8")
    assert page.startswith(PAGE)
    assert [line.split(" | ")[0][2:] for line in page.removeprefix(PAGE).splitlines()] == [m.name for m in MODELS]
