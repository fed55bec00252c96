"""Hypothesis: the same examples in every run, so that a failure is found again; more of them where asked.

``HYPOTHESIS_PROFILE=long python -m pytest tests/...`` draws many and anew each time.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("short", max_examples=50, deadline=None, derandomize=True, database=None)
settings.register_profile("long", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
