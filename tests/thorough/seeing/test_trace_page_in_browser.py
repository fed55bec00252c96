"""The page of a trace in a browser, where one is installed: drawn at two widths, and complete."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from traced_tensors import written_in

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed to show the page")
@pytest.mark.parametrize("width", [1280, 480])
def test_a_browser_shows_the_page(tmp_path: Path, width: int) -> None:
    assert CHROMIUM is not None
    written = written_in(tmp_path)
    picture = tmp_path / "page.png"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path}/profile",
    ]
    options += [f"--window-size={width},900", f"--screenshot={picture}"]
    subprocess.run([CHROMIUM, *options, written.as_uri()], check=True, capture_output=True, timeout=60)
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (width, 900)
    dumped = subprocess.run(
        [CHROMIUM, *options[:5], "--dump-dom", written.as_uri()], check=True, capture_output=True, text=True, timeout=60
    )
    assert dumped.stdout.count("<details") == written.read_text(encoding="utf-8").count("<details")
