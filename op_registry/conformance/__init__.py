"""Conformance: the laws of the semantics page, tried on samples of every operator that torch knows.

samples.py and masks.py make trials, oracles/ say what has to come out, laws.py, gradients.py and modes.py compare,
trials.py and runner.py run them. What is tried is a *subject* (subject.py); no tensor subclass is imported here.
"""

from op_registry.conformance.checking import Verdict, check
from op_registry.conformance.subject import Subject, find_subject

__all__ = ["Subject", "Verdict", "check", "find_subject"]
