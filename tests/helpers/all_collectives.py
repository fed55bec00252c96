"""All checks that run in processes of a group."""

from __future__ import annotations

import asynchronous_collectives
import broken_collectives
import checkpoints_of_ranks
import cost_of_collectives
import distributed_class_losses
import distributed_tensors_inside
import fully_sharded_subclass
import masked_collectives
import masked_data_parallel
import masked_functional_collectives
import parallel_training
import refused_collectives
import sparse_collectives_of_ranks
import statistics_of_ranks
from process_groups import Check

CHECKS: dict[str, Check] = {
    **asynchronous_collectives.CHECKS,
    **broken_collectives.CHECKS,
    **checkpoints_of_ranks.CHECKS,
    **cost_of_collectives.CHECKS,
    **distributed_class_losses.CHECKS,
    **distributed_tensors_inside.CHECKS,
    **fully_sharded_subclass.CHECKS,
    **masked_collectives.CHECKS,
    **masked_data_parallel.CHECKS,
    **masked_functional_collectives.CHECKS,
    **parallel_training.FEW,
    **refused_collectives.CHECKS,
    **sparse_collectives_of_ranks.CHECKS,
    **statistics_of_ranks.CHECKS,
}
