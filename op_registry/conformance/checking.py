"""`check`: run the laws on one operator, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

from op_registry.conformance.samples import operators_of
from op_registry.conformance.trials import ALL_LAWS, Settings, run_operator
from op_registry.conformance.verdict import Verdict

# The storages on which we test P3, P5 and "later" besides dense: one stores single elements, one stores blocks.
ALSO_STORED = ("csr", "bsr")


def check(
    op: OpOverload | OpOverloadPacket | Callable[..., Any] | str,
    *,
    subject: str | None = None,
    laws: Sequence[str] = ALL_LAWS,
    most: int | None = 4,
    seed: int = 0,
    allow: Mapping[str, str] | None = None,
    allow_broken: Mapping[str, str] | None = None,
) -> Verdict:
    """Run the laws on an operator: one of torch's, by overload, packet, function or name, or one of your own.

    op            the operator; for another library's operator, this runs every overload that has a rule, and its
                  in-place and out= forms
    subject       the masked tensor to test (see :func:`find_subject`)
    laws          P1 to P9, "dims" and "later"; the verdict says which of them don't apply to the operator
    most          the most samples of each operator, chosen for as many kinds of call as possible; None runs them all
    allow         laws that may be undecided, each with the reason: ``allow={"P7": "it has no fake implementation"}``
    allow_broken  laws that may be broken, each with the reason; to except single trials, use ``rule.gap``

    An unneeded allowance makes the verdict false. Samples of your own operator come from ``rule.samples``, or from its
    schema. Raises TypeError for an object that is no operator, LookupError for an operator without a rule or if there
    is no masked tensor to test, ValueError for an unknown law.
    """
    unknown = [law for law in (*laws, *(allow or {}), *(allow_broken or {})) if law not in ALL_LAWS]
    if unknown:
        raise ValueError(f"unknown law {', '.join(unknown)}; the laws are {', '.join(ALL_LAWS)}")
    settings = Settings(subject=subject, laws=tuple(laws), most=most, seed=seed, also_stored=ALSO_STORED)
    reports = tuple(run_operator(operator, settings) for operator in operators_of(op))
    return Verdict(reports, dict(allow or {}), dict(allow_broken or {}))
