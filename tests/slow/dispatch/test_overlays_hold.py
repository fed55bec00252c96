"""Whatever rule is replaced, every storage and every form of its operator follows: generated from the registry.

The new rule looks at nothing but the shape of its first operand and gives sevens. A call is made from the schema, since
no value matters; a seven that is missing is a result that some other code has made.
"""

from __future__ import annotations

import itertools
import keyword
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

import masked_dispatch as md
from called_operators import aten_overloads
from masked_dispatch.torch_internals import tree_flatten
from op_registry import registry
from op_registry.authoring import Dense
from op_registry.records.dense import map_tensors
from op_registry.schema import functional_form, is_foreach, is_inplace, is_out, single_form, written_arguments
from storages import storages_but

MARK = 7
STORAGES = storages_but("permuted")
SLICES = 4
# Dynamo keeps no such results in a graph.
NO_TENSOR = {"bool", "int", "SymInt", "float", "number"}
# Dynamo traces no UntypedStorage.
UNTRACEABLE = {"Storage"}


class Marking:
    """A rule that gives sevens, and knows how often it ran."""

    def __init__(self, op: OpOverload) -> None:
        self.op, self.calls = op, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        found: list[Dense] = []
        map_tensors(found.append, [*args, *kwargs.values()], Dense)
        results = [self._result(str(r.type), found[0]) for r in self.op._schema.returns]
        return results[0] if len(results) == 1 else tuple(results) or None

    def _result(self, kind: str, like: Dense) -> Any:
        if kind == "List[Tensor]":
            return [self._result("Tensor", like), self._result("Tensor", like)]
        if kind == "Tensor":
            return Dense(torch.full(like.shape, MARK, dtype=like.dtype, device=like.device))
        return True if kind == "bool" else MARK


def argument(kind: str, tensor: Callable[[], Tensor]) -> Any:
    """Something of the type that a schema asks for."""
    if kind.startswith("Optional"):
        return None
    if kind == "Tensor":
        return tensor()
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        return [tensor(), tensor()]
    values: dict[str, Any] = {
        "int": 1, "SymInt": 1, "float": 0.5, "number": 1, "bool": False, "str": "mean", "ScalarType": torch.float32,
        "Device": torch.device("cpu"), "Stream": torch.Stream(device="cpu"), "Storage": torch.UntypedStorage(4),
        "List[int]": [1], "List[SymInt]": [1], "List[float]": [0.5], "List[number]": [1, 1],
        "List[bool]": [False], "List[str]": ["a"],
    }  # fmt: skip
    return values[kind]


