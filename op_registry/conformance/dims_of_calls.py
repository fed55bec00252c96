"""One call of an operator compared with what its rule states of its dimensions; see stated_dims.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.bound import Bound
from op_registry.conformance.compare import beyond_rounding
from op_registry.conformance.plain_torch import in_reverse
from op_registry.conformance.randomness import start_random_numbers
from op_registry.conformance.trees import tree_leaves, tree_map
from op_registry.conformance.trial import Broken
from op_registry.dimensions.labels import Dimension, Dimensions, Label, Labels, atoms

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
        return [leaf.clone() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

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


def copied(leaf: object) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


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
