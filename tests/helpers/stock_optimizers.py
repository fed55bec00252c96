"""What every optimizer of torch.optim does with masked tensors, with each of its options: right, refused, or warned of.

What may happen to a plain parameter with a masked gradient:

lazy     elements without a gradient are untouched, bit for bit, and the rest is `masked_dispatch.optim`'s step
refused  before anything changes, by an error that names what works
decays   as lazy for the parameter, step by step; the second average decays everywhere (docs/semantics.md)
warned   a warning names what works. Elements with a gradient in each step take the plain step, those that never had one
         are untouched (but for AdamW's decay, which the warning names), the others follow the optimizer's formula,
         the same for each implementation and layout, and move

A masked parameter takes the step that its valid elements take as a plain parameter of their own, or is refused.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md

OPTIMIZERS = {
    name: cls
    for name, cls in sorted(vars(torch.optim).items())
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
WITHOUT_MOMENTUM = {"SGD": "lazy", "RMSprop": "decays"}
ON_PLAIN = {
    "ASGD": "refused",  # decays parameters as a whole with foreach=False, and where the gradient is valid with True
    "Adadelta": "refused",  # subtracts a quotient of averages that no gradient has touched
    "Adafactor": "refused",  # one number for a row and a column, made from a first gradient that is masked
    "Adagrad": "lazy",
    "Adam": "warned",
    "AdamW": "warned",
    "Adamax": "refused",  # 0 / 0
    "LBFGS": "refused",  # the gradients of several steps as one vector: what misses one is frozen
    "Muon": "refused",  # orthogonalises the matrix as a whole
    "NAdam": "warned",
    "RAdam": "warned",
    "RMSprop": "warned",
    "Rprop": "refused",  # its state is made from a first gradient that is masked
    "SGD": "warned",
    "SparseAdam": "refused",  # reads torch's COO tensors
}
ON_MASKED = dict.fromkeys(ON_PLAIN, "compressed") | {
    "Adafactor": "refused",  # divides by sizes that count what is invalid
    "Muon": "refused",  # a matrix with holes cannot be compressed
    "SparseAdam": "refused",
    "LBFGS": "refused",  # with masks that change; with one mask it is the vector of what is valid (below)
}
STORAGE = {
    "dense": lambda gradient: gradient,
    "COO": lambda gradient: gradient.to_sparse(),
    "CSR": lambda gradient: gradient.to_sparse_csr(),
}
GENERATOR = torch.Generator().manual_seed(0)
START = torch.randn(4, 6, generator=GENERATOR, dtype=torch.float64)
NEVER = torch.zeros(4, 6, dtype=torch.bool).index_fill(0, torch.tensor([1]), True)
MASKS = [(torch.rand(4, 6, generator=GENERATOR) < 0.6) & ~NEVER for _ in range(3)]
VALUES = [torch.randn(4, 6, generator=GENERATOR, dtype=torch.float64) for _ in range(3)]
ALWAYS = MASKS[0] & MASKS[1] & MASKS[2]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def options_of(cls: type) -> Iterator[dict[str, Any]]:
    """Each combination of the options that an optimizer has."""
    names = inspect.signature(cls).parameters
    axes = {
        "implementation": [("foreach", None)]
        + [(name, value) for name, value in (("foreach", False), ("foreach", True), ("fused", True)) if name in names],
        "weight_decay": [0.0, 0.1],
        "decoupled_weight_decay": [False, True],
        "momentum": [0.0, 0.9],
        "maximize": [False, True],
        "amsgrad": [False, True],
    }
    axes = {name: values for name, values in axes.items() if name in names or name == "implementation"}
    if cls is torch.optim.Muon:  # its momentum may not be 0
        del axes["momentum"]
    for values in itertools.product(*axes.values()):
        options = dict(zip(axes, values, strict=True))
        name, value = options.pop("implementation")
        yield options if value is None else {**options, name: value}


def steps(cls: type, options: dict[str, Any], parameter: nn.Parameter, gradients: list[Tensor]) -> list[Tensor]:
    """A parameter before and after each step."""
    optimizer, seen = cls([parameter], lr=0.1, **options), [parameter.detach().clone()]
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step(*([lambda: torch.zeros(())] if cls is torch.optim.LBFGS else []))
        seen.append(parameter.detach().clone())
    return seen


def gradients(storage: str = "dense", masks: list[Tensor] = MASKS) -> list[Tensor]:
    return [STORAGE[storage](md.masked_tensor(v.where(m, torch.nan), m)) for v, m in zip(VALUES, masks, strict=True)]


def refused(cls: type, options: dict[str, Any], parameter: nn.Parameter, gradient: Tensor) -> None:
    """The first step raises and changes nothing."""
    before = parameter.detach().clone()
    optimizer = cls([parameter], lr=0.1, **options)
    parameter.grad = gradient
    with pytest.raises(md.MaskedSemanticsError, match=rf"{cls.__name__} cannot step parameter 0 .*Use masked_dispatch"):
        optimizer.step(*([lambda: torch.zeros(())] if cls is torch.optim.LBFGS else []))
    assert not optimizer.state[parameter]
    if md.is_masked_tensor(before):
        assert torch.equal(parameter.get_mask(), before.get_mask())
        parameter, before = parameter.to_tensor(0), before.to_tensor(0)
    assert torch.equal(parameter, before)


def check_plain_parameter(name: str, storage: str) -> None:
    """Every combination of an optimizer's options on a plain parameter with masked gradients."""
    cls, agreed = OPTIMIZERS[name], {}
    for options in options_of(cls):
        outcome = WITHOUT_MOMENTUM.get(name, ON_PLAIN[name]) if not options.get("momentum") else ON_PLAIN[name]
        parameter = nn.Parameter(START.clone())
        if outcome == "refused":
            refused(cls, options, parameter, gradients(storage)[0])
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen = steps(cls, options, parameter, gradients(storage))
        assert len(caught) == (3 if outcome == "warned" else 0)
        own = getattr(md.optim, "LazyAdam" if name == "Adam" else name)
        for warning in caught:
            assert str(warning.message).startswith(f"{name} steps a plain parameter with a masked gradient, and")
            assert f"masked_dispatch.optim.{own.__name__} leaves elements without" in str(warning.message)
        for before, after, mask in zip(seen, seen[1:], MASKS, strict=False):
            assert outcome == "lazy" or name == "SGD" or (before != after)[mask].all()
            assert outcome == "warned" or torch.equal(before[~mask], after[~mask])
        decoupled = options.get("decoupled_weight_decay", name == "AdamW") * options.get("weight_decay", 0)
        kept = START[NEVER] * (1 - 0.1 * decoupled) ** 3
        torch.testing.assert_close(seen[-1][NEVER], kept, **({"rtol": 0, "atol": 0} if not decoupled else EXACT))
        lazy = steps(own, options, nn.Parameter(START.clone()), gradients())[-1]
        where = slice(None) if outcome == "lazy" else ALWAYS
        torch.testing.assert_close(seen[-1][where], lazy[where], **EXACT)
        formula = tuple((k, v) for k, v in options.items() if k not in ("foreach", "fused"))
        torch.testing.assert_close(seen[-1], agreed.setdefault(formula, by_default(cls, dict(formula))), **EXACT)


def by_default(cls: type, options: dict[str, Any]) -> Tensor:
    """What foreach=False makes of densely stored gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return steps(cls, {**options, "foreach": False}, nn.Parameter(START.clone()), gradients())[-1]


def check_masked_parameter(name: str, storage: str) -> None:
    """Every combination of an optimizer's options on a masked parameter."""
    cls = OPTIMIZERS[name]
    for options in options_of(cls):
        parameter = nn.Parameter(md.masked_tensor(START.where(~NEVER, torch.nan), ~NEVER))
        if ON_MASKED[name] == "refused":
            refused(cls, options, parameter, gradients(storage)[0])
            continue
        after = steps(cls, options, parameter, gradients(storage))[-1]
        assert torch.equal(after.get_mask(), ALWAYS)  # an in-place operation on a masked tensor is its result
        compressed = steps(cls, options, nn.Parameter(START[ALWAYS]), [value[ALWAYS] for value in VALUES])[-1]
        torch.testing.assert_close(after.get_data()[ALWAYS], compressed, **EXACT)
