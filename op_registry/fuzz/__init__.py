"""Random programs: laws that concern several operators in a row, on tensors that share data and masks.

The laws in :mod:`op_registry.conformance` test one call at a time. What goes wrong between calls (a view written
through after its base, a mask shared by two tensors, a conversion between two reads) shows only in programs.

programs.py     a program as a value: tensors, and steps that are lines of Python
sources.py      the tensors of a program: data, masks, and the garbage under the masks
calls.py        the steps written by hand: a line of Python for each
rule_calls.py   the steps derived from the schemas of the rules in the registry
left_open.py    what programs leave out: writes whose result torch leaves open, calls without end
drawing.py      random choices of operands, dimensions, indices and numbers
generating.py   a program from a seed
running.py      what a program gives
laws.py         P1, P3, P6, and compiled against eager
shrinking.py    a smaller program that breaks the law in the same way
snippets.py     a program as Python code that runs by itself
many.py         many programs, in this process or in worker processes
command.py      ``python -m op_registry fuzz``
"""
