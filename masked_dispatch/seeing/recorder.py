"""Record calls while a trace is open: operators, modules, backward and densifications."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.compiler_internals import under_compile
from masked_dispatch.densification import Densification
from masked_dispatch.engine_internals import engine_run
from masked_dispatch.process import Lock
from masked_dispatch.seeing.calls import Call, Kind, Operand
from masked_dispatch.seeing.event import Event, Notes, OpenCall, argument_of, change_of, is_countable, operand_of
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import schema_of
from op_registry.laws.categories import COMPOSITE
from op_registry.resolve import Meaning, resolve
from op_registry.sparse.record import Sparse

# The namespace of this library's own operators.
OWN = "masked_dispatch"
OWN_RULE = "this library's"
COMPILED = "compiled region: its calls go into a graph and are not seen; run it again, or uncompiled, to see them"


class _Stack(threading.local):
    """A thread's open calls, the time it has spent on counting, and the names of the outermost module's submodules."""

    def __init__(self) -> None:
        self.open: list[OpenCall] = []
        self.spent = 0.0
        self.names: dict[int, str] = {}
        self.counting = False


class Recorder:
    """The calls of one trace; see :class:`masked_dispatch.seeing.calls.Call`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.active = True
        # Whether torch traced a call into a graph; whether a function of torch.compile made a call.
        self.saw_graph, self.under_compile = False, False
        self.thread = threading.get_ident()
        self._stack = _Stack()
        self._lock = Lock()
        # The number of the call that made a tensor; () for a masked tensor that is older.
        self._made = Notes()
        # Maps the memory that views share to the last call that wrote to it.
        self._written: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    # ------------------------------------------------------------------------------------------------- operators

    def begin(self, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Event | None:
        """Record the start of an operator's call with masked arguments; return None if the trace omits the call."""
        stack = self._stack
        if stack.counting or (stack.open and not stack.open[-1].shows):
            return None
        tensors = list(tensors_of(op, args, kwargs))
        if any(isinstance(t, MaskedTensor) and _in_graph(t) for _, t in tensors):
            self.compiled_region()
            return None
        with self._counting():
            self.under_compile = self.under_compile or under_compile()
            meaning = resolve(op)
            call = self._new(str(op), "operator", _how(meaning))
            event = Event(call, self.shows(meaning), op=op, meaning=meaning, args=args, kwargs=kwargs)
            stack.open.append(event)
            event.operands = [argument_of(name, t, self.source_of(t), event.writes) for name, t in tensors]
            call.operands = tuple(argument.operand for argument in event.operands)
        event.spent, event.started = stack.spent, time.perf_counter()
        return event

    def end(self, event: Event, result: object) -> None:
        """Record the results of the operator."""
        ended = time.perf_counter()
        with self._counting():
            self._close(event, ended)
            event.results = list(leaves(result))
            event.call.results = tuple(operand_of("result", t) for t in event.results)
            event.call.change = change_of(event)
            for tensor in event.results:
                self._made_by(tensor, event.call.number, event.writes)

    def failed(self, event: Event, error: BaseException) -> None:
        """Record the error that the call raised."""
        self._close(event, time.perf_counter())
        event.call.error = f"{type(error).__name__}: {error}"

    def shows(self, meaning: Meaning) -> bool:
        """Whether the calls that the operator makes, each with its own rule, are recorded too."""
        if meaning.op.namespace == OWN:
            return False
        composite = meaning.rule is not None and meaning.rule.category is COMPOSITE and meaning.base is meaning.op
        return composite or meaning.kind in ("decomposes", "each of a list")

    def compiled_region(self) -> None:
        """Record once for each region that torch is tracing calls into a graph."""
        self.saw_graph = True
        last = self.calls[-1] if self.calls else None
        if last is None or last.kind != "compiled region":
            self._new(COMPILED, "compiled region", "")

    # --------------------------------------------------------------------------------------------------- modules

    def enter_module(self, module: torch.nn.Module, args: Sequence[object]) -> None:
        """Record the start of a module's call."""
        stack = self._stack
        if stack.open and not stack.open[-1].shows:
            return
        if not any(opened.call.kind == "module" for opened in stack.open):
            stack.names = {id(part): name for name, part in module.named_modules()}
        kind, name = type(module).__name__, stack.names.get(id(module), "")
        opened = OpenCall(self._new(f"{name} ({kind})" if name else kind, "module", ""), True, module=id(module))
        stack.open.append(opened)
        with self._counting():
            opened.call.operands = self._operands(args)
        opened.spent, opened.started = stack.spent, time.perf_counter()

    def leave_module(self, module: torch.nn.Module, kwargs: Mapping[str, object], result: object) -> None:
        """Record the results of the module, None if it raised."""
        ended = time.perf_counter()
        opened = next((o for o in reversed(self._stack.open) if o.module == id(module)), None)
        if opened is None:
            return
        with self._counting():
            self._close(opened, ended)
            opened.call.operands += self._operands(kwargs)
            opened.call.results = self._operands(result, "result")

    def _operands(self, value: object, name: str = "") -> tuple[Operand, ...]:
        masked = [t for t in leaves(value) if isinstance(t, MaskedTensor)]
        return tuple(operand_of(name, t, self.source_of(t)) for t in masked)

    # -------------------------------------------------------------------------------------------------- backward

    def current(self) -> int | None:
        """Return the number of the operator call that is running in this thread."""
        stack = self._stack.open
        return stack[-1].call.number if stack and stack[-1].call.kind == "operator" else None

    def gradient(self, of: str, number: int | None, gradients: object, results: object, seconds: float) -> None:
        """Record a gradient at an autograd node.

        of      "result": the gradient of an operator's result, which its formula receives; "operand": the gradients
                that the formula returns
        number  the call of the node's operator, None if it ran before the trace
        """
        if self._stack.counting or (self._stack.open and not self._stack.open[-1].shows):
            return
        given = [t for t in leaves(gradients) if isinstance(t, Tensor)]
        made = [t for t in leaves(results) if isinstance(t, Tensor)]
        if not all(is_countable(t) for t in (*given, *made)):
            return
        with self._counting():
            name = "of a call before the trace" if number is None else f"of {self.calls[number].name}, call {number}"
            call = self._new(f"gradient of {'the' if of == 'result' else 'an'} {of} {name}", "operator", "derivative")
            call.backward, call.seconds = True, seconds
            call.operands = tuple(operand_of("gradient", t, self.source_of(t)) for t in given)
            call.results = tuple(operand_of("result", t) for t in made)
            for tensor in made:
                self._made_by(tensor, call.number, False)

    # ------------------------------------------------------------------------------------------------- densities

    def densified(self, densification: Densification) -> None:
        """Record a densification, at the call during which it happens."""
        if self._stack.open and self._stack.open[-1].call.kind == "operator":
            self._stack.open[-1].densified.append(densification)
            return
        call = self._new(densification.op, "operator", "stored densely outside of a call")
        call.densified = (densification,)

    def mask_dropped(self, invalid: int | None) -> None:
        """An assignment to a plain tensor is about to skip so many invalid elements; None if nobody has counted."""

    def batch_end(self, text: str) -> None:
        """The call that is running shows an end of a batch."""

    def stored_densely(self, record: Sparse) -> None:
        """Record a densification that bypassed the policy, which therefore did not report it."""
        opened = self._stack.open[-1] if self._stack.open else None
        if self._stack.counting or opened is None or opened.call.kind != "operator" or opened.densified:
            return
        size, shape = math.prod(record.shape), tuple(record.shape)
        if not any(size >= o.numel for o in opened.call.masked_operands if o.storage != "dense"):
            return  # smaller than an operand, such as one number for each slice
        why = "the call asks for it" if opened.call.rule == OWN_RULE else "without asking the policy"
        storage = f"shape {shape} as {record.pattern.layout.public} with {record.pattern.stored} stored"
        opened.densified.append(Densification(opened.call.name, (storage,), size * (record.dtype.itemsize + 1), why))

    # ------------------------------------------------------------------------------------------------ where from

    def has_seen(self, tensor: Tensor) -> bool:
        """Return whether a recorded call took or made this masked tensor."""
        return self._made.get(tensor) is not None

    def source_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the calls that made a tensor and that have written to its memory since."""
        made: tuple[int, ...] | None = self._made.get(tensor)
        if made is None:
            made = ()
            if isinstance(tensor, MaskedTensor):
                self._made.set(tensor, made)
        memory = _memory_of(tensor)
        written = None if memory is None else self._written.get(memory)
        if written is None or (made and written <= made[0]):
            return made
        return (*made, written)

    def _made_by(self, tensor: Tensor, number: int, writes: bool) -> None:
        with self._lock.here:
            self._made.set(tensor, (number,))
            memory = _memory_of(tensor)
            if writes and memory is not None:
                self._written[memory] = number

    # ----------------------------------------------------------------------------------------------- open, close

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """What the block computes is not recorded, and its time is not the time of the calls around it."""
        stack, started = self._stack, time.perf_counter()
        before, stack.counting = stack.counting, True
        try:
            with torch.no_grad():
                yield
        finally:
            stack.counting = before
            stack.spent += time.perf_counter() - started

    def _new(self, name: str, kind: Kind, rule: str) -> Call:
        stack = self._stack.open
        parent = stack[-1].call if stack else None
        with self._lock.here:
            call = Call(
                len(self.calls),
                name,
                kind,
                rule,
                parent.number if parent else None,
                parent.depth + 1 if parent else 0,
                engine_run() >= 0,
            )
            self.calls.append(call)
        return call

    def _close(self, opened: OpenCall, ended: float) -> None:
        stack = self._stack
        while stack.open and stack.open.pop() is not opened:
            pass  # modules that raised
        opened.call.seconds = max(0.0, ended - opened.started - (stack.spent - opened.spent))
        opened.call.densified = tuple(opened.densified)


def _in_graph(tensor: MaskedTensor) -> bool:
    """Return whether the tensor is a value in a graph that torch is tracing (False under vmap)."""
    return not tensor._carries_transform and not is_countable(tensor) and not tensor.is_meta


def _memory_of(tensor: Tensor) -> object | None:
    """Return the object that a tensor shares with its views or detached copies; None if there is none."""
    if isinstance(tensor, SparseMaskedTensor):
        return tensor._kept
    return tensor._family if isinstance(tensor, MaskedTensor) else None


def tensors_of(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    names = [argument.name for argument in schema_of(op).arguments]
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        for tensor in leaves(value):
            yield name, tensor


def leaves(value: object) -> Iterator[Tensor]:
    """Yield the tensors in a value, also in lists, tuples and dicts (models often return dicts)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)


def _how(meaning: Meaning) -> str:
    """Say in a few words how an overload runs."""
    if meaning.op.namespace == OWN:
        return OWN_RULE
    if meaning.rule is None:
        return meaning.kind
    return meaning.rule.category.name + ("" if meaning.base is meaning.op else ", written back")
