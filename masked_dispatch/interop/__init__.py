"""Masked tensors in the parts of torch that dispatch does not reach.

torch_sparse.py  torch.sparse tensors
torch_masked.py  the functions of torch.masked
torch_script.py  what torch.jit has compiled
numpy_masked.py  masked arrays of NumPy
low_rank.py      torch.lobpcg, torch.svd_lowrank and torch.pca_lowrank
collate.py       torch.utils.data.DataLoader
processes.py     sending to other processes
"""
