"""Optimizers whose state changes only where a gradient is valid: torch's own, run on the gradient's elements.

``masked_dispatch.optim.Adagrad``, ``SGD``, ``LazyAdam`` (Adam), ``AdamW``, ``NAdam``, ``RAdam``, ``Adamax``,
``RMSprop``, ``Adadelta`` and ``Rprop`` take what torch's optimizers of these names take, keep the same state under the
same names, and load each other's state dicts. They differ for a plain parameter with a masked (or torch.sparse)
gradient: an element without a gradient keeps its value *and its state*. Its momentum does not continue, its averages
and weights do not decay. A new state begins at zero, as if every earlier gradient had been 0.
``zero_grad(set_to_none=False)`` makes a masked gradient invalid, where torch's makes it valid zeros.

Stock optimizers take masked gradients too, because in-place operators on plain tensors are updates. They differ in time
(their formulas read all of the state) and in the state of elements without a gradient, which decays. Adam and its kind,
and RMSprop with momentum, keep moving such elements, and SGD with momentum never moves them again; they warn. Refused
before their step are Adamax (it would divide 0 by 0), Adadelta (it would move such elements by a quotient of its
averages), ASGD (its result would depend on `foreach`), SparseAdam (it takes only torch's COO), and Rprop, Adafactor,
Muon and LBFGS (an element that the gradient lacks when they make their state would never move). Adafactor, Muon and
SparseAdam refuse partly valid *parameters* too: a step of one element depends on the others.

ASGD, Adafactor, Muon and LBFGS have no such form: ASGD's average of a parameter counts the steps without a gradient,
the state of Adafactor and Muon belongs to the rows and columns of a matrix instead of its elements, and that of LBFGS
to all parameters as one vector.

optimizers.py  a step of torch's optimizers on the elements that have a gradient, and the optimizers with it
stock.py       torch's optimizers and masked tensors: refusals and warnings
"""

from typing import TYPE_CHECKING, NoReturn

from masked_dispatch.optim import stock as stock
from masked_dispatch.optim.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adamax,
    AdamW,
    LazyAdam,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)
from masked_dispatch.tensor.messages import no_such_name

stock.refuse_masked_gradients()

__all__ = ["SGD", "Adadelta", "Adagrad", "AdamW", "Adamax", "LazyAdam", "NAdam", "RAdam", "RMSprop", "Rprop"]


def __dir__() -> list[str]:
    return [*__all__]


# What to write for what torch.optim has beside these, and why.
WORDS = {
    "Adam": "LazyAdam, which is Adam but for elements without a gradient: their state does not decay",
    "SparseAdam": "LazyAdam, which takes every layout and dense gradients too",
    "ASGD": "SGD or LazyAdam: its average of a parameter counts the steps without a gradient",
    "Adafactor": "LazyAdam or Adagrad: its state belongs to rows and columns, not to elements",
    "Muon": "LazyAdam or SGD: its state belongs to a matrix, not to elements",
    "LBFGS": "LazyAdam or SGD: its state belongs to all parameters as one vector",
}

if not TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> NoReturn:
        no_such_name(__name__, name, WORDS, __all__)
