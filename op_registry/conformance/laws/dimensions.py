"""The law "dims": what a rule states of its operator's dimensions (:mod:`op_registry.dimensions`) is true.

It is asked of plain torch, without masks. An operand is changed at one index of one of its dimensions, and the results
say which of their elements depend on it:

*   Sizes: dimensions with one label have one size (1 broadcasts); reduced and contracted labels are in no result.
*   A batch label: the results change at this index alone.
*   A label that is stated contracted, reduced or each: in some call, results change at another index too. Otherwise it
    could be batch.
*   An operand without a batch label of the results: in some call, results change at several indices of it.

The last two are asked of all calls together, because one call may hide it (``maximum``, an index that is not read).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.bound import Bound
from op_registry.conformance.compare import beyond_rounding
from op_registry.conformance.law import Broken, Case, Law, Status
from op_registry.conformance.plain_torch import RecordedCall, Recorder, in_reverse
from op_registry.conformance.sample import Operator, Sample, chosen, copied, start_random_numbers, tensors_of, tree_map
from op_registry.conformance.subject import Subject
from op_registry.conformance.variations import storable
from op_registry.dimensions.labels import Dimension, Dimensions, Label, Labels, atoms
from op_registry.dimensions.movements import Unknown
from op_registry.registry import registry
from op_registry.resolve import resolve
from op_registry.rule import packet_name

if TYPE_CHECKING:
    from op_registry.conformance.trials import Settings

# Operators whose results depend on more than their operands, or on chance in such a way that one element moves others.
NOT_ASKED: Mapping[str, str] = {
    "empty_like": "it reads uninitialised memory",
    "new_empty": "it reads uninitialised memory",
    "new_empty_strided": "it reads uninitialised memory",
    "poisson": "how many random numbers an element draws depends on its value",
    "binomial": "how many random numbers an element draws depends on its value",
    "_standard_gamma": "how many random numbers an element draws depends on its value",
    "rrelu": "random numbers are drawn for negative elements alone",
    "_sample_dirichlet": "how many random numbers an element draws depends on its value",
}

# How many samples of an operator are asked at most, and how many calls of one overload that they make among others.
MOST_ASKED, MOST_AMONG_OTHERS = 16, 3
# The most elements in the tensors of a call.
MOST_ELEMENTS = 1 << 12


def outcomes(operator: Operator, seed: int = 0) -> Iterator[tuple[OpOverload, Status, str]]:
    """For each overload that an operator's samples call and whose rule states dimensions: whether they are true."""
    shown: dict[OpOverload, Shown] = {}
    together: dict[Dimensions, Together] = {}
    for sample in _samples(operator):
        made = calls_of_operators(sample)
        for op, args, kwargs in made:
            dims = _statement(op)
            if dims is not None and size_of_call(args, kwargs) <= MOST_ELEMENTS:
                asked = shown.setdefault(op, Shown(op, dims, together.setdefault(dims, Together())))
                asked.directly |= len(made) == 1
                if len(made) == 1 or asked.calls < MOST_AMONG_OTHERS:
                    _ask(asked, args, kwargs, seed)
    for op, asked in shown.items():
        found = asked.found
        if found is not None:
            yield op, "broken", f"{op}: {found} (stated: {asked.dims})"
        elif asked.changes:
            yield op, "pass", ""
        else:
            yield op, "not asked", NOT_ASKED.get(packet_name(op), "no change of an operand changes a result")


def cases(operator: Operator, subject: Subject, settings: Settings) -> Iterator[Case]:
    """A case for each overload whose rule states dimensions; it is asked of plain torch."""
    for op, status, message in outcomes(operator, settings.seed):
        description = f"{str(operator.preferred_dtype).removeprefix('torch.')} samples all unstored {op}"
        yield Case(description, known=(status, message))


def _no_dimensions(operator: Operator, seed: int, silences: Mapping[str, int] | None) -> str | None:
    found = [(status, message) for _, status, message in outcomes(operator, seed)]
    if any(status != "not asked" for status, _ in found):
        return None
    return found[0][1] if found else "no rule that its samples call states dimensions"


def _statement(op: OpOverload) -> Dimensions | None:
    """What the rule of an overload states; None if nothing is known."""
    rule = registry.get(op)
    return None if rule is None or isinstance(rule.dims, Unknown) else rule.dims


