"""Reports for people.

coverage.py      which operators are supported, and how; which entries of torch's database stay sparse in each layout
names.py         the names by which users refer to operators, and which operators a Python function calls
explain.py       what an operator does on masked tensors, and where that is defined
conformance.py   the results of `check`, with the pages of P9 by rule and of entries on another device
python_level.py  how the callables that torch writes in Python are supported
as_json.py       the same results as values
"""
