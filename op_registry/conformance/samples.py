"""Sample calls from torch's own operator database. The only module that imports torch.testing._internal.

A :class:`Sample` is a function and plain arguments; masks.py makes masks for it. Samples are identified by number: the
database's generators are seeded, so they give the same list every time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import math
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.conformance import plain_torch
from op_registry.conformance.own_operators import (
    OwnForm,
    RegisteredOperator,
    forms_of,
    in_place,
    into_out,
    samples_of_rule,
)
from op_registry.conformance.plain_torch import Recorder, calls_of
from op_registry.conformance.sample import Operator, copied, start_all_random_numbers, tree_map
from op_registry.conformance.sample import Sample as Sample
from op_registry.conformance.sample import chosen as chosen
from op_registry.registration import no_operator
from op_registry.registry import registry
from op_registry.rule import packet_name

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

# Why an entry is not tested.
NOT_ON_THIS_MACHINE = "needs a device that this machine lacks"
NO_TENSOR = "takes no strided tensor"
# How many samples of an entry are recorded to find calls of an overload.
MOST_RECORDED = 60
# With fewer recorded calls of an overload, each is also made on larger tensors.
FEW = 3
# Entries for which torch 2.13 itself leaves part of out= unwritten.
LEFT_UNWRITTEN = ("fft_ihfft2", "fft_ihfftn")


@contextlib.contextmanager
def _generating_samples() -> Iterator[None]:
    """A context for the database's sample generators: without warnings, and faster.

    They seed all generators before every sample; that is replaced with the cheap `start_all_random_numbers`. They also
    search the stack for the running unittest, reading the source of each frame (under pytest, 0.1 s for each entry);
    that is disabled.
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
    """Replaces the search for the running unittest: there is none."""


class DatabaseOperator(Operator):
    """An OpInfo of torch's operator database."""

    def __init__(self, info: OpInfo) -> None:
        self.info = info
        self.name = info.formatted_name
        self.dtypes = frozenset(info.dtypes)

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        if not self.info.supports_autograd or torch.float64 not in self.info.backward_dtypes:
            return None
        return super().gradient_dtype

    def samples(self, dtype: torch.dtype) -> list[Sample]:
        differentiable = bool(self.info.supports_autograd) and dtype in self.info.backward_dtypes
        try:
            generated = self._generated(dtype, differentiable)
        except ValueError:
            # Some generators set requires_grad on integers. Without it, all real and complex tensors are variables.
            generated = self._generated(dtype, False)
        generated += self._of_the_rule(dtype, len(generated))
        return generated + self._with_numbers(dtype, len(generated))

    def _with_numbers(self, dtype: torch.dtype, first: int) -> list[Sample]:
        """Samples of a binary operator with a Python number as one operand, which torch's own lack."""
        from torch.testing._internal.opinfo import core

        if type(self) is not DatabaseOperator or not isinstance(self.info, core.BinaryUfuncInfo):
            return []
        requires_grad = dtype in self.info.backward_dtypes and (dtype.is_floating_point or dtype.is_complex)
        with _generating_samples():
            inputs = core.generate_elementwise_binary_with_scalar_samples(
                self.info, device="cpu", dtype=dtype, requires_grad=requires_grad
            )
            samples = [self._sample(i, first, dtype, requires_grad) for i in inputs]
        wanted = [s for s in samples if any(t.ndim == 2 for t in s.tensors)]
        return [dataclasses.replace(sample, number=first + n) for n, sample in enumerate(wanted)]

    def _of_the_rule(self, dtype: torch.dtype, first: int) -> list[Sample]:
        """Additional samples from the rule of the operator of this name, numbered from `first`."""
        packet = getattr(torch.ops.aten, self.info.aten_name or "", None)
        rule = registry.written(packet.default) if packet is not None and "default" in packet.overloads() else None
        if rule is None or type(self) is not DatabaseOperator:
            return []
        start_all_random_numbers()
        calls = enumerate(samples_of_rule(rule, dtype), first)
        return [Sample(self._function, args, kwargs, number, dtype) for number, (args, kwargs) in calls]

    def _generated(self, dtype: torch.dtype, requires_grad: bool) -> list[Sample]:
        generated = []
        with _generating_samples():
            try:
                for number, inputs in enumerate(self.info.sample_inputs("cpu", dtype, requires_grad=requires_grad)):
                    generated.append(self._sample(inputs, number, dtype, requires_grad))
            except (StopIteration, RuntimeError, AssertionError):
                # Some generators fail midway if a device is missing: use the samples up to there.
                pass
        return generated

    @property
    def _function(self) -> Callable[..., Any]:
        """The entry's function; a torch.masked function is looked up at each call, so that a subject can replace it."""
        module, _, name = self.info.name.partition(".")
        if module != "masked":
            return self.info.op

        @functools.wraps(self.info.op)
        def named(*args: Any, **kwargs: Any) -> Any:
            return getattr(torch.masked, name)(*args, **kwargs)

        return named

    def _sample(self, inputs: SampleInput, number: int, dtype: torch.dtype, requires_grad: bool = False) -> Sample:
        info, function = self.info, self._function

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        def call_checked(*args: Any, **kwargs: Any) -> Any:
            return info.gradcheck_wrapper(function, *args, **kwargs)

        wrapped = getattr(info.gradcheck_wrapper, "__name__", "") != "<lambda>"
        call.__name__ = self.name
        fn = functools.wraps(call)(call_checked) if wrapped else function
        args, kwargs = (inputs.input, *inputs.args), dict(inputs.kwargs)
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
            inputs.output_process_fn_grad,
            bool(info.supports_autograd),
            bool(info.supports_gradgrad),
            "empty" in self.name or bool(getattr(info, "has_nondeterministic_output", False)),
            differentiable if requires_grad else None,
            uninitialised="empty" in self.name,
        )

    def error_samples(self) -> list[Sample]:
        if self.info.error_inputs_func is None:
            return []
        with _generating_samples():
            return [
                self._sample(e.sample_input, n, self.preferred_dtype)
                for n, e in enumerate(self.info.error_inputs("cpu"))
            ]


