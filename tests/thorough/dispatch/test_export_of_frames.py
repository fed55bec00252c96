"""md.export of models that shorten sequences: every length that torch.export takes of the plain model."""

from __future__ import annotations

import pytest

from models_of_frames import check_export

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("stride 2", "holes"), ("stride 3", "padded"), ("two", "padded"), ("GELU", "holes"), ("residual", "padded")],
)
def test_each_length_that_the_plain_model_takes(name: str, kind: str) -> None:
    check_export(name, kind)
