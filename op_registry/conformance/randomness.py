"""Seeding, so that every run of a trial draws the same random numbers."""

from __future__ import annotations

import torch


def start_random_numbers(seed: int) -> None:
    """`torch.manual_seed` without queueing a call for a later CUDA initialisation.

    Each queued call holds a formatted stack trace, which took a quarter of the time of a conformance run.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
