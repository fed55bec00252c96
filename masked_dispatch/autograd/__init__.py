"""The differentiable boundary between tensors and records, and the sums that the autograd engine makes."""
