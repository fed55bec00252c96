"""The fastest representation of a masked tensor: by shape, density and operator, from measured crossovers.

A crossover is a density: below it the operator is quicker on a sparse form, above it on dense storage. There is one for
each family of operators and each size (crossovers.py, measured and written by `python -m benchmarks.choice --write`).
A size is the side of a square matrix with the same number of elements; the nearest measured one is used.

The cost of the conversion is not counted: it equals some tens of elementwise operators, so convert a tensor that is
used again.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from masked_dispatch import scopes
from masked_dispatch.api.construct import as_masked_tensor
from masked_dispatch.api.crossovers import CROSSOVERS
from masked_dispatch.autograd.engine import masked_record
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry import resolve
from op_registry.records.dense import Dense
from op_registry.rule import in_dispatcher
from op_registry.sparse.compressed import CSC, CSR, PACKED
from op_registry.sparse.layout import COO, Layout
from op_registry.sparse.record import Sparse

# A family, one of torch's functions or aten overloads, or the name of one.
Operator = str | Callable[..., Any]
Structure = Literal["elements", "rows"]
Table = Mapping[str, Mapping[int, float]]

# The families: the operator that is measured, and what else belongs to the family.
FAMILIES = {
    "arithmetic": "x * y under one mask, and whatever is as cheap for an element",
    "transcendental": "x.exp(), and whatever costs several times an addition",
    "reduction": "x.sum(-1)",
    "slices": "x.softmax(-1): normalizations, scans, sorts",
    "product": "x @ a dense matrix with 64 columns",
}

COSTLY = {
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin",
    "acos", "atan",
    "asinh", "acosh", "atanh", "atan2", "erf", "erfc", "erfinv", "sigmoid", "logit", "pow", "float_power",
    "softplus", "gelu", "silu", "mish", "elu", "selu", "celu", "lgamma", "digamma", "polygamma", "logaddexp",
    "logaddexp2", "log_sigmoid", "logsigmoid", "xlogy", "i0", "sinc",
}  # fmt: skip

PRODUCTS = {"mm", "bmm", "mv", "matmul", "linear", "addmm", "addmv", "addbmm", "baddbmm"}

OF_CATEGORY = {
    "reduction": "reduction", "normalization": "slices", "scan": "slices", "sorting": "slices",
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """A representation and the reason for it. `choice.of(x)` converts a masked tensor to it.

    layout      torch.strided, a sparse layout, or torch.jagged (packed rows)
    sparse_dim  number of leading sparse dimensions; None: all
    why         the reason, as text
    all_valid   whether no mask is stored, because everything is valid
    """

    layout: torch.layout | Layout
    sparse_dim: int | None
    why: str
    all_valid: bool = False

    def __str__(self) -> str:
        dims = "" if self.sparse_dim is None else f" with sparse_dim={self.sparse_dim}"
        return f"{self.layout}{dims}: {self.why}"

    def of(self, x: MaskedTensor) -> MaskedTensor:
        """The same tensor in this representation; differentiable."""
        if self.all_valid and density_of(x) == 1:  # `x` need not be the tensor that was chosen for
            return as_masked_tensor(x.to_dense().get_data())
        return x.to_layout(self.layout, sparse_dim=self.sparse_dim)


Rule = Callable[[tuple[int, ...], float, str, Structure], torch.layout | Layout | Choice]
_override: contextvars.ContextVar[torch.layout | Layout | Table | Rule | None] = contextvars.ContextVar(
    "masked_dispatch.storage.choosing", default=None
)
scopes.add_kind(_override, None)


@contextlib.contextmanager
def choosing(by: torch.layout | Layout | Table | Rule) -> Iterator[None]:
    """Override, inside the block, the measured crossovers that `choose` uses.

    by  a layout: always that one. A table {family: {size: density}}, with `", by row"` appended to a family for whole
        rows: missing families use the measured crossovers. A function of shape, density, family and structure
        ("elements" or "rows") that returns a layout or a Choice.

    Raises TypeError for anything else.
    """
    if not (isinstance(by, (torch.layout, Layout, dict)) or callable(by)):
        raise TypeError(
            f"choosing takes a layout (torch.strided, torch.sparse_csr …), a table {{family: {{size: density}}}} "
            f"or a function, not {by!r}"
        )
    scopes.remember()
    token = _override.set(by)
    try:
        yield
    finally:
        _override.reset(token)


def family_of(op: Operator) -> str | None:
    """The family of one of torch's functions, an aten overload, or the name of one; None if no family is measured.

    Raises ValueError for a name that is neither an operator of torch nor a family.
    """
    if isinstance(op, str) and op in FAMILIES:
        return op
    name = op if isinstance(op, str) else getattr(op, "__name__", str(op)).partition(".")[0]
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        raise ValueError(
            f"{op!r} is not an operator of torch; pass one of torch's functions, its name, or a family: "
            f"{', '.join(FAMILIES)}"
        )
    overloads = [getattr(packet, o) for o in packet.overloads()]
    rules = [resolve(o).rule for o in overloads if in_dispatcher(o)]
    category = next((rule.category.name for rule in rules if rule is not None), "")
    if category in ("elementwise", "choice", "factory"):
        return "transcendental" if name in COSTLY else "arithmetic"
    return "product" if name in PRODUCTS else OF_CATEGORY.get(category)


def choose(
    x: Tensor | Sequence[int],
    density: float | None = None,
    op: Operator = "arithmetic",
    *,
    structure: Structure | None = None,
    dim: int = -1,
) -> Choice:
    """The representation in which an operator is fastest.

    x          a masked tensor, or the shape of one
    density    the fraction of valid elements; computed from the tensor by default
    op         one of torch's functions or its name, or a family: arithmetic, transcendental, reduction, slices, product
    structure  "rows" if each row of the last dimension is entirely valid or entirely invalid, else "elements";
               computed from the tensor by default
    dim        the dimension that a reduction or softmax runs over: decides between CSR and CSC

    Raises ValueError for an unknown operator, a density outside [0, 1], or a shape without a density.
    """
    shape = tuple(x.shape) if isinstance(x, Tensor) else tuple(x)
    if isinstance(x, Tensor):
        density = density_of(x) if density is None else density
        structure = structure_of(x) if structure is None else structure
    if density is None or not 0 <= density <= 1:
        raise ValueError(
            f"choose needs the density of a tensor of shape {shape}: a number between 0 and 1, not {density}"
        )
    structure = structure or "elements"
    family = family_of(op)
    override = _override.get()
    if isinstance(override, (torch.layout, Layout)):
        return Choice(override, None, "set by choosing(...)")
    if callable(override):
        chosen = override(shape, density, family or str(op), structure)
        return chosen if isinstance(chosen, Choice) else Choice(chosen, None, "set by choosing(...)")
    if family is None:
        return Choice(torch.strided, None, f"no crossover is measured for {op}")
    if density == 1 or not shape:
        why = "every element is valid: stored without a mask" if density == 1 else "there are no dimensions"
        return Choice(torch.strided, None, why, all_valid=density == 1)
    crossover = crossover_of(family, shape, structure, override or {})
    if density >= crossover:
        side = f"quicker from a density of {crossover:.2g} on" if crossover else "quicker at every density"
        return Choice(torch.strided, None, f"{family} at this size is {side}")
    layout, sparse_dim = sparse_form(shape, structure, dim, family)
    return Choice(layout.public, sparse_dim, f"{family} at this size is quicker below a density of {crossover:.2g}")


def crossover_of(family: str, shape: tuple[int, ...], structure: Structure, table: Table) -> float:
    """The density below which a sparse form is quicker, at the nearest size that was measured."""
    key = family if structure == "elements" else f"{family}, by row"
    measured = table.get(key) or CROSSOVERS[key]
    size = math.log(max(math.prod(shape), 1)) / 2
    return measured[min(measured, key=lambda n: abs(math.log(n) - size))]


def sparse_form(shape: tuple[int, ...], structure: Structure, dim: int, family: str) -> tuple[Layout, int | None]:
    """The sparse layout for a shape, and its number of sparse dimensions (None: all)."""
    if structure == "rows" and len(shape) > 2:
        return PACKED, None
    if structure == "rows" and len(shape) == 2:
        return COO, 1
    if len(shape) == 1:
        return COO, None
    by_column = family in ("reduction", "slices") and dim % len(shape) == len(shape) - 2
    return (CSC if by_column else CSR), None


def density_of(x: Tensor) -> float:
    """The fraction of valid elements."""
    if not isinstance(x, MaskedTensor):
        return 1.0
    return int(x.count()) / x.numel() if x.numel() else 1.0


def structure_of(x: Tensor) -> Structure:
    """Whether rows of the last dimension are entirely valid or entirely invalid ("rows") or mixed ("elements")."""
    record = masked_record(x)
    if record is None or x.ndim < 2:
        return "elements"
    if isinstance(record, Sparse):
        flat = record.flat
        by_row = bool(record.dense_sizes) and (flat.validity is None or _by_row(flat))
    else:
        by_row = record.validity is not None and _by_row(record)
    return "rows" if by_row else "elements"


def _by_row(record: Dense) -> bool:
    validity = record.validity
    assert validity is not None
    if validity.shape[-1:] == (1,) or validity.stride(-1) == 0:
        return True
    return bool((validity == validity[..., :1]).all())


def bytes_of(x: Tensor) -> int:
    """The memory of a tensor: values, validity and indices."""
    return x.stored_bytes if isinstance(x, MaskedTensor) else x.nbytes


def explain(x: Tensor) -> str:
    """Storage and size in bytes of a tensor, and what `choose` picks for each family of operators, and why."""
    density, structure = density_of(x), structure_of(x)
    stored = x.storage_layout if isinstance(x, MaskedTensor) else x.layout
    nnz = f", {x.nnz:,} stored" if isinstance(x, SparseMaskedTensor) else ""
    rows = ", whole rows" if structure == "rows" else ""
    lines = [
        f"{tuple(x.shape)} {x.dtype}, stored as {stored}{nnz}: {bytes_of(x):,} bytes",
        f"{density:.2%} valid{rows}",
    ]
    for family, example in FAMILIES.items():
        chosen = choose(x, density, family, structure=structure)
        unchanged = " (as it is)" if chosen.layout is stored else ""
        lines.append(f"  {family:<14} {chosen}{unchanged}   [{example}]")
    return "\n".join(lines)
