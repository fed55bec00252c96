"""Conversions to and from what torch has already: sparse tensors, torch.masked, DataLoader."""
