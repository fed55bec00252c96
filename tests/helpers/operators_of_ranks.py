"""Operators of torch's database on masked tensors of distributed tensors, in four placements, against one process.

Each result is equal, or DTensor refuses the operator for a plain tensor in that placement too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import masked_dispatch as md
from process_groups import Check

PLACEMENTS: dict[str, Any] = {
    "Shard(0)": Shard(0),
    "Shard(1)": Shard(1),
    "Replicate": Replicate(),
    "Partial": Partial(),
}
EQUAL, REFUSED_TOO, WRONG_TOO = "equal", "refused by DTensor too", "not one process's by DTensor either"
RAISES = "raises in one process"
# The operators of the database are divided among so many checks, of which each compares so many at least.
PARTS, AT_LEAST = 4, 120


# In one placement at least; all others of the database are equal in all of them.
# fmt: off
EXCEPTIONS = {
    REFUSED_TOO: [
        "__getitem__", "as_strided", "flatten", "hash_tensor", "linalg.matrix_power",
        "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d", "pca_lowrank", "ravel",
        "repeat_interleave", "reshape", "reshape_as", "short", "stft", "svd_lowrank", "to_sparse", "unbind",
        "unfold", "view", "view_as",
    ],
    WRONG_TOO: [
        "__rmatmul__", "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial",
        "nn.functional.cosine_embedding_loss", "normal.in_place", "rand_like", "randint_like", "randn_like",
        "uniform",
    ],
    RAISES: [
        "geqrf", "jiterator_2inputs_2outputs", "jiterator_4inputs_with_extra_args", "jiterator_binary",
        "jiterator_binary_return_by_ref", "linalg.householder_product", "linalg.ldl_factor", "linalg.ldl_factor_ex",
        "linalg.ldl_solve", "ormqr", "resize_", "searchsorted",
    ],
}
# fmt: on


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def samples(part: int) -> Iterator[tuple[str, Any, Any]]:
    """The name of each operator, itself, and its first sample whose first argument is a matrix or more."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in sorted((op for op in op_db if torch.float64 in op.dtypes), key=name_of)[part::PARTS]:
        torch.manual_seed(0)
        found = iter(op.sample_inputs("cpu", torch.float64))
        sample = next((s for s in found if is_matrix(s.input)), None)
        if sample is not None:
            yield name_of(op), op, sample


def is_matrix(value: object) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not value.is_floating_point():
        return False
    return value.ndim >= 2 and min(value.shape) > 1


def mask_for(x: Tensor) -> Tensor:
    return (torch.arange(x.numel()) % 5 > 0).view(x.shape)


def on_ranks(value: Any, mesh: DeviceMesh) -> Any:
    """Further tensors of a call, as all ranks have them."""
    if isinstance(value, Tensor):
        return distribute_tensor(value.detach(), mesh, [Replicate()])
    if isinstance(value, (list, tuple)):
        return type(value)(on_ranks(v, mesh) for v in value)
    return {key: on_ranks(v, mesh) for key, v in value.items()} if isinstance(value, dict) else value


def placed(x: Tensor, mesh: DeviceMesh, placement: Any) -> Any:
    if isinstance(placement, Partial):
        mine = x if mesh.get_rank() == 0 else torch.zeros_like(x)
        return DTensor.from_local(mine, mesh, [placement])
    return distribute_tensor(x, mesh, [placement])


def leaves(value: Any) -> list[Any]:
    """The tensors of a result, of all ranks."""
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in leaves(v)]
    if isinstance(value, md.MaskedTensor):
        data: Any = value.get_data()
        return [md.distributed.full_tensor(value) if isinstance(data, DTensor) else value]
    return [value.full_tensor().view(value.shape) if isinstance(value, DTensor) else value]


def outcome(op: Any, sample: Any, mesh: DeviceMesh, placement: Any) -> str:
    """What comes out, in one of the words above, or what is wrong."""
    x, mask = sample.input.detach(), mask_for(sample.input)
    try:
        expected = leaves(op(md.as_masked_tensor(x.clone(), mask), *sample.args, **sample.kwargs))
    except Exception:
        return RAISES
    args, kwargs = on_ranks(sample.args, mesh), on_ranks(sample.kwargs, mesh)
    hidden = torch.where(mask, x, torch.nan)
    mask_placement = Replicate() if isinstance(placement, Partial) else placement
    try:
        masked = md.as_masked_tensor(placed(hidden, mesh, placement), distribute_tensor(mask, mesh, [mask_placement]))
        found = leaves(op(masked, *args, **kwargs))
        wrong = "" if all_same(found, expected) else "different"
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    if not wrong:
        return EQUAL
    try:
        plain = leaves(op(placed(x, mesh, placement), *args, **kwargs))
        right = all_same(plain, leaves(op(x.clone(), *sample.args, **sample.kwargs)))
    except Exception:
        return REFUSED_TOO
    return wrong if right else WRONG_TOO


def all_same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(same(a, b) for a, b in zip(found, expected, strict=True))


def same(found: Any, expected: Any) -> bool:
    try:
        md.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, equal_nan=True, check_stride=False)
    except AssertionError:
        return False
    return True


def operators(rank: int, ranks: int, part: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    found = {
        (name, placement): outcome(op, sample, mesh, PLACEMENTS[placement])
        for name, op, sample in samples(part)
        for placement in PLACEMENTS
    }
    others = {which: text for which, text in found.items() if text != EQUAL}
    unexplained = {which: text for which, text in others.items() if text not in EXCEPTIONS}
    assert not unexplained, unexplained  # pytest does not rewrite the assertions of a helper
    names = {name for name, _ in found}
    for text, excepted in EXCEPTIONS.items():
        now, named = {name for (name, _), why in others.items() if why == text}, names & set(excepted)
        assert now == named, f"{text}: {sorted(now - named)} is not named, {sorted(named - now)} no longer is"
    assert len(names) >= AT_LEAST


CHECKS: dict[str, Check] = {
    f"operators in four placements, part {part + 1} of {PARTS}": functools.partial(operators, part=part)
    for part in range(PARTS)
}
