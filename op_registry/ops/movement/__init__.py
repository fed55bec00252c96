"""Movement: operators that put elements elsewhere and compute nothing.

Law: an element moves together with its validity. Elements that the operator makes up itself, as padding, are valid.

    views           views of a tensor's own memory
    rules           flip, roll, repeat, triangles, padding
    joins           cat, stack, where
    sparse          the same on sparse storage
    sparse_choice   where, on sparse storage
    sparse_windows  padding and unfold, on sparse storage
    permuted        the same where dense dimensions stand before sparse ones
    backward        torch's gradient formulas, called by hand
"""

from op_registry.authoring import Sparse, first_of, without_op
from op_registry.ops.movement import backward, joins, permuted, rules, sparse, sparse_choice, sparse_windows, views

__all__ = ["backward", "joins", "permuted", "rules", "sparse", "sparse_choice", "sparse_windows", "views"]

# A quarter turn is a permutation and a flip.
rules.flip.lowering(Sparse)(first_of(sparse.rot90, without_op(sparse.flip)))