class VariantOperator(DatabaseOperator):
    """``add+inplace`` or ``add+out``: an entry's in-place form on a copy of its first tensor, or its out= form."""

    def __init__(self, info: OpInfo, variant: str) -> None:
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
    """One overload, called directly with the arguments that it receives in an entry's samples."""

    def __init__(self, op: OpOverload, entry: DatabaseOperator) -> None:
        self.op, self.entry = op, entry
        self.name = f"{entry.name}:{op}"
        self.dtypes = entry.dtypes

    def samples(self, dtype: torch.dtype) -> list[Sample]:
        direct: list[Sample] = []
        for sample in self.entry.samples(dtype)[:MOST_RECORDED]:
            for op, args, kwargs in Recorder().recorded(sample.fn, *sample.args, **sample.kwargs):
                if op is self.op:
                    call = _direct_call(sample, op, args, kwargs)
                    direct.append(dataclasses.replace(call, number=len(direct)))
        return [*direct, *_enlarged(direct)] if len(direct) < FEW else direct


def _enlarged(samples: Sequence[Sample]) -> list[Sample]:
    """The same calls with every tensor concatenated with its reverse, if plain torch runs them."""
    enlarged = []
    for number, sample in enumerate(samples, len(samples)):
        args, kwargs = sample.with_tensors(_with_reverse)
        larger = dataclasses.replace(sample, args=args, kwargs=kwargs, number=number)
        if plain_torch.forward(larger).error is None:
            enlarged.append(larger)
    return enlarged


def _with_reverse(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, plain_torch.in_reverse(tensor)], -1) if tensor.ndim else tensor


def _without_expecttest() -> None:
    """Load the database's modules where expecttest is not installed: they import it for texts in torch's own tests."""
    if importlib.util.find_spec("expecttest") is not None:
        return
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules):
        sys.modules["expecttest"] = stand_in
        importlib.import_module("torch.testing._internal.common_methods_invocations")
        loaded = {name: module for name, module in sys.modules.items() if module is not stand_in}
    sys.modules.update(loaded)


@functools.cache
def database() -> dict[str, DatabaseOperator]:
    """Every entry of torch's operator database, by its name there."""
    _without_expecttest()
    from torch.testing._internal.common_methods_invocations import op_db

    return {operator.name: operator for operator in map(DatabaseOperator, op_db)}


@functools.cache
def variants() -> dict[str, VariantOperator]:
    """The in-place form of every entry that has one, and the out= form of every entry that takes out=."""
    operators = []
    for operator in database().values():
        info = operator.info
        if info.inplace_variant is not None:
            operators.append(VariantOperator(info, "inplace"))
        if info.supports_out and operator.name not in LEFT_UNWRITTEN:
            operators.append(VariantOperator(info, "out"))
    return {operator.name: operator for operator in operators}


