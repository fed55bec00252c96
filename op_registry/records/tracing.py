"""The state of a call: is a graph being traced, may a gradient flow, may a result be cached?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Set by the layer that intercepts calls: is a torch.func transform, or forward mode, running? Values computed there
# must not be cached, and functorch runs no autograd function whose forward takes a context.
# And is make_fx recording on real tensors, whose values are then not to be looked at?
_transform_probes: list[Callable[[], bool]] = [lambda: False, lambda: False, lambda: False]
# Set by the same: does a tensor of a subclass stand for a value of a graph? Unless somebody knows better, it does.
_graph_probe: list[Callable[[Tensor], bool]] = [lambda tensor: True]
# Set by who serves the tensors of a library, by their type: does one that is taken for a value of a graph have values
# now that can be read?
readable: dict[type, Callable[[Tensor], bool]] = {}
# Set by the same: is a tensor a batch of torch's older vmap (`is_grads_batched`), whose memory nobody sees?
_batch_probe: list[Callable[[Tensor], bool]] = [lambda tensor: False]


def set_transform_probes(
    transform: Callable[[], bool],
    functorch: Callable[[], bool],
    recording: Callable[[], bool],
    in_graph: Callable[[Tensor], bool],
    batch: Callable[[Tensor], bool],
) -> None:
    """Set the functions that tell whether either of the two, functorch alone, or make_fx is running.

    in_graph  whether a tensor of a subclass stands for a value of a graph under construction
    batch     whether a tensor is a batch of torch's older vmap
    """
    _transform_probes[:] = [transform, functorch, recording]
    _graph_probe[0] = in_graph
    _batch_probe[0] = batch


def under_transform() -> bool:
    """Whether a transform of torch.func, or forward mode, is running."""
    return _transform_probes[0]()


def is_older_batch(tensor: Tensor) -> bool:
    """Whether `tensor` is a batch of torch's older vmap, which runs few operators and shows no memory."""
    return _batch_probe[0](tensor)


def being_traced(tensor: Tensor) -> bool:
    """Whether `tensor` stands for a value of a graph under construction (fake, functional …)."""
    kind = type(tensor)
    return kind is not Tensor and kind is not torch.nn.Parameter and _graph_probe[0](tensor)


def has_values(tensor: Tensor) -> bool:
    """Whether `tensor` has values that can be read, be it by waiting for a device: not in a graph, not on meta."""
    known = readable.get(type(tensor))
    return known(tensor) if known is not None else not (tensor.is_meta or being_traced(tensor))


def traced_elsewhere(tensor: Tensor) -> bool:
    """Whether another library traces `tensor`, whose derivatives pass operators, and nothing that autograd adds."""
    known = readable.get(type(tensor))
    return known is not None and not known(tensor)


def computed_at_once(*tensors: Tensor) -> bool:
    """Whether plain eager execution computes with them, so that a custom autograd.Function may run."""
    return not _transform_probes[1]() and not any(being_traced(t) for t in tensors)


def recording() -> bool:
    """Whether make_fx is recording on real tensors: what depends on their values would become a constant."""
    return _transform_probes[2]()


def may_be_read(*tensors: Tensor) -> bool:
    """Whether a decision may depend on the tensors' values: in plain eager execution, without waiting for a device."""
    return computed_at_once(*tensors) and all(t.device.type == "cpu" for t in tensors) and not recording()


def gradients_may_flow(*tensors: Tensor) -> bool:
    """Whether something computed from `tensors` now may be differentiated.

    True while tracing and inside functorch transforms, where it is unknown; there the extra fill fuses away.
    """
    if not torch.is_grad_enabled():
        return False
    return any(t.requires_grad or being_traced(t) for t in tensors) or under_transform()


def savable(tensor: Tensor) -> Tensor:
    """A tensor that may be saved for backward: outside of inference mode, a copy of one that was made in it."""
    if being_traced(tensor) or not tensor.is_inference() or torch.is_inference_mode_enabled():
        return tensor
    return tensor.clone()
