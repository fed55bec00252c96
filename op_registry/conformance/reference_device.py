"""The devices that operators can be compared on, by name; one of them is written in Python."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

REFERENCE = "reference"
META = "meta"
XLA = "xla"
NAMES = (REFERENCE, META, XLA, "cpu", "cuda", "mps", "xpu")
# Those whose values a law cannot bring to the CPU.
WITHOUT_LAWS = (META, XLA)


class DeviceMissing(Exception):
    """This machine, or this build of torch, lacks the device; the message is torch's own."""


def device_called(name: str) -> torch.device:
    """A device by its name; raises DeviceMissing if it cannot be used.

    This registers the reference device once per process, and no other device can then take its name. It also sets up
    torchax once per process; from then on torchax computes in torch's dtypes.
    """
    if name == REFERENCE:
        _reference()
    try:
        if name == XLA:
            return _xla()
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:  # NotImplementedError is a RuntimeError
        raise DeviceMissing(f"{type(error).__name__}: {str(error).partition('. ')[0]}") from error


@functools.cache
def _reference() -> torch.library.Library:
    """The object that keeps the reference device's kernels registered."""
    return set_up()


@functools.cache
def _xla() -> torch.device:
    """torchax's device, in jax's precise mode: 64-bit numbers keep their width, and matrix products are not rounded."""
    import torchax

    torchax.enable_accuracy_mode()
    return torch.device("jax")


# ----------------------------------------------------------------------------------------------------------------------
# A device for tests, written in Python, on which backward runs in a thread of the engine's own, as on a GPU.

# torch reserves one device type for extensions (``privateuseone``), whose runtime may be written in Python. A tensor on
# "reference" holds a CPU tensor and computes with it; to all other code it is on another device. The device refuses a
# mistake that nobody would notice on a CPU: an operand on the CPU, unless it is a number (0-d, as on a GPU) or a source
# of a copy.
#
# A process can name the device type only once, so each use of it needs its own process.

aten = torch.ops.aten

# Operators that may have operands on two devices.
COPIES = (aten._to_copy.default, aten.copy_.default, aten._copy_from.default)


class RefTensor(Tensor):
    """A tensor on "reference"; `raw` is the CPU tensor that holds its elements."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: Tensor) -> RefTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("reference", 0),
        )
        made.raw = raw
        return made

    def __init__(self, raw: Tensor) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RefTensor({self.raw})"

    def tolist(self) -> Any:
        """torch refuses it for subclasses; on a GPU, it copies the values to the CPU as this does."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(t not in (RefTensor, Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # another subclass's __torch_dispatch__ runs first
        kwargs = dict(kwargs or {})
        device = torch.device(kwargs.pop("device", None) or "reference")
        kwargs.pop("pin_memory", None)

        def held(tensor: Tensor) -> Tensor:
            if isinstance(tensor, RefTensor):
                return tensor.raw
            if tensor.ndim and op not in COPIES:
                raise RuntimeError(f"{op}: all tensors have to be on reference:0, but one is on {tensor.device}")
            return tensor

        note_read(op, device)
        result = op(*tree_map_only(Tensor, held, args), **tree_map_only(Tensor, held, kwargs))
        return as_returned(op, result, args, kwargs, on_cpu=device.type == "cpu")


# Operators that wait for the device, because Python needs a value or the size of a result.
READS = (
    *(aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default),
    *(aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default, aten.bincount.default),
)
_reads: list[list[str]] = []


def note_read(op: OpOverload, device: torch.device) -> None:
    """Note an operator for `host_reads` if it waits for the device."""
    if op in READS or (op is aten._to_copy.default and device.type == "cpu"):
        for noted in _reads:
            noted.append(str(op))


@contextlib.contextmanager
def host_reads() -> Iterator[list[str]]:
    """The operators called inside the block that wait for the device; on a GPU, each would synchronise."""
    noted: list[str] = []
    _reads.append(noted)
    try:
        yield noted
    finally:
        _reads.remove(noted)


def as_returned(op: OpOverload, result: Any, args: Any, kwargs: Any, on_cpu: bool) -> Any:
    """An operator's results on the device; a result that is an argument (written in place) is that argument itself."""
    schema = op._schema
    if not schema.is_mutable:
        return result if on_cpu else tree_map_only(Tensor, RefTensor, result)
    written = {}
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            follow_shape(given)
            written[frozenset(argument.alias_info.before_set)] = given
    returns = [schema.returns[0].alias_info] if len(schema.returns) == 1 else [r.alias_info for r in schema.returns]
    results = [result] if len(returns) == 1 else result
    given_back = [
        tree_map_only(Tensor, RefTensor, r) if alias is None else written[frozenset(alias.before_set)]
        for r, alias in zip(results or (), returns, strict=True)
    ]
    return (given_back[0] if len(returns) == 1 else tuple(given_back)) if returns else None


def follow_shape(given: Any) -> None:
    """Give a tensor the shape of its CPU tensor, after `unsqueeze_` or an `out=` that was resized.

    torch refuses to make a tensor larger than at its creation.
    """
    if isinstance(given, RefTensor) and (given.shape, given.stride()) != (given.raw.shape, given.raw.stride()):
        with torch._C._DisableTorchDispatch():
            given.as_strided_(given.raw.shape, given.raw.stride(), given.raw.storage_offset())


class Module:
    """The module torch.reference: a device with the CPU's random numbers, and without autocast."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


def set_up() -> torch.library.Library:
    """Make "reference" a device of this process, as long as the result is kept."""
    _setup_privateuseone_for_python_backend("reference", Module())
    # Only these kernels are called without Python dispatch: those without a tensor argument, and inside torch.tensor.
    library = torch.library.Library("aten", "IMPL")
    for op in factories():
        library.impl(op.name().partition("::")[2], made_by(op), "PrivateUse1")
    library.impl("_copy_from", copied_from, "PrivateUse1")
    return library


def factories() -> list[OpOverload]:
    """The operators that make a tensor without a tensor argument, and for which each device has its own kernel."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        if op is None or any("Tensor" in str(a.type) for a in op._schema.arguments):
            continue
        takes_device = any(a.name == "device" for a in op._schema.arguments)
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if takes_device and not composite:
            found.append(op)
    return found


def made_by(op: OpOverload) -> Any:
    """A factory for this device, which calls the CPU's."""

    def make(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> RefTensor:
        return RefTensor(op(*args, device="cpu", **kwargs))

    return make


def copied_from(source: Tensor, target: RefTensor, non_blocking: bool = False) -> Tensor:
    """torch.tensor(…, device="reference") copies to the device without dispatching to a subclass."""
    target.raw.copy_(source)
    return target


# ----------------------------------------------- count the programs that XLA compiles, from the events that jax reports

COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclass
class Compilations:
    """The number of compilations in a region."""

    number: int = 0


@contextlib.contextmanager
def compilations() -> Iterator[Compilations]:
    """Count the compilations in the region, by all threads."""
    from jax import monitoring

    counted = Compilations()

    def count(event: str, duration: float, **_: object) -> None:
        counted.number += event == COMPILED

    monitoring.register_event_duration_secs_listener(count)
    try:
        yield counted
    finally:
        monitoring.unregister_event_duration_listener(count)
