"""P7 on other devices: every operator gives there what it gives on the CPU, forward and gradient.

reference.py   a device written in Python, which refuses operands on the CPU
available.py   devices by name, or why this machine lacks one
calls.py       one call with its tensors on a device: results, gradients
xla.py         calls compiled by XLA, over several masks, by one compilation each
compilations.py  how many programs XLA compiles
comparison.py  what came of each entry of torch's database on a device
"""
