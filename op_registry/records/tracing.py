"""The state of a call: is a graph being traced, may a gradient flow, may a result be cached?"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

# The layer that intercepts calls sets these. Is a torch.func transform, or forward mode, running? Nobody may cache
# values computed there, and functorch runs no autograd function whose forward takes a context.
# And is make_fx recording on real tensors, whose values nobody may then read?
_transform_probes: list[Callable[[], bool]] = [lambda: False, lambda: False, lambda: False]
# The same layer sets this: does a subclass instance stand for a graph value? By default, it does.
_graph_probe: list[Callable[[Tensor], bool]] = [lambda tensor: True]
# By type; code that supports another library's tensors adds functions: does a tensor that counts as a graph value have
# values that we can read now?
readable: dict[type, Callable[[Tensor], bool]] = {}
# The same layer sets this: is a tensor a batch of torch's older vmap (`is_grads_batched`), which hides its memory?
_batch_probe: list[Callable[[Tensor], bool]] = [lambda tensor: False]

# The same layer sets this: where a mask lies in a graph under construction; None where that is unknown.
_place_probe: list[Callable[[Tensor], Hashable]] = [lambda tensor: None]
# The same layer sets this: the values of a tensor that carries a transform of torch.func.
_values_probe: list[Callable[[Tensor], Tensor]] = [lambda tensor: tensor]


def set_transform_probes(
    transform: Callable[[], bool],
    functorch: Callable[[], bool],
    recording: Callable[[], bool],
    in_graph: Callable[[Tensor], bool],
    batch: Callable[[Tensor], bool],
    values: Callable[[Tensor], Tensor],
    place: Callable[[Tensor], Hashable],
) -> None:
    """Set the functions that tell whether a transform or forward mode, functorch alone, or make_fx is running.

    in_graph  whether a subclass instance stands for a value of a graph under construction
    batch     whether a tensor is a batch of torch's older vmap
    values    the values of a tensor that carries a transform
    place     where a mask lies in a graph under construction; two that lie at equal places are equal
    """
    _transform_probes[:] = [transform, functorch, recording]
    _graph_probe[0] = in_graph
    _batch_probe[0] = batch
    _values_probe[0] = values
    _place_probe[0] = place


def under_transform() -> bool:
    """Whether a transform of torch.func, or forward mode, is running."""
    return _transform_probes[0]()


def values_of(tensor: Tensor) -> Tensor:
    """The values of a tensor, of all examples if it carries a vmap."""
    return _values_probe[0](tensor)


def at_one_place_in_graph(a: Tensor, b: Tensor) -> bool:
    """Whether two masks of a graph under construction are known to be one: they lie at one place."""
    place = _place_probe[0](a)
    return place is not None and place == _place_probe[0](b)


def assert_when_run(condition: Tensor, text: str) -> None:
    """Let a graph raise RuntimeError with this text when it runs, unless all of `condition` (bool) holds."""
    torch._assert_async(condition.all(), text)


def is_older_batch(tensor: Tensor) -> bool:
    """Whether `tensor` is a batch of torch's older vmap, which supports few operators and hides its memory."""
    return _batch_probe[0](tensor)


def being_traced(tensor: Tensor) -> bool:
    """Whether `tensor` stands for a value of a graph under construction (fake, functional …)."""
    kind = type(tensor)
    return kind is not Tensor and kind is not torch.nn.Parameter and _graph_probe[0](tensor)


def has_values(tensor: Tensor) -> bool:
    """Whether we can read the values of `tensor`, if need be by waiting for a device: not in a graph, not on meta."""
    known = readable.get(type(tensor))
    return known(tensor) if known is not None else not (tensor.is_meta or being_traced(tensor))


def traced_elsewhere(tensor: Tensor) -> bool:
    """Whether another library traces `tensor`: derivatives pass through its operators, but not through autograd's."""
    known = readable.get(type(tensor))
    return known is not None and not known(tensor)


def computed_at_once(*tensors: Tensor) -> bool:
    """Whether plain eager execution computes with the tensors, so that a custom autograd.Function may run."""
    return not _transform_probes[1]() and not any(being_traced(t) for t in tensors)


def recording() -> bool:
    """Whether make_fx is recording on real tensors: it would bake decisions that depend on their values in."""
    return _transform_probes[2]()


def may_be_read(*tensors: Tensor) -> bool:
    """Whether a decision may depend on the tensors' values: in plain eager execution, without waiting for a device."""
    return computed_at_once(*tensors) and all(t.device.type == "cpu" for t in tensors) and not recording()


def gradients_may_flow(*tensors: Tensor) -> bool:
    """Whether somebody may differentiate a result computed from `tensors` now.

    True while tracing and inside functorch transforms, where nobody knows; there the compiler fuses the extra fill.
    """
    if not torch.is_grad_enabled():
        return False
    return any(t.requires_grad or being_traced(t) for t in tensors) or under_transform()


def savable(tensor: Tensor) -> Tensor:
    """A tensor that autograd can save for backward: outside inference mode, this copies tensors made inside it."""
    if being_traced(tensor) or not tensor.is_inference() or torch.is_inference_mode_enabled():
        return tensor
    return tensor.clone()
