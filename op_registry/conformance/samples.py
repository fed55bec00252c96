"""Sample calls made from torch's own operator database. The only module that touches torch.testing._internal.

A :class:`Sample` is a function and plain arguments; masks are laid over it elsewhere (masks.py). Samples are found
again by number: the database is asked with the same seed, and gives the same list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.conformance import plain_torch
from op_registry.conformance.own_operators import OwnForm, RegisteredOperator, forms_of, samples_of_rule
from op_registry.conformance.sample import Operator, start_all_random_numbers
from op_registry.conformance.sample import Sample as Sample
from op_registry.conformance.sample import chosen as chosen
from op_registry.conformance.trees import tree_map
from op_registry.conformance.variant_calls import in_place, into_out
from op_registry.conformance.watching import Recorder, calls_of
from op_registry.registry import registry
from op_registry.rule import packet_name

# What the machine that runs conformance cannot do, or a subject has no business with.
NOT_ON_THIS_MACHINE = "needs a device that this machine lacks"
NO_TENSOR = "takes no strided tensor"
# Samples of an entry whose calls are recorded, to be made directly.
MOST_RECORDED = 60
# Where fewer calls of an overload are recorded, they are made on larger tensors too.
FEW = 3
# Of what is given as out=, torch 2.13 itself leaves a part as it was.
LEFT_UNWRITTEN = ("fft_ihfft2", "fft_ihfftn")


@contextlib.contextmanager
def _database_asked() -> Iterator[None]:
    """Around the database's generators: no warnings, their seeding before every sample in its cheap form, and no search
    of the stack for the unittest that asks, which reads the source of each frame (under pytest, 0.1 s an entry).
    """
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    start_all_random_numbers()
    with contextlib.ExitStack() as patches:
        patches.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        patches.enter_context(mock.patch.object(common_utils, "set_rng_seed", start_all_random_numbers))
        for module in (common_utils, core):
            patches.enter_context(mock.patch.object(module, "extract_test_fn", _no_test))
        yield


def _no_test() -> None:
    """The unittest that asks the database for samples: there is none."""


class DatabaseOperator(Operator):
    """One of the OpInfos."""

    def __init__(self, info: Any) -> None:
        self.info = info
        self.name = info.formatted_name
        self.dtypes = frozenset(info.dtypes)

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        if not self.info.supports_autograd or torch.float64 not in self.info.backward_dtypes:
            return None
        return super().gradient_dtype

    def samples(self, dtype: torch.dtype) -> list[Sample]:
        wanted = bool(self.info.supports_autograd) and dtype in self.info.backward_dtypes
        try:
            found = self._generated(dtype, wanted)
        except ValueError:
            # Some generators ask for a derivative by integers; then all that hold numbers have one.
            found = self._generated(dtype, False)
        return [*found, *self._of_the_rule(dtype, len(found))]

    def _of_the_rule(self, dtype: torch.dtype, first: int) -> list[Sample]:
        """What the rule of the operator of this name brings along, where the database's own samples tell too little."""
        packet = getattr(torch.ops.aten, self.info.aten_name or "", None)
        rule = registry.written(packet.default) if packet is not None and "default" in packet.overloads() else None
        if rule is None or type(self) is not DatabaseOperator:
            return []
        start_all_random_numbers()
        calls = enumerate(samples_of_rule(rule, dtype), first)
        return [Sample(self._function, args, kwargs, number, dtype) for number, (args, kwargs) in calls]

    def _generated(self, dtype: torch.dtype, requires_grad: bool) -> list[Sample]:
        found = []
        with _database_asked():
            try:
                for number, given in enumerate(self.info.sample_inputs("cpu", dtype, requires_grad=requires_grad)):
                    found.append(self._sample(given, number, dtype, requires_grad))
            except (StopIteration, RuntimeError, AssertionError):
                # Some generators stop in the middle where a device is missing: what they gave is what there is.
                pass
        return found

    @property
    def _function(self) -> Callable[..., Any]:
        """The entry's function; of torch.masked whatever has its name when it is called, for a subject to replace."""
        module, _, name = self.info.name.partition(".")
        if module != "masked":
            function: Callable[..., Any] = self.info.op
            return function

        @functools.wraps(self.info.op)
        def named(*args: Any, **kwargs: Any) -> Any:
            return getattr(torch.masked, name)(*args, **kwargs)

        return named

    def _sample(self, given: Any, number: int, dtype: torch.dtype, marked: bool = False) -> Sample:
        info, function = self.info, self._function

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        def call_checked(*args: Any, **kwargs: Any) -> Any:
            return info.gradcheck_wrapper(function, *args, **kwargs)

        wrapped = getattr(info.gradcheck_wrapper, "__name__", "") != "<lambda>"
        call.__name__ = self.name
        fn = functools.wraps(call)(call_checked) if wrapped else function
        args, kwargs = (given.input, *given.args), dict(given.kwargs)
        tensors = Sample(fn, args, kwargs, number, dtype).tensors
        differentiable = frozenset(n for n, t in enumerate(tensors) if t.requires_grad)
        args, kwargs = Sample(fn, args, kwargs, number, dtype).with_tensors(
            lambda t: t.detach() if t.requires_grad else t
        )
        return Sample(
            fn,
            args,
            kwargs,
            number,
            dtype,
            given.output_process_fn_grad,
            bool(info.supports_autograd),
            bool(info.supports_gradgrad),
            "empty" in self.name or bool(getattr(info, "has_nondeterministic_output", False)),
            differentiable if marked else None,
        )

    def error_samples(self) -> list[Sample]:
        if self.info.error_inputs_func is None:
            return []
        with _database_asked():
            return [
                self._sample(e.sample_input, n, self.preferred_dtype)
                for n, e in enumerate(self.info.error_inputs("cpu"))
            ]


