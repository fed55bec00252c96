"""Conversions to and from what torch has already.

torch_sparse.py  torch.sparse tensors
torch_masked.py  the functions of torch.masked
collate.py       torch.utils.data.DataLoader
"""
