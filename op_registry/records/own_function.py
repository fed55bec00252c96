"""The base of this project's own autograd functions."""

from __future__ import annotations

import torch


class OwnFunction(torch.autograd.Function):
    """An autograd function that handles masks itself, so that torch's own `apply` calls it.

    masked_dispatch wraps `apply` of all other functions, to convert the gradients of masked tensors. This class takes
    torch's own `apply` before that.
    """

    apply = torch.autograd.Function.__dict__["apply"]
