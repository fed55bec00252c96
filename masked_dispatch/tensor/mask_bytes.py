"""A bool mask becomes int8 in a graph.

Inductor loads bool into vectors one byte at a time, which is slower than all the arithmetic of a masked mean. A mask
that is an input of a graph is therefore converted by an operator of its own (`masked_dispatch::bytes_of`, a copy of one
byte per element); one that the graph computes, such as a comparison, is converted where it is computed and never stored
as bool.
"""

from __future__ import annotations

import torch

from masked_dispatch.compiler_internals import register_bool_to_int8_lowering


def teach_inductor() -> None:
    """Register the lowering of `bytes_of` if inductor is loaded. Called while tracing: importing it would be slow."""
    register_bool_to_int8_lowering(torch.ops.masked_dispatch.bytes_of.default)
