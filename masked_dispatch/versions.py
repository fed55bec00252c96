"""The library's version, and the releases of torch that it was tested with.

README, the site, pyproject.toml and `make matrix` follow the second.
"""

from __future__ import annotations

import re

# As in pyproject.toml: a checkout that is not installed has no metadata, and another one may be installed beside it.
__version__ = "0.1.0"

# From the oldest that pyproject.toml admits to the newest.
TESTED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")


def is_untested(version: str) -> bool:
    """Whether a torch is newer than the newest that was tested, or older than the oldest: 2.16.0, 2.16.0a0+git1234."""
    return not _release(TESTED[0]) <= _release(version) <= _release(TESTED[-1])


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])
