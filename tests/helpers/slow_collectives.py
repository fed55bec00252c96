"""The checks that run on four processes, in the slow tier: those of two, and more."""

from __future__ import annotations

import all_collectives
import checkpoints_of_ranks
from process_groups import Check

CHECKS: dict[str, Check] = {
    **all_collectives.CHECKS,
    **checkpoints_of_ranks.SLOW,
}