def operator_named(name: str) -> Operator:
    """An entry of the database by its name there (``add``, ``add+inplace``), or an overload by its name in torch.ops.

    ``add@int64`` is the entry in that dtype only, ``add@int64@0/3`` with every third of its samples.
    """
    name, *piece = name.split("@")
    if piece:
        operator = operator_named(name).in_dtype(getattr(torch, piece[0]))
        return operator.with_part(part(piece[1])) if len(piece) > 1 else operator
    name = name.removeprefix("torch.ops.")
    plain_name, _, form = name.partition("+")
    if not form and _is_overload(name):
        return RegisteredOperator(overload_named(name))  # without the database, whose import takes seconds
    entries = database()
    if form and name.replace(".", "_") in variants():
        return variants()[name.replace(".", "_")]
    if form:
        return _form_named(plain_name, form)
    formatted = name.replace(".", "_")
    if formatted in entries:
        return entries[formatted]
    return RegisteredOperator(overload_named(name))


def _is_overload(name: str) -> bool:
    """Whether this names an overload in torch.ops by its namespace; no database entry has such a name."""
    namespace, _, rest = name.replace("::", ".").partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), rest.partition(".")[0], None) if rest else None
    return isinstance(packet, OpOverloadPacket)


def overload_named(name: str) -> OpOverload:
    """An overload by its name in torch.ops: ``aten.add.Tensor``, ``mylib::gelu_fast``."""
    namespace, _, rest = name.replace("::", ".").partition(".")
    packet_part, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), packet_part, None)
    if packet is None:
        raise LookupError(f"no operator is called {name}: neither in torch's operator database nor under torch.ops")
    return getattr(packet, overload or "default")


def _form_named(name: str, form: str) -> OwnForm:
    for operator in forms_of(overload_named(name)):
        if operator.form == form:
            return operator
    raise LookupError(f"{name} has no {form} form: neither in torch's operator database nor under torch.ops")


def operators_of(op: OpOverload | OpOverloadPacket | Callable[..., Any] | str) -> list[Operator]:
    """What to run in order to check `op`: the database entries that call it, or the operator itself.

    A function of torch's (torch.softmax) stands for the entries of this function, or for the aten operator of its name.
    TypeError for any other.
    """
    if isinstance(op, str):
        return [operator_named(op)]
    if not isinstance(op, (OpOverload, OpOverloadPacket)):
        entries_of_function = _entries_of_function(op)
        if entries_of_function:
            return [*entries_of_function]
        op = _aten_operator_of(op)
    overloads = [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]
    # The database has only torch's operators, and searching it takes a while.
    callers = entries_by_overload() if overloads[0].namespace == "aten" else {}
    entries = {name: None for overload in overloads for name in callers.get(overload, ())}
    if entries:
        return [database()[name] for name in entries]
    registered = [overload for overload in overloads if overload in registry]
    if not registered:
        raise LookupError(f"{packet_name(op)} has no rule, and torch's operator database does not call it")
    return [o for overload in registered for o in (RegisteredOperator(overload), *forms_of(overload))]


def _entries_of_function(function: Callable[..., Any]) -> list[DatabaseOperator]:
    """The entries of the database for this very function, or for another name of it."""
    if not callable(function):
        return []
    found = []
    for operator in database().values():
        info = operator.info
        spellings = (info.op, info.method_variant, info.inplace_variant, *(alias.op for alias in info.aliases))
        if any(function is spelling for spelling in spellings):
            found.append(operator)
    return found


def _aten_operator_of(function: object) -> OpOverloadPacket:
    """The aten operator with the same name that a C++ function dispatches; TypeError for any other function."""
    name = getattr(function, "__name__", "")
    in_cpp = isinstance(function, BUILTIN) and getattr(function, "__module__", None) != "builtins"
    if in_cpp and isinstance(getattr(torch.ops.aten, name, None), OpOverloadPacket):
        return getattr(torch.ops.aten, name)
    raise TypeError(f"check({function!r}): {no_operator(function)}, or the name of an entry of torch's database")


BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType)


@functools.cache
def overloads_called(entry: str, most: int = 40) -> tuple[OpOverload, ...]:
    """The overloads that an entry's first samples call, without decomposing composite operators."""
    operator = database()[entry]
    overloads: dict[OpOverload, None] = {}
    if operator.dtypes:
        for sample in itertools.islice(operator.samples(operator.preferred_dtype), most):
            overloads |= dict.fromkeys(calls_of(sample.fn, *sample.args, **sample.kwargs))
    return tuple(overloads)


