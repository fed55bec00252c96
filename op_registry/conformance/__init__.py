"""Conformance: the laws of the semantics page, tried on samples of every operator that torch knows.

samples.py, own_operators.py and masks.py make trials, oracles/ say what has to come out, laws.py, gradients.py,
storages.py, modes.py and closed.py compare, trials.py and runner.py run them, part.py a part of them, verdict.py says
what came of it. devices/ compares calls on other devices with the CPU. What is tried is a *subject* (subject.py); no
masked tensor is imported here.
"""

from op_registry.conformance.checking import check
from op_registry.conformance.subject import Subject
from op_registry.conformance.subjects import find_subject
from op_registry.conformance.verdict import Answer, Verdict

__all__ = ["Answer", "Subject", "Verdict", "check", "find_subject"]