class VariantOperator(DatabaseOperator):
    """The in-place or out= form of an entry, on a copy of its first tensor or into new ones: ``add+inplace``."""

    def __init__(self, info: Any, variant: str) -> None:
        super().__init__(info)
        self.variant = variant
        self.name = f"{self.name}+{variant}"

    def samples(self, dtype: torch.dtype) -> list[Sample]:
        function = in_place(self.info.inplace_variant) if self.variant == "inplace" else into_out(self.info.op)
        differentiable = self.variant == "inplace" and bool(self.info.supports_inplace_autograd)
        return [
            dataclasses.replace(sample, fn=function, differentiable=differentiable and sample.differentiable)
            for sample in super().samples(dtype)
            if isinstance(sample.args[0], Tensor)
        ]

    def error_samples(self) -> list[Sample]:
        return []


class DirectOperator(Operator):
    """One overload, called directly with what the samples of an entry give it."""

    def __init__(self, op: OpOverload, entry: DatabaseOperator) -> None:
        self.op, self.entry = op, entry
        self.name = f"{entry.name}:{op}"
        self.dtypes = entry.dtypes

    def samples(self, dtype: torch.dtype) -> list[Sample]:
        found: list[Sample] = []
        for sample in self.entry.samples(dtype)[:MOST_RECORDED]:
            recorder = Recorder()
            try:
                recorder.run(sample.fn, *sample.args, **sample.kwargs)
            except Exception:
                # What plain torch cannot run on this machine is no sample.
                continue
            for op, args, kwargs in recorder.calls:
                if op is self.op:
                    own_args, own_kwargs = tree_map(_copied, (args, kwargs))
                    found.append(Sample(op, own_args, own_kwargs, len(found), dtype, valueless=sample.valueless))
        return [*found, *_grown(found)] if len(found) < FEW else found


def _grown(samples: Sequence[Sample]) -> list[Sample]:
    """The same calls on more: every tensor twice in a row, the second time in reverse, where plain torch takes that."""
    grown = []
    for number, sample in enumerate(samples, len(samples)):
        args, kwargs = sample.with_tensors(_twice)
        more = dataclasses.replace(sample, args=args, kwargs=kwargs, number=number)
        if plain_torch.forward(more).error is None:
            grown.append(more)
    return grown


def _twice(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, plain_torch.in_reverse(tensor)], -1) if tensor.ndim else tensor


@functools.cache
def database() -> dict[str, DatabaseOperator]:
    """Every entry of torch's operator database, by its name there."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {operator.name: operator for operator in map(DatabaseOperator, op_db)}


@functools.cache
def variants() -> dict[str, VariantOperator]:
    """The in-place form of every entry that has one, and the out= form of every entry that takes out=."""
    found = []
    for operator in database().values():
        info = operator.info
        if info.inplace_variant is not None:
            found.append(VariantOperator(info, "inplace"))
        if info.supports_out and operator.name not in LEFT_UNWRITTEN:
            found.append(VariantOperator(info, "out"))
    return {operator.name: operator for operator in found}


def operator_named(name: str) -> Operator:
    """An entry of the database by its name there (``add``, ``add+inplace``), or an overload by torch.ops' name.

    ``add@int64`` is the entry in that dtype alone.
    """
    name, _, dtype = name.partition("@")
    if dtype:
        return operator_named(name).in_dtype(getattr(torch, dtype))
    entries = database()
    plain_name, _, form = name.partition("+")
    if form and name.replace(".", "_") in variants():
        return variants()[name.replace(".", "_")]
    if form:
        return _form_named(plain_name, form)
    formatted = name.replace(".", "_")
    if formatted in entries:
        return entries[formatted]
    return RegisteredOperator(overload_named(name))


def overload_named(name: str) -> OpOverload:
    """An overload by torch.ops' name: ``aten.add.Tensor``, ``mylib::gelu_fast``."""
    namespace, _, rest = name.replace("::", ".").partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace, None), packet, None)
    if found is None:
        raise LookupError(f"no operator is called {name}: neither in torch's operator database nor under torch.ops")
    return getattr(found, overload or "default")


