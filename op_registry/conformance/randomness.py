"""Random numbers that are the same in every run of a trial."""

from __future__ import annotations

import torch


def start_random_numbers(seed: int) -> None:
    """What `torch.manual_seed` does, without the notes that it takes for CUDA to be initialised later.

    They hold a formatted stack trace each time, which was a quarter of all that a run of the laws took.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