def overload_samples(operator: Operator, dtype: torch.dtype, skip: Callable[[OpOverload], bool]) -> Iterator[Sample]:
    """For each overload that an operator's samples call: a direct call of it, with the most informative arguments.

    These are what P7 compiles: many of the database's own functions are written in ways that can't be compiled.
    """
    best: dict[OpOverload, tuple[tuple[bool, ...], Sample]] = {}
    for sample in sorted(chosen(operator.samples(dtype), 40), key=lambda sample: _small(sample.tensors)):
        recorder = Recorder()
        calls = recorder.recorded(sample.fn, *sample.args, **sample.kwargs)
        for (op, args, kwargs), elements in zip(calls, recorder.elements, strict=False):
            if skip(op):
                continue
            rank = (elements == 0, *_small(Sample(op, args, kwargs, 0, dtype).tensors))
            if op not in best or rank < best[op][0]:
                best[op] = rank, _direct_call(sample, op, args, kwargs)
    for _, direct in best.values():
        yield direct


def entry_samples(operator: Operator, dtype: torch.dtype) -> list[Sample]:
    """Samples of an entry's own function that plain torch runs, the most informative first."""

    def rank(sample: Sample) -> tuple[bool, ...]:
        return (plain_torch.derivative(sample).order == 0, *_small(sample.tensors))

    samples = [s for s in chosen(operator.samples(dtype), 40) if s.tensors and plain_torch.forward(s).error is None]
    return sorted(samples, key=rank)


def _direct_call(sample: Sample, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sample:
    """A recorded call as a sample, on copies: the recorded tensors may be views, or have been modified since."""
    copied_args, copied_kwargs = tree_map(copied, (args, kwargs))
    return Sample(
        op,
        copied_args,
        copied_kwargs,
        sample.number,
        sample.dtype,
        # A compiled detach_ does not change requires_grad, of plain tensors either.
        differentiable=sample.differentiable and op is not torch.ops.aten.detach_.default,
        valueless=sample.valueless or torch.Tag.nondeterministic_seeded in op.tags,
        variables=_variables(sample, args, kwargs) if sample.variables is not None else None,
        uninitialised=sample.uninitialised,
    )


def _small(tensors: Sequence[Tensor]) -> tuple[bool, bool, bool]:
    """A sort key that puts small tensors, which test little, last.

    A masked tensor of one element is all valid or all invalid; a single row has no pairs; of two or three elements,
    those that one result depends on are rarely all valid.
    """
    return (
        any(t.numel() < 2 for t in tensors),
        any(1 in t.shape for t in tensors),
        any(t.numel() < 4 for t in tensors),
    )


def _variables(sample: Sample, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
    """The tensors of a recorded call to differentiate with respect to: all but those that the sample rules out."""
    constant = {
        id(t) for n, t in enumerate(sample.tensors) if sample.variables is not None and n not in sample.variables
    }
    recorded = Sample(sample.fn, args, kwargs, 0, sample.dtype).tensors
    return frozenset(n for n, t in enumerate(recorded) if id(t) not in constant)


@functools.cache
def entries_by_overload() -> dict[OpOverload, tuple[str, ...]]:
    """The names of the entries that call each overload."""
    entries: dict[OpOverload, list[str]] = {}
    for name in database():
        for overload in overloads_called(name):
            entries.setdefault(overload, []).append(name)
    return {overload: tuple(names) for overload, names in entries.items()}


def left_to_others(operator: Operator, once: bool, few: int) -> Callable[[OpOverload], bool]:
    """A predicate: whether others than this operator ask an overload; if `once`, the first few entries that call it."""
    owners = entries_by_overload() if once else {}
    return lambda op: operator.name not in owners.get(op, (operator.name,))[:few]


# ----------------------------------------------------------------------------------------------------------------------
# Arguments of command lines: a part of a list as ``K/N``, so that each of N runs takes a different part; a number.


def part(text: str) -> slice:
    """Every N-th, beginning with the K-th, K from 0 to N - 1."""
    first, _, of = text.partition("/")
    if not (first.isdigit() and of.isdigit() and int(first) < int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 0 to N - 1")
    return slice(int(first), None, int(of))


def at_least_one(text: str) -> int:
    """A number of things to check: a check of nothing would succeed."""
    if not (text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


# ----------------------------------------------------------------------------------------------------------------------
# Units of work of the full tier, all of about one size: a crash loses little, and slices take about as long.

# The most samples in a piece, each of which is tried under every mask and law.
MOST_SAMPLES = 50


def pieces_of(name: str) -> list[str]:
    """An operator's name in each dtype (``add@int64``), with each part of its samples if they are many (``@0/3``)."""
    operator = operator_named(name)
    dtypes = [f"{name}@{str(dtype)[6:]}" for dtype in sorted(operator.dtypes, key=str)]
    if not dtypes:
        return [name]
    parts = math.ceil(len(operator.samples(operator.preferred_dtype)) / MOST_SAMPLES)
    return [f"{dtype}@{k}/{parts}" for dtype in dtypes for k in range(parts)] if parts > 1 else dtypes
