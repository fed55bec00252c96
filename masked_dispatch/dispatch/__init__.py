"""How a call on masked tensors reaches its rule.

ladder.py         the order in which an overload is served: view, rule, written back, list, decomposition, refusal
kernel_table.py   the kernel registered for each overload, and a kernel around it while somebody watches
run_rule.py       finding masked arguments, running a rule on records, wrapping its result
measures.py       errors inside of libraries that measure predictions
divided_operands.py  rules on distributed tensors, where DTensor has refused one of their operators
plain_results.py  refusing results that would lose the mask
selections.py     what a mask with invalid entries has selected, for errors about sizes
fast_paths.py     kernels for the most common calls without derivatives
views.py          views: torch's own view node, and the same view of data and mask
writes.py         in-place and out= forms
overlap.py        writes whose operands lie in the memory that is written to
foreach.py        _foreach_ forms
steps.py          operators that call several others, where Dynamo runs them
sparse.py         calls with sparsely stored arguments: a lowering, else dense storage, else a refusal
sparse_writes.py  writes to sparse storage, and updates of plain tensors at sparse coordinates
sparsify.py       operators that select the elements to be stored sparsely
control_flow.py   torch.cond, scan and while_loop with masked operands
library.py        this library's own operators (torch.ops.masked_dispatch)
overlays.py       the registry's overlays in backward
compile.py        preparation for torch.compile and torch.export
plain_state.py    masked parameters and buffers of exported modules as plain ones
"""
