"""Two padded rows, and their mask as ones and zeros."""

from __future__ import annotations

import torch

DATA = torch.arange(6.0).reshape(2, 3)
ONES = torch.tensor([[1, 1, 0], [1, 0, 0]])
