"""How a call on masked tensors reaches its rule.

ladder.py        how an overload finds its kernel: view, rule, written back, list, decomposition, refusal
kernel_table.py  the kernel registered for each overload, and a kernel around it while somebody watches
run_rule.py      runs a rule: on dense records, or by a lowering on sparse ones, else densely, else refused
fast_paths.py    kernels for the most common calls without derivatives
views.py         views: torch's own view node, and the same view of data and mask
writes.py        kernels of in-place, out= and _foreach_ forms
assign.py        what a write leaves in its target: values, validity and extent
overlap.py       writes whose operands or outputs overlap in memory
control_flow.py  torch.cond, scan and while_loop with masked operands
selections.py    first, last, align and positions of padded batches; which elements to store sparsely
library.py       this library's own operators (torch.ops.masked_dispatch)
compile.py       preparation for torch.compile and torch.export
"""
