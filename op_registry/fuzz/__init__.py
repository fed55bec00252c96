"""Random programs: laws that concern several operators in a row, on tensors that share data and masks.

The laws in :mod:`op_registry.conformance` test one call at a time. Only programs show faults between calls: a write to
a view after one to its base, a mask shared by two tensors, a conversion between two reads.

programs.py     a program as a value: tensors, and steps that are lines of Python
sources.py      the tensors of a program: data, masks, and the garbage under the masks
calls.py        the steps written by hand: a line of Python for each
rule_calls.py   the steps derived from the schemas of the rules in the registry
left_open.py    steps that programs leave out: writes whose result torch leaves open, calls that take too long
drawing.py      random choices of operands, dimensions, indices and numbers
generating.py   a program from a seed
running.py      runs a program, and keeps its values, gradients and errors
laws.py         P1, P3, P6, and compiled against eager
ragged.py       samples of different sizes, and the padded batch of them
padded_steps.py  steps that are the same for a batch and for a sample: the table of lines
idioms.py       what models do in more than a line, as functions that these lines call
padded_programs.py  a program on padded batches from a seed
padding.py      P9: programs on padded batches
shrinking.py    a smaller program that breaks the law in the same way
snippets.py     a program as Python code that runs by itself
many.py         many programs, in this process or in worker processes
command.py      ``python -m op_registry fuzz``
"""
