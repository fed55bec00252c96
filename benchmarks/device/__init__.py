"""What a device shows that a CPU cannot: ``python -m benchmarks.device``, from a checkout, with nothing installed.

__main__.py   the command: each part in a process of its own, under a time limit; one Markdown and one JSON file
part.py       what a part is, and how its work is spread over processes
functions.py  the forty functions that are compiled, and that never wait
laws.py       1  the laws on the device, beside oracles on the CPU, in the order in which models use operators
compiled.py   2  the forty functions and stock models, compiled by inductor: results, graph breaks, kernels
times.py      3  figures R1, R2, R4, R10, R14, R15, as fractions of the copy bandwidth and of the matrix rate
waits.py      4  where the host waits for the device; peak memory
claims.py     5  what is said of devices without having been seen there: true, mended, or not
"""
