"""Exports of every model that shortens sequences, and of modules that store a padded batch in every sparse storage."""

from __future__ import annotations

import pytest

import exported_storages
import models_of_frames

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.mark.parametrize("kind", ["padded", "holes"])
@pytest.mark.parametrize("name", models_of_frames.MODELS)
def test_each_length_that_the_plain_model_takes(name: str, kind: str) -> None:
    models_of_frames.check_export(name, kind)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", exported_storages.STORED)
def test_export_of_sparse_storage(name: str, strict: bool) -> None:
    exported_storages.check_export(name, strict)
