"""Exports of every model that shortens sequences, and of modules that store a padded batch in every sparse storage."""

from __future__ import annotations

import pytest

import exported_modules

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.mark.parametrize("kind", ["padded", "holes"])
@pytest.mark.parametrize("name", exported_modules.MODELS_OF_FRAMES)
def test_each_length_that_the_plain_model_takes(name: str, kind: str) -> None:
    exported_modules.check_model_of_frames(name, kind)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", exported_modules.STORED)
def test_export_of_sparse_storage(name: str, strict: bool) -> None:
    exported_modules.check_sparse_storage(name, strict)
