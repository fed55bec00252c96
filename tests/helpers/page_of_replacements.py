"""The lists of docs/replaced_in_torch.md, written from the table of what is replaced."""

from __future__ import annotations

import re
from itertools import groupby
from textwrap import fill

from masked_dispatch.replacements import OLDEST, TABLE


def as_markdown() -> str:
    """One list for each occasion, an item for each reason."""
    parts = []
    for when, rows in groupby(TABLE, lambda row: row.when):
        title = re.sub(r"torch[.\w]+", r"`\g<0>`", when.capitalize())
        parts.append(f"## {title}\n")
        for row in rows:
            owners = [
                f"`{owner}`: {', '.join(f'`{name}`' for name in names.split())}" for owner, names in row.places.items()
            ]
            by = f"assumption {row.checked}" if isinstance(row.checked, int) else f"`{row.checked}`"
            later = "" if row.since == OLDEST else f" Torch has had this function since {row.since}."
            needless = "" if row.until is None else f" Torch {row.until} and later need no replacement."
            item = f"* {'; '.join(owners)}. Without the replacement, {row.without}. Test: {by}.{later}{needless}"
            parts.append(fill(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
        parts.append("")
    return "\n".join(parts)
