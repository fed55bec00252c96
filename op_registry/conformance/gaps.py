"""Named exceptions: exactly what fails, under which law, and why. A gap that no longer fails is itself a failure.

A rule declares its own gaps (``rule.gap("P6", why=…)``). The table here is for entries of torch's database whose
failures have another cause: torch itself, or several rules together. `where` narrows a gap to trials whose description
contains all of its words: ``"float32 sample 3 half"``, and for P7 the mode.
"""

from __future__ import annotations

from collections.abc import Sequence

from op_registry.conformance.law import Status
from op_registry.conformance.own_operators import RegisteredOperator
from op_registry.conformance.sample import Operator
from op_registry.conformance.samples import DatabaseOperator, overloads_called
from op_registry.registry import registry
from op_registry.resolve import resolve
from op_registry.rule import Gap

_WRITTEN_AFTERWARDS = (
    "an out= that overlaps an input does not raise: it is written after the result is computed, so the result is right"
)
_CAST = (
    "torch's kernel rejects this out= dtype, its meta kernel does not; here the result is cast, as for elementwise out="
)
_POSITIONS = (
    "repeating a plain tensor a masked number of times gathers it at plain indices: an element with an invalid number "
    "is dropped, and the remaining result is plain and valid"
)
_UNKNOWN_START = (
    "a start that is known only at run time gives data and mask unbacked sizes, which the compiler cannot prove equal"
)
_ON_PLAIN = "torch's algorithm runs on the data of a valid matrix, and plain operators multiply 0 by infinity"
_COMPLEX = ("complex64", "complex128")
_PHASE = "complex singular vectors are defined up to a phase, on which result and derivative depend"
_NO_FREEDOM = (
    "n equals the correction: torch's formula gives +-inf, and the derivative through the moments is inf - inf, NaN"
)
_NARROW_DIVISOR = (
    "the weights are float32, in which torch's divisor, a small difference of large sums, has three correct digits; "
    "here it is computed in the data's dtype"
)
_FIXED_POINT = "torch's uint8 kernel rounds its weights to fixed point, so that its results are off by one"

_BY_PRODUCTS = (
    "asked for matrix products, torch and the rule subtract squares of the vectors, which leaves few digits of a small "
    "distance"
)
_COMPLEX_BY_ZERO = (
    "torch.masked divides a complex sum by n - correction = 0, and returns inf for the imaginary part 0 / 0"
)

_NORM_AT_ZERO = (
    "torch's formula for a norm has the second derivative NaN at 0; the segment reduction's is 0, like its first"
)

_COMPLEX_RENORM = (
    "torch's derivative of renorm by the greatest complex magnitude is NaN; the segment reduction's is finite"
)

_RESIZED = "torch's addbmm_ resizes a self that would have to broadcast; here it raises, as any in-place form does"
_STORED = "x.to_sparse() on a masked tensor stores its valid elements; the oracle refuses torch's own sparse tensor"
_AMPLIFIED = (
    "torch's samples of ctc_loss begin with a log_softmax, which sparse storage rounds otherwise in the last place; "
    "fifty steps in float32 amplify that to 5e-5 (torch's own gradient is 7e-5 off the one in float64)"
)

_DRAWN_BY_ROWS = "packed rows have one order, that of batch, time and features, in which random numbers are drawn"
_STRIDED = "the kernel takes scales in one memory order; dense storage of a batch with time first has another one"

_UNCHECKED = "torch's kernels by chunks accept weights for too few classes; here they are refused, as in cross_entropy"

_ENDED = "torch's graph of multilabel_margin_loss goes on after the -1 that ends a list of classes"

