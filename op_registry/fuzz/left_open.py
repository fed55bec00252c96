"""Steps that programs leave out: writes whose result torch leaves open, reads that it gets wrong, very long calls."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from op_registry.fuzz.programs import Step

# In-place operators that torch doesn't check for operands that overlap their target: whether they read new or old
# elements there depends on the kernel.
UNCHECKED = re.compile(
    "masked_scatter_|cumsum_|cumprod_|addmm_|addmv_|addbmm_|baddbmm_|addr_|renorm_|tril_|triu_|ldexp_"
)
# Code that writes to an operand and reads the others themselves, not views of them.
OF_WHOLE_OPERANDS = re.compile(r"(\{0\}\.\w+_|torch\.ops\.aten\.\w+\.\w+)\((\{0\}, )?\{1\}[^.\[]*\)$")
GREATEST_DEGREE = 10_000


def left_open(step: Step, values: Mapping[str, Tensor]) -> bool:
    """Whether a step writes to a tensor several of whose elements share memory, or may read what it overwrites.

    torch: "in-place operations on such tensors, especially ones that are vectorized, may result in incorrect behavior"
    (Tensor.unfold, torch.as_strided). torch refuses operands that overlap the target only if it can tell this by their
    strides (at::get_overlap_status), and only in some operators.
    """
    target, *others = (values[name] for name in step.operands)
    if shares_elements(target):
        return True
    if not any(_same_memory(other, target) for other in others):
        return False
    known = OF_WHOLE_OPERANDS.match(step.code) and not UNCHECKED.search(step.code)
    return not (known and all(_is_packed(t) for t in (target, *others)))


def misread(step: Step, values: Mapping[str, Tensor]) -> bool:
    """Whether torch (2.13, 2.14) reads memory outside the operand.

    Its median of an expanded dimension does, and so does the derivative of pdist without rows, which kills the process.
    """
    if "median" in step.code:
        return 0 in values[step.operands[0]].stride()
    return "pdist" in step.code and values[step.operands[0]].shape[:1] == (0,)


def endless(step: Step, values: Mapping[str, Tensor]) -> bool:
    """Whether torch takes minutes: a polynomial takes as many steps as its degree, which is the last operand."""
    if "_polynomial_" not in step.code:
        return False
    degrees = values[step.operands[-1]]
    return bool((degrees.isfinite() & (degrees.abs() > GREATEST_DEGREE)).any())


def shares_elements(tensor: Tensor) -> bool:
    """Whether several elements may share an address: a stride is smaller than the extent of the inner dimensions."""
    extent = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= extent:
            return tensor.numel() > 0
        extent += stride * (size - 1)
    return False


def _is_packed(tensor: Tensor) -> bool:
    """Whether the elements fill a range of memory without gaps or overlaps."""
    span = sum((n - 1) * s for s, n in zip(tensor.stride(), tensor.shape, strict=True)) + 1
    return not shares_elements(tensor) and span == tensor.numel()


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
