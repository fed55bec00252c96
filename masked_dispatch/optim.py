"""Optimizers whose state moves only where a gradient is valid: torch's own, run on what lies in the gradient's places.

``masked_dispatch.optim.Adagrad``, ``SGD`` and ``LazyAdam`` take what torch's Adagrad, SGD and Adam take, keep the same
state under the same names, and load each other's state dicts. They differ where a plain parameter has a masked gradient
(or one of torch's own sparse ones): an element without a gradient keeps its value *and its state*. Momentum does not go
on by itself there, averages and weights do not decay.

A step gathers parameter and state in the places of the gradient, lets torch's optimizer run on these values as if they
were the parameter, and scatters them back. So there is one formula, torch's, for every layout that a gradient may be
stored in, and nothing of the parameter's size is made. Parameters with plain gradients, and masked parameters, take
torch's own step.

Stock optimizers take masked gradients too: in-place operators on plain tensors are updates. What they differ in is
time (their formulas read all of the state) and the state of elements without a gradient, which decays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.api.construct import as_masked_tensor
from masked_dispatch.autograd.engine import masked_record
from masked_dispatch.autograd.sparse import wrap_sparse_record
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.records.dense import Dense, fill_where_invalid
from op_registry.records.validity import as_bool
from op_registry.sparse.gather_scatter import gather, scatter_
from op_registry.sparse.pattern import pattern_of
from op_registry.sparse.record import Sparse, layout_without_blocks, to_layout

Group = dict[str, Any]


class Elements:
    """The elements that a gradient of a plain parameter has, one after another, and how to get at another tensor's.

    values  of the gradient, 0 where one that is stored is invalid: (n, *dense), or all of a densely stored gradient
    """

    def __init__(self, gradient: Dense | Sparse) -> None:
        flat = gradient.flat if isinstance(gradient, Sparse) else gradient
        self._places = gradient.pattern.places() if isinstance(gradient, Sparse) else None
        self._validity = flat.full_validity
        self.values = flat.filled(0)

    def take(self, tensor: Tensor) -> Tensor:
        """What `tensor`, of the gradient's shape, has in these places: a copy."""
        return tensor.clone() if self._places is None else gather(tensor, self._places)

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Write values back to where the gradient is valid, in place."""
        if self._places is None:
            tensor.copy_(fill_where_invalid(values, self._validity, tensor))
            return
        if self._validity is not None:
            values = torch.where(as_bool(self._validity), values, gather(tensor, self._places))
        scatter_(tensor, self._places, values)


class Lazily(torch.optim.Optimizer):
    """Mixed in before one of torch's optimizers: its step, taken in the places of masked gradients alone.

    The optimizer's state has to begin as zeros, or to be there from the beginning, and to be of the parameter's shape
    or of none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("differentiable"):
            raise ValueError(
                f"{type(self).__name__} writes into its parameters and takes no differentiable=True; torch.optim's own "
                "optimizers do, with gradients that are stored densely"
            )
        super().__init__(*args, **kwargs)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; `closure`, if given, evaluates the model anew and returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = [group["params"] for group in self.param_groups]
        replaced: list[tuple[Tensor, Tensor, Elements]] = []
        try:
            for group in self.param_groups:
                group["params"] = [self._stand_in(p, replaced) for p in group["params"]]
            self._stock_step()
        finally:
            for group, parameters in zip(self.param_groups, given, strict=True):
                group["params"] = parameters
            states = [self.state.pop(values, {}) for _, values, _ in replaced]
        for (parameter, values, elements), state in zip(replaced, states, strict=True):
            elements.put(parameter, values)
            self._keep(parameter, state, elements)
        return loss

    def _stand_in(self, parameter: Tensor, replaced: list[tuple[Tensor, Tensor, Elements]]) -> Tensor:
        """What torch's optimizer is given for a parameter: itself, or what it has in the places of its gradient."""
        if parameter.grad is None or isinstance(parameter, MaskedTensor):
            return parameter
        gradient = masked_record(parameter.grad)
        if gradient is None:
            return parameter
        elements = Elements(gradient)
        values = elements.take(parameter.detach())
        values.grad = elements.values
        if parameter in self.state:
            self.state[values] = {
                name: elements.take(value) if is_by_element(name, value, parameter) else value
                for name, value in self.state[parameter].items()
            }
        replaced.append((parameter, values, elements))
        return values

    def _keep(self, parameter: Tensor, state: dict[str, Any], elements: Elements) -> None:
        """Bring the state of a parameter's stand-in back."""
        kept = self.state[parameter] if state else {}
        for name, value in state.items():
            if not is_by_element(name, value, elements.values):
                kept[name] = value
                continue
            if not isinstance(kept.get(name), Tensor):
                kept[name] = torch.zeros_like(parameter, dtype=value.dtype, memory_format=torch.preserve_format)
            elements.put(kept[name], value)

    def _stock_step(self) -> None:
        """torch's own step. Its hooks and its profile belong to this optimizer's step, which torch wraps as well."""
        bound: Any = super().step
        step = bound.__func__
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; with `set_to_none=False`, a masked one of a plain parameter is one of nothing."""
        emptied = []
        if not set_to_none:
            for parameter in (p for group in self.param_groups for p in group["params"]):
                if isinstance(parameter.grad, MaskedTensor) and not isinstance(parameter, MaskedTensor):
                    emptied.append((parameter, without_elements(parameter.grad)))
                    parameter.grad = None
        super().zero_grad(set_to_none)
        for parameter, gradient in emptied:
            parameter.grad = gradient


def is_by_element(name: str, value: Any, of: Tensor) -> bool:
    """Whether a part of an optimizer's state has a value for each element."""
    return name != "step" and isinstance(value, Tensor) and value.shape == of.shape


