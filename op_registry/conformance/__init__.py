"""Conformance tests the laws of the semantics page on samples of every operator that torch knows.

samples.py, own_operators.py, masks.py and shared_operands.py make trials; oracles/ compute the expected results;
laws.py, gradients.py, masked_later.py, storages.py, modes.py and closed.py compare; likely_causes.py says what a rule
states wrongly; trials.py and runner.py run the trials, part.py selects a part of them, and verdict.py sums the outcomes
up. devices/ compares calls on other devices with the CPU. The laws test a *subject* (subject.py); this package imports
no masked tensor.
"""

from op_registry.conformance.checking import check
from op_registry.conformance.subject import Subject
from op_registry.conformance.subjects import find_subject
from op_registry.conformance.verdict import Answer, Verdict

__all__ = ["Answer", "Subject", "Verdict", "check", "find_subject"]
