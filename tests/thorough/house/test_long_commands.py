"""The commands of op_registry that README and docs name and that take seconds."""

from __future__ import annotations

import pytest

from pages import LONG_COMMANDS, run_command


@pytest.mark.parametrize("command", LONG_COMMANDS)
def test_the_long_commands_of_op_registry_work(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(command) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2
