"""Calls in which one operand is a plain torch.sparse tensor: the law is that of its `.to_dense()`.

A plain tensor is valid everywhere, and a torch.sparse one is 0 where it specifies nothing. So values, masks, gradients
and whether a call raises are those of the same call with the operand stored densely, in whatever storage the masked
operands are, and inside of torch.func's transforms.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import masked_dispatch as md
from op_registry.conformance.compare import difference
from op_registry.conformance.sample import tree_leaves
from storages import block_size

Function = Callable[..., Any]


def uncoalesced(dense: Tensor) -> Tensor:
    """COO that lists each element twice, by halves, whose sum is exact; of integers once as 0."""
    coo = dense.to_sparse()
    values = coo.values()
    parts = (values * 0.5, values * 0.5) if values.is_floating_point() else (values, values * 0)
    return torch.sparse_coo_tensor(coo.indices().repeat(1, 2), torch.cat(parts), dense.shape, check_invariants=False)


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda t: t.to_sparse(),
    "uncoalesced": uncoalesced,
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
    "bsr": lambda t: t.to_sparse_bsr(block_size(t)),
    "bsc": lambda t: t.to_sparse_bsc(block_size(t)),
}
# torch.func has no strides of the others.
IN_TRANSFORMS = ("coo", "uncoalesced")
STORED: dict[str, Callable[[md.MaskedTensor], md.MaskedTensor]] = {
    "strided": lambda x: x,
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "packed": lambda x: x.to_packed(),
}


def with_zeros(t: Tensor) -> Tensor:
    """The tensor with every third element 0, so that a sparse form of it leaves elements out."""
    return t.detach().masked_fill((torch.arange(t.numel()) % 3 == 1).view(t.shape), 0)


def masked(t: Tensor) -> md.MaskedTensor:
    """The tensor with every fourth element invalid."""
    return md.masked_tensor(t.detach(), (torch.arange(t.numel()) % 4 != 2).view(t.shape))


def results(call: Callable[[], Any], variables: Sequence[Tensor]) -> tuple[list[Any], list[Any]] | Exception:
    """The results of a call and the gradients of `variables`, each as it is shown; the error if it raises."""
    torch.manual_seed(0)
    try:
        found = [leaf for leaf in tree_leaves(call()) if isinstance(leaf, Tensor)]
        for variable in variables:
            variable.grad = None
        terms = [r.sum() for r in found if r.requires_grad and (r.is_floating_point() or r.is_complex())]
        terms = [t.to_tensor(0) if isinstance(t, md.MaskedTensor) else t for t in terms]
        if terms:
            sum(t.real if t.is_complex() else t for t in terms).backward()
    except Exception as error:
        return error
    return [shown(r) for r in found], [None if v.grad is None else shown(v.grad) for v in variables]


def shown(t: Tensor) -> tuple[Tensor, Tensor | None]:
    """The values, and the mask of a masked tensor, both dense."""
    t = t.detach()
    if isinstance(t, md.MaskedTensor):
        dense = t.to_dense()
        return dense.get_data(), dense.get_mask()
    return t.to_dense() if t.layout is not torch.strided else t, None


def compared(got: Any, want: Any) -> str | None:
    """How what `results` found differs, or None."""
    if isinstance(got, Exception) or isinstance(want, Exception):
        return None if type(got) is type(want) or raised_by_torch(got) else f"{got!r:.400} instead of {want!r:.400}"
    for kind, mine, theirs in zip(("result", "gradient"), got, want, strict=True):
        for n, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a is None or b is None:
                if a is not b:
                    return f"{kind} {n}: {a} instead of {b}"
                continue
            if (a[1] is None) != (b[1] is None) or (a[1] is not None and not torch.equal(a[1], b[1])):
                return f"{kind} {n}: mask {a[1]} instead of {b[1]}"
            found = difference(a[0], b[0], a[1])
            if found:
                return f"{kind} {n}: {found}"
    return None


def raised_by_torch(found: Any) -> bool:
    """Whether an operator of torch raised, called by torch's own Python code with the sparse operand alone."""
    frames = traceback.extract_tb(found.__traceback__) if isinstance(found, Exception) else []
    ours = ("/masked_dispatch/dispatch/", "/torch/autograd/graph.py")  # an error in backward has no frame of its own
    return bool(frames) and not any(part in f.filename for f in frames for part in ours)


def checked(
    function: Function, operands: Sequence[Tensor], position: int, plain: str, stored: str, gradients: bool = True
) -> str | None:
    """How ``function(*operands)`` differs if the one at `position` is a `plain` torch.sparse tensor and the others are
    masked and `stored` so, from the call with its `.to_dense()`; None if it does not.

    Raises what a conversion raises that the operands do not have.
    """
    sparse = PLAIN[plain](with_zeros(operands[position]))
    others = [STORED[stored](masked(t)) if n != position else None for n, t in enumerate(operands)]

    def outcome(as_dense: bool) -> Any:
        mine = sparse.detach().clone()
        taken: list[Tensor] = [t.detach() if t is not None else mine for t in others]
        variables = [t.requires_grad_() for t in taken if gradients and (t.is_floating_point() or t.is_complex())]

        def call() -> Any:
            return function(*[t.to_dense() if t is mine and as_dense else t for t in taken])

        return results(call, variables)

    return compared(outcome(False), outcome(True))


def checked_in_transform(function: Function, operands: Sequence[Tensor], position: int, plain: str) -> str | None:
    """The same for gradients that md.functional takes, of the first masked operand, with the sparse one captured."""
    sparse = PLAIN[plain](with_zeros(operands[position]))
    first = next(n for n in range(len(operands)) if n != position)
    others = [masked(t) if n != position else t for n, t in enumerate(operands)]

    def gradient_with(beside: Tensor) -> Any:
        def total(x: Tensor) -> Tensor:
            taken = [beside if n == position else x if n == first else t for n, t in enumerate(others)]
            found = [r for r in tree_leaves(function(*taken)) if isinstance(r, Tensor) and r.is_floating_point()]
            return sum(r.to_tensor(0).sum() if isinstance(r, md.MaskedTensor) else r.sum() for r in found)

        return results(lambda: md.functional.grad(total)(others[first]), [])

    return compared(gradient_with(sparse), gradient_with(sparse.to_dense()))


def forms(t: Tensor) -> Iterator[str]:
    """The plain torch.sparse layouts that a tensor has."""
    for name, convert in PLAIN.items():
        try:
            convert(with_zeros(t))
        except (RuntimeError, IndexError, ValueError):
            continue
        yield name
