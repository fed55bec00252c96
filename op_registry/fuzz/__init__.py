"""Random programs: laws that concern several operators in a row, on tensors that share data and masks.

The laws in :mod:`op_registry.conformance` test one call at a time. Only programs show faults between calls: a write to
a view after one to its base, a mask shared by two tensors, a conversion between two reads.

programs.py     a program: its tensors, with masks and the garbage under them, its steps, and what it gives when it runs
steps.py        the steps: lines written by hand, those derived from the rules, and the random choices in them
generating.py   a program from a seed
laws.py         P1, P3, P5, P6, and compiled against eager
padding.py      P9: a padded batch against its samples
padded_programs.py  a program on padded batches from a seed, and its table of lines
idioms.py       what models do in more than a line, as functions that these lines call
command.py      ``python -m op_registry fuzz``: many programs; one that breaks a law, made smaller, and as code
"""
