"""What plain torch does with a call: the operators it calls, whether it raises, how often it differentiates it."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._python_dispatch import TorchDispatchMode

from op_registry.conformance.compare import bit_difference
from op_registry.conformance.sample import Sample, start_random_numbers, tensors_of, tree_leaves
from op_registry.ops.reductions.torch_masked import OPERATORS


@dataclass(frozen=True)
class Forward:
    """A plain call: its error (None if it ran), the tensors it wrote to, and which of these it did not return."""

    error: str | None
    touched: tuple[int, ...] = ()
    written: tuple[int, ...] = ()


@dataclass(frozen=True)
class Derivative:
    """How often a call can be differentiated.

    order   0 to 2
    why     why not more often
    sloped  whether the first derivative is nonzero
    curved  whether the second derivative is nonzero
    """

    order: int
    why: str = ""
    sloped: bool = False
    curved: bool = False


@functools.lru_cache(maxsize=256)
def forward(sample: Sample, seed: int = 0) -> Forward:
    """Run the sample on plain tensors."""
    args, kwargs, copies = sample.copies()
    versions = [t._version for t in copies]
    start_random_numbers(seed)
    try:
        returned = {id(leaf) for leaf in tree_leaves(sample.fn(*args, **kwargs))}
    except Exception as error:
        return Forward(one_line(error))
    bumped = [n for n, (t, v) in enumerate(zip(copies, versions, strict=True)) if t._version != v]
    # Some kernels (batch norm's running statistics) write without bumping the version counter.
    changed = [n for n, (t, before) in enumerate(zip(copies, sample.tensors, strict=True)) if _differ(t, before)]
    return Forward(None, tuple({*bumped, *changed}), tuple(n for n in bumped if id(copies[n]) not in returned))


def variables(sample: Sample, seed: int = 0) -> frozenset[int]:
    """The tensors to differentiate with respect to: real or complex, not overwritten, not ruled out by the sample."""
    written = forward(sample, seed).written
    return frozenset(
        n
        for n, t in enumerate(sample.tensors)
        if (t.is_floating_point() or t.is_complex())
        and n not in written
        and (sample.variables is None or n in sample.variables)
    )


@functools.lru_cache(maxsize=256)
def derivative(sample: Sample, seed: int = 0) -> Derivative:
    """Differentiate the sample on plain tensors, once, and twice if the sample is marked as twice differentiable."""
    if not sample.differentiable:
        return Derivative(0, "the sample is marked as not differentiable")
    forward_error = forward(sample, seed).error
    if forward_error is not None:
        return Derivative(0, f"plain torch raises {forward_error}")
    args, kwargs, copies = sample.copies(variables(sample, seed))
    inputs = [t for t in copies if t.requires_grad]
    start_random_numbers(seed)
    try:
        result = sample.differentiable_part(sample.fn(*args, **kwargs))
        scalar = weighted_sum([(tensor, None) for tensor in tensors_of(result)])
        if scalar is None:
            return Derivative(0, "no result of plain torch requires grad")
        twice = sample.twice_differentiable
        first = torch.autograd.grad(scalar, inputs, allow_unused=True, create_graph=twice)
    except Exception as error:
        return Derivative(0, f"plain torch raises {one_line(error)}")
    sloped = _any_nonzero(first)
    try:
        first_scalar = weighted_sum([(g, None) for g in first if g is not None]) if twice else None
        if first_scalar is None:
            return Derivative(1, "plain torch has no second derivative", sloped)
        second = torch.autograd.grad(first_scalar, inputs, allow_unused=True)
    except Exception as error:
        return Derivative(1, f"plain torch raises {one_line(error)}", sloped)
    return Derivative(2, sloped=sloped, curved=_any_nonzero(second))


@functools.lru_cache(maxsize=256)
def wrong_derivative(sample: Sample, seed: int = 0) -> str | None:
    """How the operator's own derivative differs from central differences of the plain operator; None if it does not.

    Asked along one direction for each float64 tensor, at first order and, where torch has it, at second order.
    """
    order = derivative(sample, seed).order
    wanted = [n for n in sorted(variables(sample, seed)) if sample.tensors[n].dtype is torch.float64]
    for n in wanted if order else ():
        direction = weighting(sample.tensors[n], 300 + n)
        (here, moved), (ahead, _), (behind, _) = (
            _scalars(sample, seed, n, step * direction, order) for step in (0.0, STEP, -STEP)
        )
        for which, *scalars in zip(("derivative", "second derivative"), here, ahead, behind, strict=False):
            slope = _along(scalars[0], moved, direction)
            differences = (float(scalars[1].detach()) - float(scalars[2].detach())) / (2 * STEP)
            if not close_to_differences(slope, differences):
                return (
                    f"the {which} by {_named_argument(sample, n)} along a direction is {slope:.6g}, central "
                    f"differences of the plain operator give {differences:.6g}"
                )
    return None


# How torch says that an operator has no formula for its derivative, and why a sample asks for none.
NO_FORMULA = ("no autograd formula", "not implemented", "no result of plain torch requires grad", "not differentiable")


def says_that_there_is_none(why: str) -> bool:
    """Whether a text says that there is no derivative, and not that one raises."""
    return any(said in why for said in NO_FORMULA)


# The defaults of torch.autograd.gradcheck.
STEP, RELATIVE, ABSOLUTE = 1e-6, 1e-3, 1e-5


def close_to_differences(along: float, slope: float) -> bool:
    """Whether a directional derivative agrees with central differences, which are inexact; also where these are NaN."""
    return abs(slope - along) <= ABSOLUTE + RELATIVE * abs(slope) or slope != slope


def _scalars(sample: Sample, seed: int, n: int, step: Tensor, order: int) -> tuple[list[Tensor], Tensor]:
    """A weighted sum of the results with tensor `n` moved and, at second order, its slope along a direction."""
    args, kwargs, copies = sample.copies(frozenset({n}))
    with torch.no_grad():
        copies[n] += step
    start_random_numbers(seed)
    result = sample.differentiable_part(sample.fn(*args, **kwargs))
    scalar = weighted_sum([(tensor, None) for tensor in tensors_of(result)])
    if scalar is None:
        return [torch.zeros(())] * order, copies[n]
    if order < 2:
        return [scalar], copies[n]
    (gradient,) = torch.autograd.grad(scalar, copies[n], allow_unused=True, create_graph=True)
    slope = torch.zeros(()) if gradient is None else (gradient * weighting(gradient, 400 + n)).sum()
    return [scalar, slope], copies[n]


def _along(scalar: Tensor, moved: Tensor, direction: Tensor) -> float:
    if not scalar.requires_grad:
        return 0.0
    (gradient,) = torch.autograd.grad(scalar, moved, allow_unused=True, retain_graph=True)
    return 0.0 if gradient is None else float((gradient * direction).sum())


def _named_argument(sample: Sample, n: int) -> str:
    """The name of the argument that holds tensor `n` of a sample."""
    names = [a.name for a in sample.fn._schema.arguments] if isinstance(sample.fn, OpOverload) else []
    given = [*zip(names, sample.args, strict=False), *sample.kwargs.items()]
    return next((name for name, value in given if value is sample.tensors[n]), f"tensor {n}")


def _any_nonzero(gradients: Sequence[Tensor | None]) -> bool:
    return any(g is not None and bool(g.any()) for g in gradients)


def one_line(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {first_line(error, 160)}"


def first_line(error: Exception, most: int = 300) -> str:
    """The first line of an exception's message, at most so many characters."""
    return (str(error).strip().splitlines() or [""])[0][:most]


