"""Named exceptions: exactly what fails, under which law, and why. A gap that no longer fails is itself a failure.

Gaps of a rule hang on the rule (``rule.gap("P6", why=…)``); the table here is for entries of torch's database whose
trouble lies elsewhere (in torch, or between several rules). `where` narrows a gap to trials whose description has all
of its words: ``"float32 sample 3 half"``.
"""

from __future__ import annotations

from collections.abc import Sequence

from op_registry.conformance.own_operators import RegisteredOperator
from op_registry.conformance.sample import Operator
from op_registry.conformance.samples import DatabaseOperator, overloads_called
from op_registry.registry import registry
from op_registry.resolve import resolve
from op_registry.rule import Gap

_WRITTEN_AFTERWARDS = (
    "an out= that overlaps an input is not refused: it is written after the result is computed, and right"
)
_CAST = (
    "an out= of a dtype that torch's kernel refuses, and its meta kernel does not, is cast to, as elementwise out= is"
)
_POSITIONS = (
    "a plain tensor repeated as masked numbers say is made of positions, which are plain: whose number is invalid is "
    "left out, and everything else is valid"
)
_UNKNOWN_START = (
    "a start that is known only when the graph runs gives data and mask sizes of which nobody knows the same"
)
_HALF_SCORES = "scores of half precision are off by more than rounding before their exponential, in plain torch too"
_LOW_RANK = (("P2", "complex64"), ("P3", "complex64"), ("P3", "complex128"))
_ILL_CONDITIONED = "the subspace iteration is off by more than rounding where sums run in another order"
_PHASE = "complex singular vectors are defined up to a phase, on which result and derivative depend"
_NO_FREEDOM = (
    "n equals the correction: torch's formula gives ±inf, and the derivative through the moments inf - inf, NaN"
)
_NARROW_DIVISOR = (
    "the weights are float32, in which torch's divisor, a small difference of large sums, keeps three digits; here it "
    "is computed in the data's dtype"
)
_FIXED_POINT = "torch's kernel for uint8 rounds its weights to fixed point, and is off by one from what they give"

_COMPLEX_BY_ZERO = (
    "torch.masked divides a complex sum by n - correction = 0, whose imaginary part 0 / 0 it makes infinite"
)

_NORM_AT_ZERO = "torch's formula gives a norm at 0 a second derivative of NaN; by segments it is 0, as the first is"

_COMPLEX_RENORM = "torch's derivative of renorm by the greatest complex magnitude is NaN; by segments it is a number"

_ALIGNED = (
    "a sum over fifty steps in float32: torch's own gradient is 7e-5 off the one in float64, and a softmax that rounds "
    "otherwise in its last digit moves it by 5e-5"
)

_RESIZED = "torch's addbmm_ resizes a self that would have to broadcast; here that is refused, as by any in-place form"
_STORED = "x.to_sparse() stores what is valid; only torch's own sparse tensor, which the oracle has in mind, is refused"

TABLE: dict[str, tuple[Gap, ...]] = {
    "cat": (Gap("P1", _WRITTEN_AFTERWARDS, "error 6"), Gap("P1", _WRITTEN_AFTERWARDS, "error 7")),
    "aminmax": (Gap("P1", _CAST, "error 3"),),
    "complex": (Gap("P1", _CAST, "error 2"),),
    "cov": tuple(
        Gap(law, _NARROW_DIVISOR, f"{dtype} sample 37 {kind}")
        for dtype in ("float64", "complex128")
        for law, kind in (("P1", "stored"), ("P2", "stored"), ("P2", "half_first"))
    ),
    "nn_functional_interpolate_bilinear": (Gap("P1", _FIXED_POINT, "uint8 stored"),),
    "nn_functional_upsample_bilinear": (Gap("P1", _FIXED_POINT, "uint8 stored"),),
    "linalg_norm_subgradients_at_zero": tuple(
        Gap("P5", _NORM_AT_ZERO, storage) for storage in ("csr", "bsr", "hybrid")
    ),
    "narrow": (Gap("P7", _UNKNOWN_START, "aten.narrow.Tensor"),),
    "nn_functional_scaled_dot_product_attention": (
        Gap("P2", _HALF_SCORES, "bfloat16"),
        Gap("P2", _HALF_SCORES, "float16"),
    ),
    "pca_lowrank": (
        *(Gap(law, _PHASE, d) for law, d in _LOW_RANK),
        Gap("P2", _ILL_CONDITIONED, "complex128 sample 1 half_first"),
    ),
    "svd_lowrank": tuple(Gap(law, _PHASE, d) for law, d in _LOW_RANK),
    "var": (Gap("P5", _NO_FREEDOM, "float64 sample 6 half"),),
    "var_mean": (Gap("P5", _NO_FREEDOM, "float64 sample 6 half"),),
    **{
        name: tuple(Gap("P2", _COMPLEX_BY_ZERO, f"{dtype} sample 14 half") for dtype in ("complex64", "complex128"))
        for name in ("masked_var", "masked_std")
    },
    "addbmm+inplace": tuple(Gap(law, _RESIZED) for law in ("P1", "P2", "P3", "P5")),
    "nn_functional_ctc_loss": (Gap("P4", _ALIGNED, "float32"),),
    "renorm": tuple(Gap(law, _COMPLEX_RENORM, "complex64 sample 3") for law in ("P3", "P4")),
    "to_sparse": (Gap("P2", _STORED, ""),),
    "repeat_interleave": (Gap("P8", _POSITIONS, "sample 3 half_others"),),
}


def gaps_of(operator: Operator) -> Sequence[Gap]:
    """Every gap that is named for an operator: in the table, and on the rules that it calls."""
    found = list(TABLE.get(operator.name, ()))
    if not any(registry.get(op).gaps for op in registry):  # type: ignore[union-attr]
        return found
    if isinstance(operator, RegisteredOperator):
        overloads: Sequence[object] = (operator.op,)
    elif isinstance(operator, DatabaseOperator):
        overloads = overloads_called(operator.name.partition("+")[0])
    else:
        overloads = ()
    rules = {id(rule): rule for op in overloads if (rule := resolve(op).rule) is not None}  # type: ignore[arg-type]
    return [*found, *(gap for rule in rules.values() for gap in rule.gaps)]


def covers(gap: Gap, law: str, description: str) -> bool:
    """Whether the gap speaks of a trial of `law` that is described so."""
    return gap.law == law and set(gap.where.split()) <= set(description.split())
