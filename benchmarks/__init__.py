"""One named benchmark for each figure that the project promises: ``python -m benchmarks NAME``.

overhead     what one small eager call costs, beside plain torch, torch.masked and NestedTensor
reductions   compiled masked reductions, beside hand-written torch.where and a one-pass kernel
conversions  dense to sparse storage and back, beside torch.sparse and scipy: time, and peak memory
untouched    what plain tensors, and the import, pay for the library

Only ratios are goals. Candidates run side by side in one process, interleaved, on one thread and in thread CPU time,
so that neighbours on the machine hardly enter; what is printed is the median of the rounds.
"""
