"""torch's own optimizers, run on the elements that have a gradient.

A step gathers the elements of parameter and state at which the gradient is stored, runs torch's optimizer on these
values as if they were the parameter, and scatters them back. So torch's formula serves every layout of gradients, and
nothing of the parameter's size is allocated. Parameters with plain gradients, and masked parameters, take torch's own
step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from masked_dispatch.api.construct import as_masked_tensor
from masked_dispatch.autograd.engine import masked_record
from masked_dispatch.autograd.sparse import wrap_sparse_record
from masked_dispatch.compiler_internals import outside_of_graphs
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.records.dense import Dense
from op_registry.records.fill import fill_where_invalid
from op_registry.records.validity import as_bool
from op_registry.sparse.convert import to_layout
from op_registry.sparse.coordinates import gather, scatter_
from op_registry.sparse.record import Sparse, pattern_of


class Elements:
    """The stored elements of a plain parameter's gradient; gathers and scatters those of other tensors.

    values  of the gradient, 0 where a stored one is invalid: (n, *dense), or all of a densely stored gradient
    """

    def __init__(self, gradient: Dense | Sparse) -> None:
        flat = gradient.flat if isinstance(gradient, Sparse) else gradient
        self._coordinates = gradient.pattern.coordinates() if isinstance(gradient, Sparse) else None
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


class StandIn(NamedTuple):
    """The elements of a parameter that take a step."""

    parameter: Tensor
    values: Tensor
    elements: Elements
    group: dict[str, Any]


class MaskedStep(torch.optim.Optimizer):
    """Mixin for one of torch's optimizers: its step, taken only on the elements of masked gradients.

    A step runs uncompiled: a compiled function that calls it is compiled in two parts, before and after.

    What the optimizer keeps of a parameter has to have the parameter's shape or no dimension, and to exist before the
    first step or start as one number everywhere: 0, or that of the group's option that `initial_state` names.
    """

    initial_state: ClassVar[Mapping[str, str]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("differentiable"):
            raise ValueError(
                f"{type(self).__name__} writes into its parameters and does not support differentiable=True; "
                "torch.optim's own optimizers do, with densely stored gradients"
            )
        super().__init__(*args, **kwargs)

    # Dynamo cannot take a plain parameter with a masked `.grad` into a graph (assumption 37 of torch_internals.py).
    @outside_of_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; `closure`, if given, re-evaluates the model and returns the loss, which `step` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        original_params = [group["params"] for group in self.param_groups]
        replaced: list[StandIn] = []
        try:
            for group in self.param_groups:
                group["params"] = [self._stand_in(p, group, replaced) for p in group["params"]]
            self._stock_step()
        finally:
            for group, parameters in zip(self.param_groups, original_params, strict=True):
                group["params"] = parameters
            states = [self.state.pop(stand_in.values, {}) for stand_in in replaced]
        for stand_in, state in zip(replaced, states, strict=True):
            stand_in.elements.put(stand_in.parameter, stand_in.values)
            self._store_state(stand_in, state)
        return loss

    def _stand_in(self, parameter: Tensor, group: dict[str, Any], replaced: list[StandIn]) -> Tensor:
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
        replaced.append(StandIn(parameter, values, elements, group))
        return values

    def _store_state(self, stand_in: StandIn, state: dict[str, Any]) -> None:
        """Write the state of a parameter's stand-in back to the parameter's."""
        own_state = self.state[stand_in.parameter] if state else {}
        for name, value in state.items():
            if not is_by_element(name, value, stand_in.values):
                own_state[name] = value
                continue
            if not isinstance(own_state.get(name), Tensor):
                own_state[name] = self._initial(name, stand_in, value.dtype)
            stand_in.elements.put(own_state[name], value)

    def _initial(self, name: str, stand_in: StandIn, dtype: torch.dtype) -> Tensor:
        """The state of a parameter of which no element has taken a step."""
        start = float(stand_in.group[self.initial_state[name]]) if name in self.initial_state else 0.0
        number = complex(start, start) if dtype.is_complex else start
        return torch.full_like(stand_in.parameter, number, dtype=dtype, memory_format=torch.preserve_format)

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


# Kept once for a parameter, also for one without dimensions, whose elements have the same shape.
PER_PARAMETER: frozenset[str] = frozenset({"step", "mu_product"})


def is_by_element(name: str, value: object, of: Tensor) -> bool:
    """Whether an entry of an optimizer's state has a value for each element."""
    return name not in PER_PARAMETER and isinstance(value, Tensor) and value.shape == of.shape


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


# ------------------------------------------------------- torch's optimizers whose formula treats each element by itself


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


class AdamW(MaskedStep, torch.optim.AdamW):
    """torch.optim.AdamW whose averages change, and whose weights decay, only where a gradient is valid.

    Arguments, defaults and state (`exp_avg`, `exp_avg_sq`, `step`) are those of torch.optim.AdamW; steps are counted
    per parameter. Raises ValueError for `differentiable=True`, and what torch.optim.AdamW raises.
    """


class NAdam(MaskedStep, torch.optim.NAdam):
    """torch.optim.NAdam whose averages change only where a gradient is valid.

    Arguments, defaults and state (`exp_avg`, `exp_avg_sq`, `mu_product`, `step`) are those of torch.optim.NAdam; steps
    and `mu_product` are counted per parameter. Raises ValueError for `differentiable=True`, and what torch.optim.NAdam
    raises.
    """


class RAdam(MaskedStep, torch.optim.RAdam):
    """torch.optim.RAdam whose averages change only where a gradient is valid.

    Arguments, defaults and state (`exp_avg`, `exp_avg_sq`, `step`) are those of torch.optim.RAdam; steps, and so the
    rectification, are counted per parameter. Raises ValueError for `differentiable=True`, and what torch.optim.RAdam
    raises.
    """


class Adamax(MaskedStep, torch.optim.Adamax):
    """torch.optim.Adamax whose averages change only where a gradient is valid.

    Arguments, defaults and state (`exp_avg`, `exp_inf`, `step`) are those of torch.optim.Adamax, which itself is
    refused for masked gradients: it divides by `exp_inf`, 0 in elements that never had one. Raises ValueError for
    `differentiable=True`, and what torch.optim.Adamax raises.
    """


class RMSprop(MaskedStep, torch.optim.RMSprop):
    """torch.optim.RMSprop whose averages and momentum change only where a gradient is valid.

    Arguments, defaults and state (`square_avg`, `momentum_buffer`, `grad_avg`, `step`) are those of
    torch.optim.RMSprop. Raises ValueError for `differentiable=True`, and what torch.optim.RMSprop raises.
    """


class Adadelta(MaskedStep, torch.optim.Adadelta):
    """torch.optim.Adadelta whose averages change only where a gradient is valid.

    Arguments, defaults and state (`square_avg`, `acc_delta`, `step`) are those of torch.optim.Adadelta. Raises
    ValueError for `differentiable=True`, and what torch.optim.Adadelta raises.
    """


class Rprop(MaskedStep, torch.optim.Rprop):
    """torch.optim.Rprop whose step sizes change only where a gradient is valid.

    Arguments, defaults and state (`prev`, `step_size`, `step`) are those of torch.optim.Rprop; `prev` is the last
    gradient that an element had. torch.optim.Rprop itself is refused for masked gradients: its step sizes would keep
    the intersection of the masks. Raises ValueError for `differentiable=True`, and what torch.optim.Rprop raises.
    """

    initial_state: ClassVar = {"step_size": "lr"}
