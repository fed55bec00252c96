"""Reports for people, and the same as values for `--json`.

coverage.py      which operators are supported, and how; which entries of torch's database stay sparse in each layout
names.py         the names by which users refer to operators
explain.py       what an operator does on masked tensors, and where that is defined
conformance.py   the results of `check`, with the page of P9 by rule, and entries on another device; mutants
python_level.py  how the callables that torch writes in Python are supported
"""
