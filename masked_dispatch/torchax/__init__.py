"""Masked tensors on XLA, by torchax: the extra `xla`. Nothing happens until `enable()` is called.

internals.py  the private parts of torchax, each assumption with a test
tensors.py    the masked tensor around torchax tensors, also as argument and result of functions of jax
"""

from __future__ import annotations

from masked_dispatch.tensor.traced import wrappers
from masked_dispatch.torchax.internals import (
    DEVICE_IN_CPP,
    has_array,
    import_torchax,
    mend_slice_scatter,
    refuse_short,
    serve_modes,
    tensor_types,
)
from masked_dispatch.torchax.tensors import OnJax, claim, moved, register_with_jax
from op_registry.records.tracing import readable

__all__ = ["enable"]


def __dir__() -> list[str]:
    return [*__all__]


def enable() -> None:
    """Let masked tensors hold torchax tensors, from then on in this process; calling it again changes nothing.

    Then ``x.to("jax")`` moves a masked tensor, and `masked_tensor(data, mask)` makes one of torchax tensors, within
    torchax's environment (``with torchax.default_env():``, or ``torchax.enable_globally()``).
    ``torchax.interop.jax_jit`` compiles functions that take and return masked tensors, and ``torch.autograd.grad``
    gives their gradients inside.

    Raises ImportError where torchax or jax is not installed; warns about a release of torchax that was not checked.
    """
    torchax = import_torchax()
    kinds = tensor_types(torchax)
    if kinds[0] in wrappers:
        return
    serve_modes(torchax, claim, moved)
    mend_slice_scatter(torchax)
    refuse_short(torchax)
    register_with_jax()
    readable.update(dict.fromkeys(kinds, has_array))
    wrappers.update(dict.fromkeys(kinds, (OnJax, DEVICE_IN_CPP)))
