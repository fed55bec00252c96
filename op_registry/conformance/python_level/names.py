"""The Python callables of torch that take a tensor, found in its namespaces, so that a new torch shows new ones."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType, ModuleType

import torch
import torch.distributions
import torch.nn.utils
import torch.signal

NAMESPACES: tuple[ModuleType, ...] = (
    torch.nn.functional,
    torch.functional,
    torch.special,
    torch.linalg,
    torch.fft,
    torch.masked,
    torch.signal.windows,
    torch.nn.utils,
)

# The methods and properties of a distribution that compute something.
METHODS = (
    "log_prob", "cdf", "icdf", "entropy", "perplexity", "sample", "rsample", "mean", "mode", "variance", "stddev",
)  # fmt: skip

# Names in these namespaces that are no functions of tensors, each with the reason.
NO_FUNCTIONS = {
    "broadcast_shapes": "takes no tensor",
    "cond": "a higher-order operator, which refuses masked tensors",
    "get_rng_state": "the state of the random numbers",
    "set_rng_state": "the state of the random numbers",
    "is_tensor": "asks for the type",
    "set_default_tensor_type": "sets a default",
    "assert_int_or_pair": "checks Python numbers",
    "boolean_dispatch": "makes functions",
    "handle_torch_function": "torch's own machinery",
    "overload": "a mark for type checkers",
    "as_masked_tensor": "makes tensors of torch.masked",
    "is_masked_tensor": "asks for the type of torch.masked",
    "masked_tensor": "makes tensors of torch.masked",
    "skip_init": "makes modules",
    "convert_conv2d_weight_memory_format": "changes a module",
    "convert_conv3d_weight_memory_format": "changes a module",
    "remove_spectral_norm": "changes a module",
    "remove_weight_norm": "changes a module",
}


def functions() -> Iterator[str]:
    """``nn.functional.kl_div``: every function written in Python, by its name below torch."""
    for name in sorted(set(torch.__all__) - set(dir(torch.functional))):
        value = getattr(torch, name, None)
        if isinstance(value, FunctionType) and "Tensor" in str(value.__annotations__):
            yield f"torch.{name}"
    for namespace in NAMESPACES:
        for name in sorted(dir(namespace)):
            if not name.startswith("_") and _written_in_python(getattr(namespace, name)):
                yield f"{namespace.__name__.removeprefix('torch.')}.{name}"


def _written_in_python(value: object) -> bool:
    if isinstance(value, (ModuleType, type)) or not callable(value):
        return False
    function = inspect.unwrap(value)
    return isinstance(function, FunctionType) and function.__module__.startswith("torch.")


def modules() -> Iterator[str]:
    """``nn.Linear``: every module class of torch.nn."""
    for name in sorted(dir(torch.nn)):
        value = getattr(torch.nn, name)
        if isinstance(value, type) and issubclass(value, torch.nn.Module):
            yield f"nn.{name}"


def distributions() -> Iterator[str]:
    """``distributions.Normal.log_prob``: each method of each distribution, transform, and kl_divergence."""
    for name in sorted(torch.distributions.__all__):
        value = getattr(torch.distributions, name)
        if isinstance(value, type) and issubclass(value, torch.distributions.Distribution):
            for method in METHODS:
                yield f"distributions.{name}.{method}"
        elif isinstance(value, type) and issubclass(value, torch.distributions.Transform):
            for method in ("forward", "inverse", "log_abs_det_jacobian"):
                yield f"distributions.{name}.{method}"
        else:
            yield f"distributions.{name}"


def all_names() -> list[str]:
    """Every name."""
    return [*functions(), *modules(), *distributions()]
