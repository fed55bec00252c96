"""Random numbers.

Law: torch's stream of random numbers is that of the full tensor, whatever is masked; what is drawn from an invalid
parameter is invalid.

    rules     dense storage
    packed    dropout on packed batches
    backward  torch's gradient formulas, called by hand
"""

from op_registry.ops.random import backward, packed, rules

__all__ = ["backward", "packed", "rules"]