def without_elements(gradient: MaskedTensor) -> MaskedTensor:
    """A gradient of the same shape and storage of which nothing is valid."""
    record = masked_record(gradient)
    if not isinstance(record, Sparse):
        return as_masked_tensor(torch.zeros_like(gradient.get_data()), torch.zeros_like(gradient.get_mask()))
    none = record.pattern.pieces[-1].new_zeros(0, dtype=torch.int64)
    layout, sizes = record.pattern.layout, record.pattern.sizes
    pattern = pattern_of(layout_without_blocks(layout), (none,) * len(sizes), sizes)
    empty = Sparse(Dense(record.flat.data.new_zeros((0, *record.dense_sizes))), pattern)
    return wrap_sparse_record(to_layout(empty, layout, record.pattern.block))


class Adagrad(Lazily, torch.optim.Adagrad):
    """torch.optim.Adagrad, in the places of masked gradients: the step that it takes for torch's sparse gradients.

    Arguments, defaults and state (`sum`, `step`) are those of torch.optim.Adagrad; `weight_decay` decays elements that
    have a gradient. Raises ValueError for `differentiable=True`, and what torch.optim.Adagrad raises.
    """


class SGD(Lazily, torch.optim.SGD):
    """torch.optim.SGD, in the places of masked gradients.

    Arguments, defaults and state (`momentum_buffer`) are those of torch.optim.SGD; momentum and `weight_decay` concern
    elements that have a gradient. An element that gets its first gradient after the first step of its parameter has had
    none so far, as if it had been 0. Raises ValueError for `differentiable=True`, and what torch.optim.SGD raises.
    """


class LazyAdam(Lazily, torch.optim.Adam):
    """torch.optim.Adam whose averages move only where a gradient is valid; as torch.optim.SparseAdam, in any layout.

    Arguments, defaults and state (`exp_avg`, `exp_avg_sq`, `step`) are those of torch.optim.Adam, `amsgrad` and
    `decoupled_weight_decay` included. Steps are counted for the whole parameter. With a gradient that is valid
    everywhere it is Adam; SparseAdam adds `eps` before it corrects the bias, which is the only difference to it.
    Raises ValueError for `differentiable=True`, and what torch.optim.Adam raises.
    """


__all__ = ["SGD", "Adagrad", "LazyAdam"]
