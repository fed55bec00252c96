"""Optimizers whose state changes only where a gradient is valid: torch's own, run on the gradient's elements.

``masked_dispatch.optim.Adagrad``, ``SGD`` and ``LazyAdam`` take what torch's Adagrad, SGD and Adam take, keep the same
state under the same names, and load each other's state dicts. They differ for a plain parameter with a masked (or
torch.sparse) gradient: an element without a gradient keeps its value *and its state*. Its momentum does not continue,
its averages and weights do not decay.

A step gathers the elements of parameter and state at which the gradient is stored, runs torch's optimizer on these
values as if they were the parameter, and scatters them back. So torch's formula serves every layout of gradients, and
nothing of the parameter's size is allocated. Parameters with plain gradients, and masked parameters, take torch's own
step.

Stock optimizers take masked gradients too: in-place operators on plain tensors are updates. They differ in time (their
formulas read all of the state) and in the state of elements without a gradient, which decays.
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
from op_registry.sparse.record import Sparse, to_layout


class Elements:
    """The stored elements of a plain parameter's gradient; gathers and scatters those of other tensors.

    values  of the gradient, 0 where a stored one is invalid: (n, *dense), or all of a densely stored gradient
    """

    def __init__(self, gradient: Dense | Sparse) -> None:
        flat = gradient.flat if isinstance(gradient, Sparse) else gradient
        self._coordinates = gradient.pattern.places() if isinstance(gradient, Sparse) else None
        self._validity = flat.full_validity
        self.values = flat.filled(0)

    def take(self, tensor: Tensor) -> Tensor:
        """A copy of the same elements of `tensor`, which has the gradient's shape."""
        return tensor.clone() if self._coordinates is None else gather(tensor, self._coordinates)

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Write values back where the gradient is valid, in place."""
        if self._coordinates is None:
            tensor.copy_(fill_where_invalid(values, self._validity, tensor))
            return
        if self._validity is not None:
            values = torch.where(as_bool(self._validity), values, gather(tensor, self._coordinates))
        scatter_(tensor, self._coordinates, values)


class MaskedStep(torch.optim.Optimizer):
    """Mixin for one of torch's optimizers: its step, taken only on the elements of masked gradients.

    The optimizer's state has to start as zeros, or exist from the start, and have the parameter's shape or none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("differentiable"):
            raise ValueError(
                f"{type(self).__name__} writes into its parameters and does not support differentiable=True; "
                "torch.optim's own optimizers do, with densely stored gradients"
            )
        super().__init__(*args, **kwargs)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; `closure`, if given, re-evaluates the model and returns the loss, which `step` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        original_params = [group["params"] for group in self.param_groups]
        replaced: list[tuple[Tensor, Tensor, Elements]] = []
        try:
            for group in self.param_groups:
                group["params"] = [self._stand_in(p, replaced) for p in group["params"]]
            self._stock_step()
        finally:
            for group, parameters in zip(self.param_groups, original_params, strict=True):
                group["params"] = parameters
            states = [self.state.pop(values, {}) for _, values, _ in replaced]
        for (parameter, values, elements), state in zip(replaced, states, strict=True):
            elements.put(parameter, values)
            self._store_state(parameter, state, elements)
        return loss

    def _stand_in(self, parameter: Tensor, replaced: list[tuple[Tensor, Tensor, Elements]]) -> Tensor:
        """What torch's optimizer gets for a parameter: itself, or its elements at which its gradient is stored."""
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

    def _store_state(self, parameter: Tensor, state: dict[str, Any], elements: Elements) -> None:
        """Write the state of a parameter's stand-in back to the parameter's."""
        own_state = self.state[parameter] if state else {}
        for name, value in state.items():
            if not is_by_element(name, value, elements.values):
                own_state[name] = value
                continue
            if not isinstance(own_state.get(name), Tensor):
                own_state[name] = torch.zeros_like(parameter, dtype=value.dtype, memory_format=torch.preserve_format)
            elements.put(own_state[name], value)

    def _stock_step(self) -> None:
        """torch's own step, without its hooks and profiling, which torch already adds to this class's step."""
        bound: Any = super().step
        step = bound.__func__
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients; with `set_to_none=False`, a masked one of a plain parameter becomes one without elements."""
        emptied = []
        if not set_to_none:
            for parameter in (p for group in self.param_groups for p in group["params"]):
                if isinstance(parameter.grad, MaskedTensor) and not isinstance(parameter, MaskedTensor):
                    emptied.append((parameter, without_elements(parameter.grad)))
                    parameter.grad = None
        super().zero_grad(set_to_none)
        for parameter, gradient in emptied:
            parameter.grad = gradient


def is_by_element(name: str, value: object, of: Tensor) -> bool:
    """Whether an entry of an optimizer's state has a value for each element."""
    return name != "step" and isinstance(value, Tensor) and value.shape == of.shape


def without_elements(gradient: MaskedTensor) -> MaskedTensor:
    """A gradient of the same shape and layout without valid elements."""
    record = masked_record(gradient)
    if not isinstance(record, Sparse):
        return as_masked_tensor(torch.zeros_like(gradient.get_data()), torch.zeros_like(gradient.get_mask()))
    no_index = record.pattern.pieces[-1].new_zeros(0, dtype=torch.int64)
    layout, sizes = record.pattern.layout, record.pattern.sizes
    pattern = pattern_of(layout.exact_sibling, (no_index,) * len(sizes), sizes)
    empty = Sparse(Dense(record.flat.data.new_zeros((0, *record.dense_sizes))), pattern)
    return wrap_sparse_record(to_layout(empty, layout, record.pattern.block))


class Adagrad(MaskedStep, torch.optim.Adagrad):
    """torch.optim.Adagrad on the elements of masked gradients: the step it takes for torch's sparse gradients.

    Arguments, defaults and state (`sum`, `step`) are those of torch.optim.Adagrad; `weight_decay` only decays
    elements that have a gradient. Raises ValueError for `differentiable=True`, and what torch.optim.Adagrad raises.
    """


class SGD(MaskedStep, torch.optim.SGD):
    """torch.optim.SGD on the elements of masked gradients.

    Arguments, defaults and state (`momentum_buffer`) are those of torch.optim.SGD; momentum and `weight_decay` only
    apply to elements that have a gradient. An element without a gradient so far has momentum 0. Raises ValueError for
    `differentiable=True`, and what torch.optim.SGD raises.
    """


class LazyAdam(MaskedStep, torch.optim.Adam):
    """torch.optim.Adam whose averages change only where a gradient is valid; torch.optim.SparseAdam for any layout.

    Arguments, defaults and state (`exp_avg`, `exp_avg_sq`, `step`) are those of torch.optim.Adam, `amsgrad` and
    `decoupled_weight_decay` included. Steps are counted per parameter. With a gradient that is valid everywhere
    it is Adam; it differs from SparseAdam only in adding `eps` after bias correction.
    Raises ValueError for `differentiable=True`, and what torch.optim.Adam raises.
    """


__all__ = ["SGD", "Adagrad", "LazyAdam"]
