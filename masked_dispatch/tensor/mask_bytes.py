"""Graphs convert bool masks to int8.

Inductor loads bool into vectors one byte at a time, which is slower than all the arithmetic of a masked mean. A custom
operator (`masked_dispatch::bytes_of`, a copy of one byte per element) therefore converts a mask that is a graph input.
If the graph computes the mask, as by a comparison, inductor fuses the conversion and never stores the mask as bool.
"""

from __future__ import annotations

import torch

from masked_dispatch.compiler_internals import register_bool_to_int8_lowering


def teach_inductor() -> None:
    """Register the lowering of `bytes_of` if inductor is loaded. We call this while tracing, to not import inductor."""
    register_bool_to_int8_lowering(torch.ops.masked_dispatch.bytes_of.default)
