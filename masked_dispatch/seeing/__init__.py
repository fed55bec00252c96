"""`trace` records every call on masked tensors, `audit` checks each, and `explain` says how one is served.

calls.py     the record of a call, its operands and its results: numbers and names, never a tensor; and its text
event.py     a call while it runs: its tensors, their masks before and after, and notes on tensors
recorder.py  records operators, modules, backward and densifications
watching.py  installs recorders around kernels, modules and backward while a trace is open
trace.py     `trace`, the queries on its result, and its page of HTML
explain.py   `explain`: the operators of a call, or what a function means
audit.py     `audit`, its findings, and the recorder that checks the calls
checks.py    what an audit looks for in each call
lost.py      states and rows that become invalid, and outputs without a valid weight, whose bias is lost
sizes.py     numbers from sizes of a padded batch, with what each sample alone would have, and what becomes of them
"""
