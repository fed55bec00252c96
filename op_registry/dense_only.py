"""Why an operator needs dense storage where no lowering is written for it: a reason for each category."""

from __future__ import annotations

from op_registry.rule import Rule

WHY_DENSE = {
    "contraction": "it sums products over index tuples, and no kernel does so for sparse operands of this operator",
    "attention": "scores are a product of every query with every key",
    "pooling": "a window reads neighbours by their index, stored or not",
    "recurrent": "a step reads the state that the step before it left, whether it was stored or not",
    "random": "a number is drawn for every element, stored or not, so that a mask does not change the stream",
    "loss": "it is computed from operands that are aligned densely",
    "derivative": "the formula of the derivative is written for dense operands",
    "sorting": "it orders elements across what is stored",
    "accumulation": "its contributions are scattered to places that are computed, and need not be stored",
    "assignment": "it writes to places that are computed, and need not be stored",
    "indexing": "it reads places that are computed, and need not be stored",
    "movement": "it moves elements to places for which no layout has a rule of its own",
    "join": "it joins operands whose places are stored differently",
    "opaque": "it works on a whole slice at once, in which nothing may be missing",
}


def why_dense(rule: Rule) -> str:
    """Why an operator whose rule has no lowering is stored densely."""
    return WHY_DENSE.get(rule.category.name, f"no lowering is written for it, nor for {rule.category.name} rules")
