"""torch's optimizers whose formula goes wrong for masked tensors: refused before their step, or warned of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from masked_dispatch.optim.optimizers import MaskedStep
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.errors import MaskedSemanticsError

# Why, for a plain parameter with a masked gradient.
REFUSED: dict[type[Optimizer], str] = {
    torch.optim.Adamax: "divides by its running maximum, which is 0 where there has been no gradient: 0/0",
    torch.optim.Adadelta: (
        "subtracts a quotient of its averages: it moves elements without a gradient, by their learning rate and more"
    ),
    torch.optim.ASGD: "decays all elements of its parameters, or only those with a gradient, depending on `foreach`",
    torch.optim.Rprop: (
        "makes its step sizes from the first gradient: an element that is invalid there is never stepped again"
    ),
    torch.optim.Adafactor: (
        "averages over the rows and columns of a gradient, into state that it makes from the first one"
    ),
    torch.optim.Muon: "orthogonalises the gradient as a whole matrix, in state that it makes from the first one",
    torch.optim.LBFGS: (
        "combines gradients of several steps, each as one vector: an element that misses one is never stepped again"
    ),
    torch.optim.SparseAdam: "only takes gradients in torch's COO layout",
}


# The same for a masked parameter of which an element is invalid, in value or gradient. Optimizers that treat each
# element by itself are right there: what is invalid stays so.
REFUSED_MASKED: dict[type[Optimizer], str] = {
    torch.optim.Adafactor: (
        "divides sums over rows, columns and the parameter by their sizes, which count invalid elements"
    ),
    torch.optim.Muon: "orthogonalises the gradient as a whole matrix, and scales the step by the matrix's sizes",
    torch.optim.SparseAdam: REFUSED[torch.optim.SparseAdam],
}

# Of a masked parameter LBFGS takes the valid elements for its vector, as long as these are the same in every gradient.
REFUSED_GAPS: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: (
        "combines gradients of several steps, each as one vector: valid elements without a gradient would be lost"
    ),
}

# Those whose formula treats an element that misses a step wrongly (docs/semantics.md): what happens to it. Without
# momentum, RMSprop and SGD leave such elements alone.
MOMENTUM_GOES_ON = (
    "keeps moving an element after its last gradient, in growing steps: its second average decays, its first does not"
)
WARNED: dict[type[Optimizer], str] = {
    torch.optim.Adam: MOMENTUM_GOES_ON,
    torch.optim.AdamW: f"{MOMENTUM_GOES_ON}; and its weight decay shrinks every element",
    torch.optim.NAdam: MOMENTUM_GOES_ON,
    torch.optim.RAdam: MOMENTUM_GOES_ON,
    torch.optim.RMSprop: "with momentum keeps moving an element after its last gradient",
    torch.optim.SGD: (
        "with momentum never again steps an element that misses a step: its momentum is masked as the gradient was"
    ),
}

# What of masked_dispatch.optim to use where it has no class of the same name.
INSTEAD: dict[type[Optimizer], str] = {
    torch.optim.Adam: "LazyAdam",
    torch.optim.SparseAdam: "LazyAdam",
    torch.optim.Adafactor: "Adagrad or LazyAdam",
    torch.optim.ASGD: "SGD or LazyAdam",
    torch.optim.LBFGS: "SGD or LazyAdam",
    torch.optim.Muon: "SGD or LazyAdam",
}


def refuse_masked_gradients() -> None:
    """Register the refusals with torch, for every optimizer of the process."""
    register_optimizer_step_pre_hook(before_step)


def before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Check the gradients that are there, and those that the step's closure is going to make."""
    if isinstance(optimizer, MaskedStep):
        return None
    check(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None
    # torch's steps call it first, before anything changes.
    checked = followed_by_check(closure, optimizer)
    return (args, {**kwargs, "closure": checked}) if "closure" in kwargs else ((args[0], checked, *args[2:]), kwargs)


def followed_by_check(closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
    """The closure of a step, whose gradients are checked before the step goes on."""

    def checked() -> Any:
        loss = closure()
        check(optimizer)
        return loss

    return checked


def entry_for(optimizer: Optimizer, table: dict[type[Optimizer], str]) -> tuple[str, str] | None:
    """What a table says of an optimizer's class, or of the nearest one that it is derived from; and what works."""
    cls = next((cls for cls in type(optimizer).__mro__ if cls in table), None)
    return None if cls is None else (table[cls], f"masked_dispatch.optim.{INSTEAD.get(cls, cls.__name__)}")


def check(optimizer: Optimizer) -> None:
    """Raise MaskedSemanticsError, or warn, if the optimizer is about to take a masked tensor that it cannot take."""
    # The types first, for every optimizer of the process pays for this: isinstance takes ten times as long.
    kinds = {kind for group in optimizer.param_groups for p in group["params"] for kind in (type(p), type(p.grad))}
    if not any(issubclass(kind, MaskedTensor) for kind in kinds):
        return
    parameters = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    refused = [(concerns, entry_for(optimizer, table), what) for table, concerns, what in REFUSALS]
    warned = entry_for(optimizer, WARNED)
    for number, (parameter, group) in enumerate(parameters):
        for concerns, entry, what in refused:
            if entry is not None and concerns(parameter):
                refuse(optimizer, number, parameter, what, entry)
        if warned is not None and is_plain_with_masked_gradient(parameter) and group.get("momentum", 1) != 0:
            warn_of_masked_gradient(optimizer, warned)


def is_plain_with_masked_gradient(parameter: Tensor) -> bool:
    return isinstance(parameter.grad, MaskedTensor) and not isinstance(parameter, MaskedTensor)


def is_masked_in_part(parameter: Tensor) -> bool:
    """Whether an element of a masked parameter is invalid, in value or gradient."""
    if parameter.grad is None or not isinstance(parameter, MaskedTensor):
        return False
    return any(isinstance(t, MaskedTensor) and not bool(t.get_mask().all()) for t in (parameter, parameter.grad))


def has_gaps(parameter: Tensor) -> bool:
    """Whether a valid element of a masked parameter has no gradient."""
    gradient = parameter.grad
    if not isinstance(parameter, MaskedTensor) or not isinstance(gradient, MaskedTensor):
        return False
    return bool((parameter.get_mask() & ~gradient.get_mask()).any())


# Each table, the parameters that it concerns, and what an error says of them.
_IN_PART = "the parameter is masked, elements of it or of its gradient are invalid"
REFUSALS: tuple[tuple[dict[type[Optimizer], str], Callable[[Tensor], bool], str], ...] = (
    (REFUSED, is_plain_with_masked_gradient, "the parameter is plain and its gradient masked"),
    (REFUSED_MASKED, is_masked_in_part, _IN_PART),
    (REFUSED_GAPS, has_gaps, _IN_PART),
)


def refuse(optimizer: Optimizer, number: int, parameter: Tensor, what: str, entry: tuple[str, str]) -> NoReturn:
    """Refuse a masked gradient of a plain parameter, or a masked parameter."""
    name, (why, way) = type(optimizer).__name__, entry
    if is_plain_with_masked_gradient(parameter):
        only_sparse = isinstance(optimizer, torch.optim.SparseAdam)
        plain = "to_torch_sparse(layout=torch.sparse_coo)" if only_sparse else "to_tensor(0)"
        way = f"{way}, or give the parameter a plain gradient: p.grad = p.grad.{plain}"
    raise MaskedSemanticsError(
        f"{name} cannot step parameter {number} of shape {tuple(parameter.shape)}: {what}, and {name} {why}. Use {way}"
    )


def warn_of_masked_gradient(optimizer: Optimizer, entry: tuple[str, str]) -> None:
    """Warn of a masked gradient of a plain parameter; Python shows the same text once."""
    name, (what, way) = type(optimizer).__name__, entry
    warnings.warn(
        f"{name} steps a plain parameter with a masked gradient, and {what}. {way} leaves elements without a "
        "gradient alone, and their state too",
        UserWarning,
        stacklevel=2,
    )
