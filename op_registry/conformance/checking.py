"""`check`: one operator's laws, here and now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch._ops import OpOverload, OpOverloadPacket

from op_registry.conformance.samples import operators_of
from op_registry.conformance.trials import ALL_LAWS, Settings, run_operator
from op_registry.conformance.verdict import Verdict

# The storages in which P3 and P5 are tried, beside dense storage: one with single elements, one with blocks.
ALSO_STORED = ("csr", "bsr")


def check(
    op: OpOverload | OpOverloadPacket | str,
    *,
    subject: str | None = None,
    laws: Sequence[str] = ALL_LAWS,
    most: int | None = 4,
    seed: int = 0,
    allow: Mapping[str, str] | None = None,
    allow_broken: Mapping[str, str] | None = None,
) -> Verdict:
    """Run the laws on an operator: one of torch's, by overload, packet or name, or one of your own that has a rule.

    op            of another library's operator each overload that has a rule, and its in-place and out= forms
    subject       the masked tensor that is tested (see :func:`find_subject`)
    laws          P1 to P8; those that do not apply to the operator say so
    most          samples of each operator, of as many different shapes of call as there are; None runs them all
    allow         laws that may be undecided, each with the reason: ``allow={"P7": "it has no fake implementation"}``
    allow_broken  laws that may be broken, each with the reason; ``rule.gap`` names single trials, more exactly

    An allowance that turns out not to be needed makes the verdict false. Samples of your own operator come from
    ``rule.samples``, or are made from its schema. Raises LookupError for an operator without a rule, and where there
    is no masked tensor to test; ValueError for a law that does not exist.
    """
    unknown = [law for law in (*laws, *(allow or {}), *(allow_broken or {})) if law not in ALL_LAWS]
    if unknown:
        raise ValueError(f"there is no law {', '.join(unknown)}; the laws are {', '.join(ALL_LAWS)}")
    settings = Settings(subject=subject, laws=tuple(laws), most=most, seed=seed, also_stored=ALSO_STORED)
    reports = tuple(run_operator(operator, settings) for operator in operators_of(op))
    return Verdict(reports, dict(allow or {}), dict(allow_broken or {}))
