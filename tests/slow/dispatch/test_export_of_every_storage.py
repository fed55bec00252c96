"""torch.export of modules that store a padded batch sparsely inside: every storage, traced in both ways."""

from __future__ import annotations

import pytest

from exported_storages import STORED, check_export

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", STORED)
def test_export_of_sparse_storage(name: str, strict: bool) -> None:
    check_export(name, strict)
