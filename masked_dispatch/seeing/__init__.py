"""`trace` records every call on masked tensors, and shows where elements became invalid; `audit` checks each call.

calls.py      the record of a call, its operands and its results: numbers and names, never a tensor
counting.py   counts valid elements, and compares masks before and after a call
recorder.py   records operators, modules, backward and densifications
watching.py   installs recorders around kernels, modules and backward while a trace is open
trace.py      `trace`, and the queries on its result
text.py       a trace as text
page.py       a trace as a page of HTML
event.py      a call as an audit checks it, and notes on tensors
checks.py     what an audit looks for in each call
lost_rows.py  states and rows that become invalid
pruned.py     outputs without a valid weight, whose bias is lost
sizes.py      numbers from sizes of a padded batch, with what each sample alone would have
samples_alone.py  what becomes of tensors that are cut or made by such numbers
placed.py     numbers from sizes that place coordinates, padding or an index
auditor.py    a recorder that checks the calls
audit.py      `audit`, and its findings
"""