def _differ(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or bit_difference(a, b) is not None


def weighting(data: Tensor, seed: int = 0) -> Tensor:
    """A fixed random weight for each element."""
    return _weights(data.shape, data.dtype, seed)


@functools.lru_cache(maxsize=64)
def _weights(shape: torch.Size, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 17)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=wide, generator=generator).to(dtype)


def weighted_sum(outcome: Sequence[Any], seed: int = 0) -> Tensor | None:
    """A weighted sum over the valid elements of every differentiable result, each with a weight of its own."""
    parts = []
    for position, result in enumerate(outcome):
        if not isinstance(result, tuple):
            continue
        data, mask = result
        if not data.requires_grad:
            continue
        filled = data if mask is None else torch.where(mask, data, torch.zeros((), dtype=data.dtype))
        part = (filled * weighting(data, seed + position)).sum()
        parts.append(part.real if part.is_complex() else part)
    return sum(parts[1:], parts[0]) if parts else None


# A dtype for each element size that torch can flip; it cannot flip some dtypes themselves.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def levelled(tensor: Tensor) -> Tensor:
    """A tensor filled with its last element; integers, which may be indices or lengths, are reversed instead."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return in_reverse(tensor)
    return tensor.detach().reshape(-1)[-1:].clone().expand(tensor.shape).contiguous()


def in_reverse(tensor: Tensor) -> Tensor:
    """The elements of a tensor in reverse order: other values from the same domain."""
    bits = tensor.detach().resolve_conj().resolve_neg().clone().view(_BITS[tensor.element_size()])
    return bits.flip(tuple(range(bits.ndim))).view(tensor.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Intercepts every operator call that Python code makes, above autograd and before composite operators decompose.

# ``torch.var(x, 1)`` is intercepted as ``aten.var.dim`` and ``F.linear`` as ``aten.linear.default``. An
# :class:`Interpreter` computes the result of each call. It keeps notes about tensors in a side table, so that the code
# under test runs on plain tensors, without a tensor subclass.
#
# Torch admits only three classes of mode at the PreDispatch key; an interpreter derives from one of them
# (:class:`SchemaCheckMode`) for that reason only, and uses nothing of it. Checked with torch 2.11 to 2.13;
# tests/conformance/test_conformance.py tests this assumption.

# Factories that take tensors: their results reach Python as copies.
FACTORIES = ("_like", "::linspace", "::logspace")


@contextlib.contextmanager
def torch_masked_as_operators() -> Iterator[None]:
    """Route each reduction of torch.masked to the custom operator that represents it."""
    # By hand: mock.patch.object takes longer than the calls that are watched.
    functions = {name: getattr(torch.masked, name) for name in OPERATORS}
    try:
        for name, operator in OPERATORS.items():
            setattr(torch.masked, name, _named(operator, name))
        yield
    finally:
        for name, function in functions.items():
            setattr(torch.masked, name, function)


def _named(operator: OpOverload, name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    function.__name__ = name
    return function


class Interpreter(SchemaCheckMode):  # type: ignore[misc, no-any-unimported]
    """Runs code with every operator call computed by `evaluate`, and keeps notes about tensors."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, _dispatch_key=torch._C.DispatchKey.PreDispatch)  # type: ignore[attr-defined]
        # By id. The tensor is kept alive with its note, because ids are reused.
        self._notes: dict[int, tuple[Tensor, Any]] = {}
        # Results of FACTORIES, by address: they are copied on the way to Python, with the same memory.
        self._factory_notes: dict[int, tuple[Tensor, Any]] = {}

    def note(self, tensor: Tensor, note: object, op: OpOverload | None = None) -> Tensor:
        """Store `note` about `tensor`, a result of `op`; returns the tensor."""
        self._notes[id(tensor)] = (tensor, note)
        if op is not None and op._schema.name.endswith(FACTORIES) and tensor.numel():
            self._factory_notes[tensor.data_ptr()] = (tensor, note)
        return tensor

    def noted(self, tensor: Tensor) -> Any:
        """The note about `tensor`, or None."""
        entry = self._notes.get(id(tensor))
        if entry is None and self._factory_notes and tensor.layout is torch.strided and tensor.numel():
            entry = self._factory_notes.get(tensor.data_ptr())
            if entry is not None and entry[0].shape != tensor.shape:
                return None
        return entry[1] if entry is not None else None

    def anything_noted(self, args: object, kwargs: object) -> bool:
        """Whether a tensor among the arguments has a note."""
        return any(self.noted(tensor) is not None for tensor in tensors_of((args, kwargs)))

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `fn`, with every operator call that it makes computed by this interpreter."""
        with torch_masked_as_operators(), enable_python_dispatcher(), self:
            return fn(*args, **kwargs)

    def decompose(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run torch's own decomposition of a composite operator; each call that it makes is computed in turn."""
        return self.run(op.decompose, *args, **kwargs)

    def evaluate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of one call on plain tensors, whose notes say what they represent."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # With the Python dispatcher, Python implementations would replace some C++ kernels, and change rounding.
        with no_python_dispatcher():
            result = self.evaluate(func, args, kwargs or {})
        # In-place operators of torch.library.custom_op return nothing.
        return result if func._schema.returns else None


# The overload and the arguments of a call.
RecordedCall = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


class Recorder(Interpreter):
    """Records every call and runs it in plain torch, without decomposing composite operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        # For each call, the number of elements in its results.
        self.elements: list[int] = []

    def evaluate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = len(self.calls)
        self.calls.append((op, args, kwargs))
        self.elements.append(0)
        result = op(*args, **kwargs)
        self.elements[number] = sum(tensor.numel() for tensor in tensors_of(result))
        return result

    def recorded(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[RecordedCall]:
        """The calls that a call of `fn` makes; none if plain torch cannot run it on this machine."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.run(fn, *args, **kwargs)
            except Exception:
                return []
        return self.calls


def calls_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[OpOverload]:
    """The overloads that a call of `fn` makes, in order; none where the call fails."""
    return [op for op, _, _ in Recorder().recorded(fn, *args, **kwargs)]
