"""Ten thousand files of masked tensors with a changed byte; some are in the thorough tests too."""

from __future__ import annotations

import pytest

from corrupted_files import KINDS, change_bytes, check_changes


@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_changed_bytes_take_no_process_down(kind: str) -> None:
    """Together: an eighth of them for each kind."""
    check_changes(kind, change_bytes(1, 10_000 // len(KINDS), kind))
