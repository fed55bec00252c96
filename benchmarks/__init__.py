"""One named benchmark for each figure that the project promises: ``python -m benchmarks NAME``.

overhead           R5   what one small eager call costs, beside plain torch, torch.masked and NestedTensor
fill                    eager fills, beside torch.where and masked_fill
eager_reductions   R3   eager masked reductions, beside the line of torch.where that they replace
chain              R4   six elementwise operators, eager and compiled
training           R14  training step and evaluation of stock models, beside the same model with its padding mask
packed             R10  a transformer block on packed storage, beside the products of its valid tokens
reductions         R1   compiled masked reductions (R2: with their gradients), beside a one-pass kernel
graphs             R12  graphs, breaks, recompiles and fused kernels of compiled masked code
compiled_training  R15  the compiled training step of a stock model: first compilation, kernels, time
masked_mean        R9   the mean of masked losses and its gradient, with a new mask in every step
sparse             R7   work on sparse storage, beside plain kernels over what is stored
conversions        R6   dense to sparse storage and back, beside torch.sparse and scipy: time, and peak memory
untouched          R13  what plain tensors, and the import, pay for the library
adagrad            R8   a step of Adagrad on a large table of which few rows were looked up
crossovers         R11  where sparse layouts become quicker; tensors whose every element is valid
compile                 what a second process pays to start
dynamic                 what it takes to trace for any sizes: plain, padded and packed batches
memory             R17  peak memory of reductions, norms, sorts and distances
xla                     the masked mean on XLA by torchax, where the extra is installed: compilations, gradient, memory

The identifiers are those of the project's goals, and docs/performance.md has a figure for each.

Only ratios are goals. Candidates run side by side in one process, interleaved, on one thread and in thread CPU time,
so that neighbours on the machine hardly enter; what is printed is the median of the rounds.
"""
