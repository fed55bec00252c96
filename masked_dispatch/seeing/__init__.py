"""Where did validity go: `trace` writes down every call on masked tensors.

calls.py      a call, and what it says of its operands and results: numbers and names, never a tensor
counting.py   how much of a tensor is valid, and what became invalid or valid in a call
recorder.py   writes calls down: operators, modules, backward, what is stored densely
watching.py   puts recorders around kernels, modules and backward while a trace is open
trace.py      `trace`, and what can be asked of it
text.py       a trace as text
page.py       a trace as a page of HTML
"""
