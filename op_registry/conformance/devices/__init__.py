"""P7 on other devices: every operator gives the same results and gradients as on the CPU, and keeps the laws.

reference.py   a device written in Python, which refuses operands on the CPU
available.py   devices by name, or why this machine lacks one
calls.py       one call with its tensors on a device: results, gradients
xla.py         calls that XLA compiles once for several masks
compilations.py  how many programs XLA compiles
on_device.py   a subject on a device, for the laws
comparison.py  whether each entry of torch's database gives the CPU's results on a device
"""
