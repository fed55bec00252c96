"""md.export of every model that shortens sequences, with padding and with holes."""

from __future__ import annotations

import pytest

from models_of_frames import MODELS, check_export

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.mark.parametrize("kind", ["padded", "holes"])
@pytest.mark.parametrize("name", MODELS)
def test_each_length_that_the_plain_model_takes(name: str, kind: str) -> None:
    check_export(name, kind)
