"""How a call on masked tensors reaches its rule.

ladder.py         how an overload finds its kernel: view, rule, written back, list, decomposition, refusal
kernel_table.py   the kernel registered for each overload, and a kernel around it while somebody watches
run_rule.py       finding masked arguments, running a rule on records, wrapping its result
measures.py       errors inside libraries that measure predictions
divided_operands.py  runs a rule again if DTensor has refused one of its operators
plain_results.py  refuses results that would lose the mask
selections.py     remembers which mask selected a tensor, for errors about sizes
fast_paths.py     kernels for the most common calls without derivatives
views.py          views: torch's own view node, and the same view of data and mask
writes.py         in-place and out= forms
extents.py        which positions are there after a write
overlap.py        writes whose operands overlap with the target
foreach.py        _foreach_ forms
steps.py          operators that call several others, while Dynamo runs them
sparse.py         calls with sparsely stored arguments: a lowering, else dense storage, else a refusal
sparse_writes.py  writes to sparse storage, and updates of plain tensors at sparse coordinates
sparsify.py       operators that select the elements to be stored sparsely
control_flow.py   torch.cond, scan and while_loop with masked operands
positions.py      first, last, align and positions of padded batches
library.py        this library's own operators (torch.ops.masked_dispatch)
gradients.py      kernels of operators that the engine also calls, with gradients
overlays.py       the registry's overlays in backward
compile.py        preparation for torch.compile and torch.export
plain_state.py    masked parameters and buffers of exported modules as plain ones
"""
