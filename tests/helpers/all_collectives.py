"""All checks that run in processes of a group."""

from __future__ import annotations

import masked_collectives
import masked_functional_collectives
import refused_collectives
import sparse_collectives_of_ranks
import statistics_of_ranks
from process_groups import Check

CHECKS: dict[str, Check] = {
    **masked_collectives.CHECKS,
    **masked_functional_collectives.CHECKS,
    **refused_collectives.CHECKS,
    **sparse_collectives_of_ranks.CHECKS,
    **statistics_of_ranks.CHECKS,
}