def _ask(asked: Shown, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> None:
    """Compare one call, unless one was wrong before."""
    if asked.wrong is None and packet_name(asked.op) not in NOT_ASKED:
        try:
            asked.ask(args, kwargs, seed)
        except Broken as reason:
            asked.wrong = str(reason)


def _samples(operator: Operator) -> list[Sample]:
    if not operator.dtypes or not operator.leading:
        return []
    samples = [s for s in operator.samples(operator.preferred_dtype) if s.tensors]
    if all(t.ndim < 2 or t.numel() < 2 for s in samples for t in s.tensors):
        samples += storable(samples)  # folded: unary operators have none of two dimensions
    return chosen([s for s in samples if all(t.numel() for t in s.tensors)] or samples, MOST_ASKED)


def calls_of_operators(sample: Sample) -> list[RecordedCall]:
    """The calls of operators that a sample makes; none if plain torch does not run it."""
    args, kwargs, _ = sample.copies()
    return _Copying().recorded(sample.fn, *args, **kwargs)


class _Copying(Recorder):
    """Records each call with copies of its operands, which may be written to later."""

    def evaluate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op not in registry and resolve(op).kind == "decomposes":
            return self.decompose(op, args, kwargs)
        number = len(self.calls)
        copies = tree_map(copied, (args, kwargs))
        result = super().evaluate(op, args, kwargs)
        self.calls[number] = (op, *copies)
        return result


def size_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return sum(tensor.numel() for tensor in tensors_of((args, kwargs)))


# ---------------------------------------------------------- one call, compared with what its rule states

# Roles whose label has the same size in operands and results, or is in no result.
ONE_SIZE = ("each", "contracted", "reduced")
GONE = ("contracted", "reduced")
# Roles of which some call shows that they are not batch.
SLICES = ("contracted", "reduced", "each")
MIXING = (*SLICES, "front", "scanned", "moved", "window")
# Differences up to this share of the largest result are rounding.
ROUNDING = 1e-4

Roles = frozenset[tuple[Label, str]]


@dataclass
class Together:
    """What the calls of all overloads with one statement show together.

    mixing     for each label that is not batch: whether a change at one index reached another in some call with the
               same roles and the same arguments that may be dimensions
    reaching   for each operand: whether it reached several indices of batch labels that it does not have in some call
    """

    mixing: dict[tuple[Label, Roles, str], bool] = field(default_factory=dict)
    reaching: dict[str, bool] = field(default_factory=dict)

    def wrong(self) -> str | None:
        """What is wrong that no call shows by itself."""
        for (label, roles, _), mixed in self.mixing.items():
            if not mixed:
                stated = f"{'a label' if label is None else repr(label)} is stated {dict(roles)[label]}"
                return f"{stated}, but no change at one of its indices reached another: it may be batch"
        for operand, reached in self.reaching.items():
            if not reached:
                return f"{operand} never reached two indices of the batch labels that it is stated not to have"
        return None


@dataclass
class Shown:
    """The calls of one overload, compared with its statement.

    calls      how many the statement fits
    unfitting  how many it does not fit
    changes    how many results changed with an operand
    directly   whether samples call the overload itself, and are about it
    wrong      what is wrong in one of the calls
    """

    op: OpOverload
    dims: Dimensions
    together: Together
    calls: int = 0
    unfitting: int = 0
    changes: int = 0
    directly: bool = False
    wrong: str | None = None

    @property
    def found(self) -> str | None:
        """What is wrong with the statement; what several calls show together only if they are about the overload."""
        if self.wrong is not None or not self.directly:
            return self.wrong
        if self.unfitting and not self.calls:
            return f"the statement fits none of {self.unfitting} calls"
        return self.together.wrong()

    def ask(self, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int = 0) -> None:
        """Compare one call with the statement; Broken if they disagree.

        Calls with tensors of torch.sparse are not asked: their elements cannot be changed one by one.
        """
        call = Bound.of(None, self.op, *tree_map(copied, (tuple(args), dict(kwargs))))
        if any(tensor.layout is not torch.strided for tensor in call.tensors.values()):
            return
        labels = self.dims.labels(self.op, call.named)
        if labels is None:
            self.unfitting += 1
            return
        self.calls += 1
        _Asked(self, call, labels, seed).ask()


class _Asked:
    """One call, and its labels."""

    def __init__(self, shown: Shown, call: Bound, labels: Labels, seed: int) -> None:
        self.shown, self.call, self.labels, self.seed = shown, call, labels, seed
        self.operands: dict[str, Tensor] = call.tensors
        self.results = self._run({})
        assert self.results is not None
        self.sizes: dict[Label, int] = dict(labels.sizes)
        self._numbers = str([v for v in call.named.values() if type(v) is int or (type(v) is list and _are_ints(v))])

    def ask(self) -> None:
        assert self.results is not None
        self._count_labels()
        self._sizes()
        for name, operand in self.operands.items():
            for at, label in enumerate(self._atoms(self.labels.operands[name])):
                if label is not None:
                    self._change_along(name, self._split(operand, self.labels.operands[name]), at, label)
            self._change_all(name, operand)

    # ---------------------------------------------------------------------------------------------------------- sizes

    def _count_labels(self) -> None:
        """Broken unless every dimension of every tensor has a label."""
        labels, results = self.labels, self.results or []
        if set(labels.operands) != set(self.operands):
            raise Broken(f"the operands are {', '.join(self.operands)}, those stated {', '.join(labels.operands)}")
        if len(labels.results) != len(results):
            raise Broken(f"{len(labels.results)} results are stated, and there are {len(results)}")
        for name, tensor, dims in self._tensors():
            if tensor.ndim != len(dims):
                raise Broken(f"{name} of shape {tuple(tensor.shape)} is stated to have the dimensions {dims}")

        kept = {label for dims in labels.results for label in self._atoms(dims)}
        for label, role in labels.roles.items():
            if role == "each" and label not in kept:
                raise Broken(f"{label!r} is stated each, and no result has it")

    def _tensors(self) -> Iterator[tuple[str, Tensor, tuple[Dimension, ...]]]:
        for name, tensor in self.operands.items():
            yield name, tensor, self.labels.operands[name]
        for n, (tensor, dims) in enumerate(zip(self.results or [], self.labels.results, strict=True)):
            yield f"result {n}", tensor, dims

    def _sizes(self) -> None:
        """Broken unless dimensions with one label have one size; results, that of the operands."""
        for name, tensor, dims in self._tensors():
            of_result = name.startswith("result ")
            for size, dim in zip(tensor.shape, dims, strict=True):
                if of_result and any(self.labels.roles.get(label) in GONE for label in atoms(dim)):
                    raise Broken(f"{name} has the dimension {dim!r}, which is stated to be reduced or contracted")
                if dim is None and size != 1:
                    raise Broken(f"{name} of shape {tuple(tensor.shape)}: a dimension without a label has size {size}")
                if not isinstance(dim, tuple) and dim is not None and self.labels.roles.get(dim, "each") in ONE_SIZE:
                    self._same_size(name, dim, size, of_result)
        for name, tensor, dims in self._tensors():
            for size, dim in zip(tensor.shape, dims, strict=True):
                if isinstance(dim, tuple):
                    self._parts(name, dim, size)

    def _parts(self, name: str, dim: tuple[Label, ...], size: int) -> None:
        """The size of one part of a merged dimension may follow from the others."""
        unknown = [label for label in dim if label not in self.sizes]
        known = math.prod(self.sizes[label] for label in dim if label in self.sizes)
        if len(unknown) == 1 and known and size % known == 0:
            self.sizes[unknown[0]] = size // known
        elif unknown or size not in (known, 1):
            raise Broken(f"{name} has a dimension of size {size}, and of its parts {dim} {self.sizes} are known")

    def _same_size(self, name: str, label: Label, size: int, of_result: bool) -> None:
        known = self.sizes.setdefault(label, size)
        if known == size or (size == 1 and not of_result):
            return
        if known != 1:
            raise Broken(f"{name} has size {size} along {label!r}, and another tensor has {known}")
        self.sizes[label] = size

    @staticmethod
    def _atoms(dims: Sequence[Dimension]) -> list[Label]:
        return [label for dim in dims for label in atoms(dim)]

    def _split(self, tensor: Tensor, dims: Sequence[Dimension]) -> Tensor:
        """The tensor with a dimension for each label."""
        sizes: list[int] = []
        for size, dim in zip(tensor.shape, dims, strict=True):
            whole = isinstance(dim, tuple) and size == math.prod(self.sizes[label] for label in dim)
            sizes += (
                [self.sizes[label] for label in dim]
                if isinstance(dim, tuple) and whole
                else [1] * (len(atoms(dim)) - 1) + [size]
            )
        return tensor.reshape(sizes)

    # --------------------------------------------------------------------------------------------------------- changes

    def _run(self, changed: Mapping[str, Tensor]) -> list[Tensor] | None:
        """The tensors that plain torch returns with some operands changed; None if it raises."""
        start_random_numbers(self.seed)
        try:
            result = self.call.with_tensors(changed).applied(self.call.op)
        except Exception:
            if not changed:
                raise
            return None
        return [tensor.clone() for tensor in tensors_of(result)]

    def _changes(self, name: str, changed: Tensor, before: list[Tensor]) -> list[Tensor] | None:
        """Where each result changes with an operand, with a dimension for each label; None if that cannot be said."""
        results = self._run({name: changed})
        if results is None or [r.shape for r in results] != [r.shape for r in before]:
            return None
        where = [_differs(a, b) for a, b in zip(results, before, strict=True)]
        self.shown.changes += sum(bool(w.any()) for w in where)
        return [self._split(w, dims) for w, dims in zip(where, self.labels.results, strict=True)]

    def _changed_along(self, name: str, operand: Tensor, at: int) -> Iterator[tuple[int, int, Tensor]]:
        """Where results change with an operand at one index of a dimension: the index, which result, and where.

        If nothing changes from the values as they are, all of them are first made 0, then 1 (``any``, ``all``).
        """
        shape, size = self.operands[name].shape, operand.shape[at]
        found = False
        for base in (operand, torch.zeros_like(operand), torch.ones_like(operand)):
            if found:
                return
            before = self.results if base is operand else self._run({name: base.reshape(shape)})
            for index, other in itertools.product((0, size - 1), _other_values(base) if before else ()):
                changed = base.clone()
                changed.select(at, index).copy_(other.select(at, index))
                where = self._changes(name, changed.reshape(shape), before or [])
                for n, w in enumerate(where or []):
                    if bool(w.any()):
                        found = True
                        yield index, n, w

    def _change_along(self, name: str, operand: Tensor, at: int, label: Label) -> None:
        """Change an operand at single indices of a dimension."""
        size, role = operand.shape[at], self.labels.roles.get(label)
        # For each result that changed: along which of its dimensions it has changed at this index alone so far.
        alone: dict[int, set[int]] = {}
        for index, n, where in self._changed_along(name, operand, at) if size > 1 else ():
            if role is None:
                self._only_at(name, label, index, n, where)
            else:
                along = {d for d in range(where.ndim) if where.shape[d] == size and _only(where, d, index)}
                alone[n] = alone.get(n, along) & along
        if role in MIXING and alone:
            # Windows of one element and rolls by 0 move nothing: other calls show that such roles are right.
            key = (
                (label, frozenset(self.labels.roles.items()), self._numbers)
                if role in SLICES
                else (None, frozenset({(None, role)}), "")
            )
            mixing = self.shown.together.mixing
            mixing[key] = mixing.get(key, False) or not all(alone.values())

    def _only_at(self, name: str, label: Label, index: int, n: int, where: Tensor) -> None:
        labels = self._atoms(self.labels.results[n])
        if label not in labels:
            raise Broken(f"{name}: {label!r} is stated batch; result {n} does not have it, and depends on {name}")
        at = labels.index(label)
        if not _only(where, at, index):
            raise Broken(
                f"{name}: {label!r} is stated batch, and a change at index {index} reaches others in result {n}"
            )

    def _change_all(self, name: str, operand: Tensor) -> None:
        """Change a whole operand: results change at several indices of batch labels that it does not have."""
        mine = self._atoms(self.labels.operands[name])
        missing = [
            (n, at)
            for n, (dims, result) in enumerate(zip(self.labels.results, self.results or [], strict=True))
            for at, label in enumerate(self._atoms(dims))
            if label is not None and label not in mine and label not in self.labels.roles and result.numel() > 1
        ]
        reached: dict[tuple[int, int], bool] = {}
        for other in _other_values(operand) if missing else ():
            where = self._changes(name, other, self.results or [])
            for n, at in missing if where is not None else ():
                assert where is not None
                w = where[n]
                if w.shape[at] > 1 and bool(w.any()):
                    reached[n, at] = reached.get((n, at), False) or int(_along(w, at).sum()) > 1
        if reached:
            reaching = self.shown.together.reaching
            reaching[name] = reaching.get(name, False) or all(reached.values())


def _are_ints(values: Sequence[object]) -> bool:
    return all(type(v) is int for v in values)


def _other_values(operand: Tensor) -> list[Tensor]:
    """Other values for an operand: its own in another order, and (of numbers with a point) larger ones, and zeros."""
    if not operand.numel():
        return []
    if operand.dtype is torch.bool:
        return [~operand]
    found = [in_reverse(operand)]
    if operand.is_complex():
        found.append(operand + 1)
    elif operand.is_floating_point():
        wide = operand.double()
        found += [(wide.max() + 1).to(operand.dtype).expand(operand.shape), torch.zeros_like(operand)]
    return found


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors differ by more than rounding."""
    if not (a.is_floating_point() or a.is_complex()):
        return a != b
    return beyond_rounding(a.detach(), b.detach(), ROUNDING, 1e-3)


def _along(where: Tensor, dim: int) -> Tensor:
    """Whether anything is True at each index of a dimension."""
    return where.movedim(dim, 0).reshape(where.shape[dim], -1).any(1)


def _only(where: Tensor, dim: int, index: int) -> bool:
    """Whether everything that is True is at one index of a dimension."""
    along = _along(where, dim)
    return bool(along[index]) and int(along.sum()) == 1


LAWS = (Law("dims", "dimensions are as the rule states them", cases=cases, exempt=_no_dimensions, of_plain=True),)