def _form_named(name: str, form: str) -> OwnForm:
    for operator in forms_of(overload_named(name)):
        if operator.form == form:
            return operator
    raise LookupError(f"{name} has no {form} form: neither in torch's operator database nor under torch.ops")


def in_each_dtype(name: str) -> list[str]:
    """The names of an operator in each of its dtypes alone: short pieces of work, of which a crash costs less."""
    return [f"{name}@{str(dtype)[6:]}" for dtype in sorted(operator_named(name).dtypes, key=str)] or [name]


def operators_of(op: OpOverload | OpOverloadPacket | str) -> list[Operator]:
    """What to run in order to check `op`: the entries that call it, or the operator by itself."""
    if isinstance(op, str):
        return [operator_named(op)]
    overloads = [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]
    # The database is of torch's operators; to walk through it takes a while.
    callers = entries_by_overload() if overloads[0].namespace == "aten" else {}
    entries = {name: None for overload in overloads for name in callers.get(overload, ())}
    if entries:
        return [database()[name] for name in entries]
    registered = [overload for overload in overloads if overload in registry]
    if not registered:
        raise LookupError(f"{packet_name(op)} has no rule, and torch's operator database does not call it")
    return [o for overload in registered for o in (RegisteredOperator(overload), *forms_of(overload))]


@functools.cache
def overloads_called(entry: str, most: int = 40) -> tuple[OpOverload, ...]:
    """The overloads that an entry's first samples call, composite operators whole."""
    operator = database()[entry]
    seen: dict[OpOverload, None] = {}
    if operator.dtypes:
        for sample in itertools.islice(operator.samples(operator.preferred_dtype), most):
            seen |= dict.fromkeys(calls_made(sample))
    return tuple(seen)


def overload_samples(operator: Operator, dtype: torch.dtype, skip: Callable[[OpOverload], bool]) -> Iterator[Sample]:
    """A sample for each overload that an operator's samples call: the overload itself, with what it was given there, in
    the call that tells most.

    What compilers are asked to compile: the functions of the database are written in ways that no compiler reads.
    """
    best: dict[OpOverload, tuple[tuple[bool, ...], Sample]] = {}
    for sample in sorted(chosen(operator.samples(dtype), 40), key=lambda sample: _small(sample.tensors)):
        recorder = Recorder()
        try:
            recorder.run(sample.fn, *sample.args, **sample.kwargs)
        except Exception:
            # What plain torch cannot run on this machine is no sample.
            continue
        for (op, given, named), elements in zip(recorder.calls, recorder.elements, strict=True):
            if skip(op):
                continue
            rank = (elements == 0, *_small(Sample(op, given, named, 0, dtype).tensors))
            if op not in best or rank < best[op][0]:
                best[op] = rank, _call_of_sample(sample, op, given, named)
    for _, found in best.values():
        yield found


def _call_of_sample(sample: Sample, op: OpOverload, given: Any, named: Any) -> Sample:
    """A recorded call of an overload, as a sample: on copies, for it may be of views, or have been written to since."""
    args, kwargs = tree_map(_copied, (given, named))
    return Sample(
        op,
        args,
        kwargs,
        sample.number,
        sample.dtype,
        # Compiled, detach_ leaves requires_grad as it was, for plain tensors too.
        differentiable=sample.differentiable and op is not torch.ops.aten.detach_.default,
        valueless=sample.valueless or torch.Tag.nondeterministic_seeded in op.tags,
        variables=_variables(sample, given, named) if sample.variables is not None else None,
    )


def _small(tensors: Sequence[Tensor]) -> tuple[bool, bool, bool]:
    """What tells less comes later: a single number under a mask is invalid, or has nothing to hide; of one row there
    are no pairs; of two or three elements those that make one result are rarely all valid."""
    return (
        any(t.numel() < 2 for t in tensors),
        any(1 in t.shape for t in tensors),
        any(t.numel() < 4 for t in tensors),
    )


def _copied(leaf: object) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _variables(sample: Sample, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
    """Which tensors of a recorded call are not among those of its sample that have no derivative."""
    constant = {
        id(t) for n, t in enumerate(sample.tensors) if sample.variables is not None and n not in sample.variables
    }
    recorded = Sample(sample.fn, args, kwargs, 0, sample.dtype).tensors
    return frozenset(n for n, t in enumerate(recorded) if id(t) not in constant)


def calls_made(sample: Sample) -> list[OpOverload]:
    """The overloads that a sample calls; none where the call fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return calls_of(sample.fn, *sample.args, **sample.kwargs)
    except Exception:
        # A sample that plain torch cannot run on this machine calls nothing here.
        return []


@functools.cache
def entries_by_overload() -> dict[OpOverload, tuple[str, ...]]:
    """The entries that call an overload."""
    found: dict[OpOverload, list[str]] = {}
    for name in database():
        for overload in overloads_called(name):
            found.setdefault(overload, []).append(name)
    return {overload: tuple(names) for overload, names in found.items()}