TABLE: dict[str, tuple[Gap, ...]] = {
    "cat": (Gap("P1", _WRITTEN_AFTERWARDS, "error 6"), Gap("P1", _WRITTEN_AFTERWARDS, "error 7")),
    "complex": (Gap("P1", _CAST, "error 2"),),
    "cov": tuple(
        Gap(law, _NARROW_DIVISOR, f"{dtype} sample 37 {kind}")
        for dtype in ("float64", "complex128")
        for law, kind in (("P1", "stored"), ("P2", "half_first"))
    ),
    "nn_functional_interpolate_bilinear": (Gap("P1", _FIXED_POINT, "uint8 stored"),),
    "nn_functional_upsample_bilinear": (Gap("P1", _FIXED_POINT, "uint8 stored"),),
    "linalg_norm_subgradients_at_zero": tuple(
        Gap("P5", _NORM_AT_ZERO, storage) for storage in ("csr", "bsr", "hybrid")
    ),
    "dist": tuple(Gap("P5", _NORM_AT_ZERO, f"sample 0 itself {storage}") for storage in ("csr", "bsr")),
    "narrow": (Gap("P7", _UNKNOWN_START, "aten.narrow.Tensor"),),
    **{
        name: (
            Gap("P2", _PHASE, "complex64"),
            *((Gap("P2", _PHASE, "complex128 sample 1 half_first"),) if name == "pca_lowrank" else ()),
            Gap("later", _ON_PLAIN),
            # torch refuses to differentiate a sum over the vectors if the product has no invalid element.
            *(Gap("P3", _PHASE, f"{d} {masks}") for d in _COMPLEX for masks in ("half_first", "half_others")),
        )
        for name in ("pca_lowrank", "svd_lowrank")
    },
    **{
        name: tuple(Gap("P5", _NO_FREEDOM, f"float64 sample 6 {masks}") for masks in ("half", "rows"))
        for name in ("var", "var_mean")
    },
    **{
        name: tuple(
            Gap("P2", _COMPLEX_BY_ZERO, f"{d} sample 14 {masks}") for d in _COMPLEX for masks in ("half", "rows")
        )
        for name in ("masked_var", "masked_std")
    },
    "addbmm+inplace": tuple(Gap(law, _RESIZED) for law in ("P1", "P2", "P3", "P5")),
    "cdist": (Gap("P2", _BY_PRODUCTS, "float32 sample 34 half_others"),),
    "renorm": tuple(Gap(law, _COMPLEX_RENORM, "complex64 sample 3") for law in ("P3", "P4")),
    "nn_functional_ctc_loss": tuple(
        Gap(law, _AMPLIFIED, f"float32 sample 0 one_hole {storage}")
        for law, storages in (("P3", "csr bsr"), ("P4", "coo csr csc bsr bsc csr_first"))
        for storage in storages.split()
    ),
    "nn_functional_multilabel_margin_loss": (Gap("P9", _ENDED, "aot_eager"),),
    **{
        f"nn_functional_linear_cross_entropy_{name}": tuple(
            Gap(law, _UNCHECKED, f"sample {number} shared") for law in ("P2", "P3", "P5", "later") for number in numbers
        )
        for name, numbers in (("chunked", (57, 71, 92)), ("chunked_none", (29,)))
    },
    "nn_functional_dropout": (Gap("P4", _DRAWN_BY_ROWS, "time_first_packed"),),
    "torch__scaled_mm_v2": (Gap("P4", _STRIDED, "time_first_packed"),),
    "to_sparse": (Gap("P2", _STORED, ""),),
    "repeat_interleave": (Gap("P8", _POSITIONS, "sample 3 half_others"),),
}


def gaps_of(operator: Operator) -> Sequence[Gap]:
    """Every gap of an operator: from the table, and from the rules of the overloads that it calls."""
    in_table = list(TABLE.get(operator.name, ()))
    if not any(rule.gaps for rule in registry.rules()):
        return in_table
    if isinstance(operator, RegisteredOperator):
        overloads: Sequence[object] = (operator.op,)
    elif isinstance(operator, DatabaseOperator):
        overloads = overloads_called(operator.name.partition("+")[0])
    else:
        overloads = ()
    rules = {id(rule): rule for op in overloads if (rule := resolve(op).rule) is not None}  # type: ignore[arg-type]
    return [*in_table, *(gap for rule in rules.values() for gap in rule.gaps)]


def covers(gap: Gap, law: str, description: str) -> bool:
    """Whether the gap covers a trial of `law` with this description."""
    return gap.law == law and set(gap.where.split()) <= set(description.split())


# --------------------------- which failures of an operator its named gaps cover, and which of these gaps no longer fail


class GapTracker:
    """The gaps of an operator, with a record of which gaps trials tested and which still fail."""

    def __init__(self, gaps: Sequence[Gap]) -> None:
        self.gaps = gaps
        self.tested: set[int] = set()
        self.failed: set[int] = set()

    def judged(self, law: str, description: str, status: Status, message: str) -> tuple[Status, str]:
        """A trial's outcome, with the status "gap" if a gap covers its failure."""
        covering = [n for n, gap in enumerate(self.gaps) if covers(gap, law, description)]
        if status != "not asked":
            self.tested.update(covering)
        if status not in ("broken", "error", "refused") or not covering:
            return status, message
        self.failed.update(covering)
        return "gap", f"{self.gaps[covering[0]].why} ({message})"

    def closed(self) -> list[Gap]:
        """Gaps that were tested and no longer fail."""
        return [self.gaps[n] for n in sorted(self.tested - self.failed)]
