"""Attention.

Law: a softmax over the valid keys of each query, and their values weighted by it. A query without a valid key has no
valid result.

    rules     dense storage
    packed    packed batches, one sequence at a time
    backward  torch's gradient formula, called by hand
"""

from op_registry.ops.attention import backward, packed, rules

__all__ = ["backward", "packed", "rules"]