def call_of(op: OpOverload, tensors: Iterator[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for an overload: tensors from `tensors`, in turn, and what else it has no default for."""
    args, kwargs = [], {}
    for a in op._schema.arguments:
        if a.has_default_value() and not (a.kwarg_only and a.alias_info is not None):
            continue
        # The numbers of a list operator may come as one tensor, which is read.
        kind = str(a.type)
        value = torch.ones(2) if (a.name, kind) == ("scalars", "Tensor") else argument(kind, lambda: next(tensors))
        if a.kwarg_only:
            kwargs[a.name] = value
        else:
            args.append(value)
    return args, kwargs


def dense_tensor(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    data, keys = torch.rand(2, 4, 6, generator=generator)
    return md.masked_tensor(data, keys > 0.4)


def first_stored(storage: str) -> Iterator[Tensor]:
    """Masked tensors of which the first one is stored as is said."""
    yield STORAGES[storage](dense_tensor())
    yield from (dense_tensor(n) for n in itertools.count(1))


def unmarked(results: Any) -> list[str]:
    """Every result in which something else than the mark is valid, or nothing is."""
    wrong = []
    for leaf in tree_flatten(results)[0]:
        if isinstance(leaf, Tensor):
            values = leaf.to_tensor(MARK) if md.is_masked_tensor(leaf) else leaf
            if not bool((values == MARK).all()) or (md.is_masked_tensor(leaf) and not bool(leaf.get_mask().any())):
                wrong.append(repr(leaf)[:200])
        elif leaf is not None and leaf not in (True, MARK):
            wrong.append(repr(leaf)[:200])
    return wrong


def marks_missing(op: OpOverload, replaced: Sequence[OpOverload], tensors: Iterator[Tensor]) -> str:
    """What a call of `op` lacks while all of `replaced` give marks."""
    args, kwargs = call_of(op, tensors)
    rules = [Marking(r) for r in replaced]
    try:
        with registry.overlay() as mine:
            for rule in rules:
                mine.replace(rule.op, rule)
            results = op(*args, **kwargs)
    except Exception as error:
        return f"{op}: {type(error).__name__}: {str(error)[:300]}"
    if not any(rule.calls for rule in rules):
        return f"{op}: the rule has not run"
    if is_foreach(op) and op._schema.is_mutable:
        results = kwargs.get("out", args[0])
    wrong = unmarked(results)
    return f"{op}: {wrong}" if wrong else ""


def rules_in_force() -> list[OpOverload]:
    return list(registry)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("part", range(2))
def test_every_rule_in_every_storage(storage: str, part: int) -> None:
    missing = [marks_missing(op, [op], first_stored(storage)) for op in rules_in_force()[part::2]]
    assert not any(missing), "\n".join(m for m in missing if m)


def derived(test: Callable[[OpOverload], bool]) -> list[tuple[OpOverload, OpOverload]]:
    """The overloads that are served by the rule of their functional form, with it."""
    found = ((op, functional_form(op)) for op in aten_overloads() if test(op) and op not in registry)
    return [(op, base) for op, base in found if base is not None and base in registry]


@pytest.mark.parametrize(
    ("is_form", "least", "storage"),
    [
        *((is_inplace, 150, storage) for storage in ("dense", "csr", "packed")),
        *((is_out, 400, storage) for storage in ("dense", "csr")),
    ],
)
def test_every_inplace_and_out_form(is_form: Callable[[OpOverload], bool], least: int, storage: str) -> None:
    forms = derived(is_form)
    assert len(forms) > least
    missing = [marks_missing(op, [base], first_stored(storage)) for op, base in forms]
    assert not any(missing), "\n".join(m for m in missing if m)


@pytest.mark.parametrize("storage", ["dense", "csr"])
def test_every_form_of_lists(storage: str) -> None:
    missing, asked = [], 0
    for op in filter(is_foreach, aten_overloads()):
        single = single_form(op)
        if op in registry or single is None:
            continue
        overloads = [getattr(single, name) for name in single.overloads()]
        served = {o if o in registry else functional_form(o) for o in overloads}
        replaced = [o for o in served if o is not None and o in registry]
        if replaced:
            asked += 1
            missing.append(marks_missing(op, replaced, first_stored(storage)))
    assert asked > 100
    assert not any(missing), "\n".join(m for m in missing if m)


def traceable(op: OpOverload) -> bool:
    kinds = {str(a.type) for a in op._schema.arguments if not a.has_default_value()}
    returned = {str(r.type) for r in op._schema.returns}
    in_a_graph = bool(returned) and not returned & NO_TENSOR and not kinds & UNTRACEABLE
    # torch writes an overload called "from" into the graph's source as it is.
    return in_a_graph and not written_arguments(op) and not keyword.iskeyword(op._overloadname)


@pytest.mark.parametrize("storage", ["dense", "csr"])
@pytest.mark.parametrize("part", range(SLICES))
def test_every_rule_compiled(storage: str, part: int) -> None:
    """Many operators in one graph, of the same few tensors."""
    torch.compiler.reset()
    ops = list(filter(traceable, rules_in_force()))[part::SLICES]
    tensors = list(itertools.islice(first_stored(storage), 40))

    calls = [(op, *call_of(op, iter(tensors))) for op in ops]

    def region(calls: Any) -> list[Any]:
        results = [op(*args, **kwargs) for op, args, kwargs in calls]
        # What a region gives back as a view of its input is made outside of it, as that view.
        return torch.utils._pytree.tree_map(torch.clone, results)

    with registry.overlay() as mine:
        for op in ops:
            mine.replace(op, Marking(op))
        results = torch.compile(region, backend="aot_eager", fullgraph=True)(calls)
    missing = [f"{op}: {unmarked(result)}" for op, result in zip(ops, results, strict=True) if unmarked(result)]
    assert not missing, "\n".join(missing)
