"""Conformance tests the laws of the semantics page on samples of every operator that torch knows.

A *law* (law.py, laws/) says what is true of a *case*: of a call of an operator under masks, of a
padded batch, of a graph, on a device. A case has a *subject* (subject.py), the masked tensor that is tested; this
package imports none. compare.py says how two outcomes differ.

samples.py, own_operators.py, variations.py and masks.py make calls (sample.py); plain_torch.py and oracles/ compute
what is expected of them; trials.py runs the laws, gaps.py lists exceptions, and verdict.py sums the outcomes up.
reference_device.py makes devices. python_level.py puts functions that torch writes in Python to the laws
(python_calls.py, python_distributions.py). mutants.py tests the laws themselves, on rules made wrong (mutant_ways.py,
mutant_dimensions.py).
"""

from op_registry.conformance.subject import Subject, find_subject
from op_registry.conformance.trials import check
from op_registry.conformance.verdict import Answer, Verdict

__all__ = ["Answer", "Subject", "Verdict", "check", "find_subject"]
