"""Every function of torch.distributed that takes tensors, in each storage, with each kind of extent, and in each way of
calling it: each rank gets what one process computes of all ranks' tensors.

eager       waited for by the function
async       `async_op=True`, waited for by the caller; isend and irecv
functional  the functional collective of the same meaning, where torch has one
writing     the functional operator that writes to its argument, where torch has one
derivative  of the functional collective: that of the sum over ranks, when one process computes all of it

The autograd functions of torch.distributed.nn are asked of dense tensors.

A reduction is asked with each operation, and all_reduce and broadcast with each dtype too, unless there is an extent.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed import group as groups
from torch.distributed.nn import functional as of_nn
from torch.utils._pytree import tree_leaves

import masked_dispatch as md
from masked_collectives import ALL_DTYPES, FLOATS, REDUCTIONS, expected_of, of_rank, plain_of_rank, reduction, same
from op_registry import MaskedSemanticsError
from op_registry.extents.factors import factors_of
from op_registry.extents.found import contradiction
from process_groups import Check
from storages import storages_but

CHECKS: dict[str, Check] = {}
ROWS = 4


# ------------------------------------------------------------------------------------------------- what is called with


def of_samples(rank: int, shape: Sequence[int], seed: int, form: str) -> Any:
    """Samples in rows, and their steps; which of them are there, differs from rank to rank."""
    x = of_rank(rank, shape, seed=seed)
    mask = x.get_mask()
    if form == "scattered":  # on no rank, samples lie together by chance
        mask[1] = torch.tensor([[True, True], [False, False], [True, False]])
        return md.as_masked_tensor(torch.nan_to_num(x.get_data()), mask).to_packed().to_dense()
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    lengths = torch.randint(0, 4, (shape[0], 1, 1), generator=generator)
    lengths[1] = 1  # on no rank, all samples are as long by chance
    there = (torch.arange(3).view(3, 1) < lengths).expand(*shape)
    if form == "factors":
        there = there & (torch.arange(2) < torch.randint(0, 3, (shape[0], 1, 1), generator=generator))
    if form == "front" or (form == "either" and rank % 2):
        there = there.flip(1)
    if form != "mask":
        return md.padded(x.mask_with(there), there, dim=(1, 2) if form == "factors" else 1)
    # The extent is the mask, one object for all batches.
    return md.from_lengths(torch.nan_to_num(x.get_data()), lengths.flatten())


def whole(rank: int, shape: Sequence[int]) -> Any:
    return md.as_masked_tensor(plain_of_rank(rank, shape))


def one_alone(rank: int, shape: Sequence[int]) -> Any:
    """Everything is valid on rank 1, and nothing elsewhere."""
    return whole(rank, shape) if rank == 1 else whole(rank, shape).mask_with(torch.tensor(False))


class Kind(NamedTuple):
    """How tensors are made: in which storage, what is valid or known of an extent, and which of them are plain."""

    stored: Callable[[Any], Any] = lambda x: x
    form: str | None = None
    shape: tuple[int, ...] = (ROWS, 3, 2)
    plain: str = "nothing"

    @property
    def knows_extent(self) -> bool:
        return self.form in FORMS

    def dense(self, rank: int, rows: int, seed: int, dtype: torch.dtype) -> Any:
        shape = (rows, *self.shape[1:])
        if self.form in WITHOUT_EXTENT:
            return WITHOUT_EXTENT[self.form](rank + seed, shape)
        return of_samples(rank, shape, seed, self.form) if self.form else of_rank(rank, shape, dtype, seed)


STORED: dict[str, Callable[[Any], Any]] = {
    "dense": lambda x: x,
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_layout(torch.sparse_csr, sparse_dim=2),
    "packed": lambda x: x.to_packed(),
}
FORMS = ("mask", "missing", "front", "either", "scattered", "factors")
WITHOUT_EXTENT = {"whole": whole, "one alone": one_alone}
MATRICES = {storage: Kind(stored, shape=(ROWS, 6)) for storage, stored in storages_but("permuted").items()}
KINDS = {
    **MATRICES,
    **{f"{storage} {form}": Kind(stored, form) for storage, stored in STORED.items() for form in FORMS},
    **{f"{storage} {form}": Kind(MATRICES[storage].stored, form) for storage in STORED for form in WITHOUT_EXTENT},
    **{f"{storage} into plain": MATRICES[storage]._replace(plain="received") for storage in STORED},
    "dense from plain": Kind(form="whole", plain="sent"),
}


@dataclass
class Trial:
    """What a rank makes of a kind: its own tensors, and those of the others."""

    rank: int
    ranks: int
    kind: Kind
    op: str = "SUM"
    dtype: torch.dtype = torch.float64
    root: int = 1  # from which, or to which, some collectives go
    leaves: dict[tuple[int, int, int], Any] | None = None  # if they require grad

    def dense(self, rank: int, rows: int = ROWS, seed: int = 0) -> Any:
        made = self.kind.dense(rank, rows, seed, self.dtype)
        return made if self.leaves is None else self.leaves.setdefault((rank, rows, seed), made.requires_grad_())

    def stored(self, rank: int, rows: int = ROWS, seed: int = 0) -> Any:
        return self.kind.stored(self.dense(rank, rows, seed))

    def mine(self, rows: int = ROWS, seed: int = 0) -> Any:
        return self.stored(self.rank, rows, seed)

    def buffers(self, *rows: int, beside_masked: bool = True) -> list[Any]:
        """To be written to; plain ones only beside masked tensors, so that the call is ours on each rank."""
        if self.kind.plain == "received" and beside_masked:
            return [torch.full((n, *self.kind.shape[1:]), -9, dtype=self.dtype) for n in rows]
        return [self.stored(90 + r, n) for r, n in enumerate(rows)]

    def everyone(self, seed: int = 0) -> list[Any]:
        return [self.dense(r, seed=seed) for r in range(self.ranks)]

    def total(self, seed: int = 0, rows: int = ROWS) -> Any:
        """The reduction in one process, or the error that it raises, and all ranks have to raise, too."""
        try:
            return expected_of(self.op, [self.dense(r, rows, seed) for r in range(self.ranks)])
        except MaskedSemanticsError as refused:
            return refused


# ----------------------------------------------------------------------------------- what is called, and what comes out

# What is called with, what it writes to or returns, and what that is then.
Case = tuple[tuple[Any, ...], list[Any], Sequence[Any]]


def all_reduce(t: Trial) -> Case:
    x = t.mine()
    return (x,), [x], [t.total()]


def all_reduce_coalesced(t: Trial) -> Case:
    tensors = [t.mine(seed=seed) for seed in range(2)]
    return (tensors,), tensors, [t.total(seed) for seed in range(2)]


def reduce(t: Trial) -> Case:
    x, total = t.mine(), t.total()
    return (x, t.root), [x], [total if t.rank == t.root or isinstance(total, Exception) else t.dense(t.rank)]


def reduce_scatter(t: Trial) -> Case:
    (output,), parts = t.buffers(ROWS), [t.mine(seed=seed) for seed in range(t.ranks)]
    return (output, parts), [output], [t.total(seed=t.rank)]


def reduce_scatter_tensor(t: Trial) -> Case:
    (output,), total = t.buffers(ROWS), t.total(rows=ROWS * t.ranks)
    expected = total if isinstance(total, Exception) else total.split(ROWS)[t.rank]
    return (output, t.mine(ROWS * t.ranks)), [output], [expected]


def broadcast(t: Trial) -> Case:
    x = t.mine()
    return (x, t.root), [x], [t.dense(t.root)]


def all_gather(t: Trial) -> Case:
    outputs = t.buffers(*[ROWS] * t.ranks)
    return (outputs, t.mine()), outputs, t.everyone()


def all_gather_coalesced(t: Trial) -> Case:
    outputs = t.buffers(*[ROWS] * 2 * t.ranks)
    pairs = [outputs[2 * r : 2 * r + 2] for r in range(t.ranks)]
    expected = [t.dense(r, seed=seed) for r in range(t.ranks) for seed in range(2)]
    return (pairs, [t.mine(seed=seed) for seed in range(2)]), outputs, expected


def all_gather_into_tensor(t: Trial) -> Case:
    outputs = t.buffers(ROWS * t.ranks)
    return (*outputs, t.mine()), outputs, [torch.cat(t.everyone())]


def gather(t: Trial) -> Case:
    if t.rank != t.root:
        return (t.mine(), None, t.root), [], []
    outputs = t.buffers(*[ROWS] * t.ranks)
    return (t.mine(), outputs, t.root), outputs, t.everyone()


def gather_into_tensor(t: Trial) -> Case:
    if t.rank != t.root:
        return (t.mine(), None, t.root), [], []
    outputs = t.buffers(ROWS * t.ranks)
    return (t.mine(), *outputs, t.root), outputs, [torch.cat(t.everyone())]


def scatter(t: Trial) -> Case:
    outputs = t.buffers(ROWS, beside_masked=t.rank == t.root)
    parts = [t.mine(seed=seed) for seed in range(t.ranks)]
    return (*outputs, parts if t.rank == t.root else None, t.root), outputs, [t.dense(t.root, seed=t.rank)]


def all_to_all(t: Trial) -> Case:
    def rows(source: int, target: int) -> int:
        return ROWS + 2 * (t.ranks * source + target)

    outputs = t.buffers(*[rows(r, t.rank) for r in range(t.ranks)])
    inputs = [t.mine(rows(t.rank, r), seed=r) for r in range(t.ranks)]
    return (outputs, inputs), outputs, [t.dense(r, rows(r, t.rank), seed=t.rank) for r in range(t.ranks)]


def all_to_all_single(t: Trial) -> Case:
    outputs, rows = t.buffers(ROWS * t.ranks), ROWS * t.ranks
    arrived = [t.dense(r, rows).split(ROWS)[t.rank] for r in range(t.ranks)]
    return (*outputs, t.mine(rows)), outputs, [torch.cat(arrived)]


def all_to_all_uneven(t: Trial) -> Case:
    rows = [2 + 2 * r for r in range(t.ranks)]  # that every rank sends to rank r
    outputs = t.buffers(t.ranks * rows[t.rank])
    arrived = [t.dense(r, sum(rows)).split(rows)[t.rank] for r in range(t.ranks)]
    return (*outputs, t.mine(sum(rows)), [rows[t.rank]] * t.ranks, rows), outputs, [torch.cat(arrived)]


CASES: dict[str, Callable[[Trial], Case]] = {
    "all_gather": all_gather,
    "all_gather_coalesced": all_gather_coalesced,
    "all_gather_into_tensor": all_gather_into_tensor,
    "all_gather_single": all_gather_into_tensor,
    "all_reduce": all_reduce,
    "all_reduce_coalesced": all_reduce_coalesced,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "all_to_all_single uneven": all_to_all_uneven,
    "broadcast": broadcast,
    "gather": gather,
    "gather_into_tensor": gather_into_tensor,
    "gather_single": gather_into_tensor,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "reduce_scatter_single": reduce_scatter_tensor,
    "scatter": scatter,
}
# One name for each: the others, which are older or newer, are asked in fewer kinds.
DISTINCT = list({case: name for name, case in reversed(CASES.items())}.values())
REDUCING = {name for name in CASES if "reduce" in name}
IN_PLACE = {"all_reduce", "all_reduce_coalesced", "broadcast", "reduce"}

# The functional collective of the same meaning, given the reduction, the group and the arguments of the case.
FUNCTIONAL: dict[str, Callable[..., Any]] = {
    "all_gather_into_tensor": lambda op, group, out, x: functional.all_gather_tensor(x, 0, group),
    "all_reduce": lambda op, group, x: functional.all_reduce(x, op, group),
    "all_reduce_coalesced": lambda op, group, tensors: functional.all_reduce_coalesced(tensors, op, group),
    "all_to_all_single": lambda op, group, out, x: functional.all_to_all_single(x, None, None, group),
    "all_to_all_single uneven": lambda op, group, out, x, to, of: functional.all_to_all_single(x, to, of, group),
    "broadcast": lambda op, group, x, root: functional.broadcast(x, root, group),
    "reduce_scatter_tensor": lambda op, group, out, x: functional.reduce_scatter_tensor(x, op, 0, group),
}
# The operators that write to the first argument of the case.
OPERATORS: Any = torch.ops._c10d_functional
WRITING: dict[str, Callable[..., Any]] = {
    "all_gather_into_tensor": lambda op, group, out, x: OPERATORS.all_gather_into_tensor_out(
        x, group.size(), group.group_name, out=out
    ),
    "all_reduce": lambda op, group, x: OPERATORS.all_reduce_(x, op, group.group_name),
    "broadcast": lambda op, group, x, root: OPERATORS.broadcast_(x, root, group.group_name),
    "reduce_scatter_tensor": lambda op, group, out, x: OPERATORS.reduce_scatter_tensor_out(
        x, op, group.size(), group.group_name, out=out
    ),
}


@contextmanager
def deprecated() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def called(name: str, t: Trial, args: tuple[Any, ...], outputs: list[Any], way: str, group: Any = None) -> list[Any]:
    """Make the call; what it has written or returned."""
    group = group or groups.WORLD
    if way == "functional":
        result = FUNCTIONAL[name](t.op.lower(), group, *args)
        return result if isinstance(result, list) else [result]
    if way == "writing":
        WRITING[name](t.op.lower(), group, *args)
        return outputs
    options: dict[str, Any] = {"op": reduction(t.op)} if name in REDUCING else {}
    options |= {"async_op": True} if way == "async" else {}
    work = getattr(distributed, name.split()[0])(*args, **options, group=group)
    assert (work is None) == (way == "eager")
    if work is not None:
        getattr(work, "wait", lambda: work)()
    return outputs


# ----------------------------------------------------------------------------------------------------- what is compared


def layout_of(x: Tensor) -> Any:
    return x.storage_layout if isinstance(x, md.MaskedTensor) else x.layout


def same_stored(found: Any, expected: Any) -> None:
    """The same values, mask and extent; what is known of this is true."""
    if type(found) is Tensor:
        same(found, expected.to_tensor(-9))  # what a plain buffer held before
        return
    found = found.to_dense()
    md.testing.assert_close(found, expected, rtol=0, atol=0, check_extent=True)
    assert not any(contradiction(f.along, f.there) for f in factors_of(found._printed_record))


def compared(t: Trial, name: str, way: str) -> None:
    """One call on each rank."""
    args, outputs, expected = CASES[name](t)

    def written(x: Any) -> bool:
        return any(x is output for output in outputs)

    if t.kind.plain == "sent" and outputs:
        args = tuple(arg if any(map(written, tree_leaves(arg))) else with_a_plain(arg) for arg in args)
    with deprecated():
        if any(isinstance(other, Exception) for other in expected):
            with pytest.raises((MaskedSemanticsError, ValueError), match=r"positions of their|their positions"):
                called(name, t, args, outputs, way)
            return
        views = [output[1] for output in outputs if type(output) is md.MaskedTensor]
        kept = [(x, x.clone()) for x in tree_leaves(args) if isinstance(x, Tensor)]
        found = called(name, t, args, outputs, way)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(outputs[0])
        assert way == "functional" or layout_of(one) == layout_of(outputs[0])
        same_stored(one, other)
    for x, before in kept:
        if way == "functional" or not written(x):
            md.testing.assert_close(x, before, rtol=0, atol=0)
    if way != "functional":
        check_views(views, found, expected)


def with_a_plain(sent: Any) -> Any:
    """The tensor as a plain one, or the first of a list."""
    if isinstance(sent, list) and sent:
        return [with_a_plain(sent[0]), *sent[1:]]
    return sent.get_data() if isinstance(sent, md.MaskedTensor) else sent


def check_views(views: Sequence[Any], bases: Sequence[Any], expected: Sequence[Any]) -> None:
    """Views of what is written to show what has arrived, and their bases what is then written to them."""
    for view, base, other in zip(views, bases, expected, strict=bool(views)):
        same_stored(view, other[1])
        view.fill_(5)
        other[1].fill_(5)
        same_stored(base, other)


def asked(name: str, kind: Kind, way: str) -> Iterator[tuple[str, torch.dtype]]:
    """The reductions and dtypes of the calls."""
    every = kind.form is None and name in ("all_reduce", "broadcast") and way in ("eager", "functional")
    for op in REDUCTIONS if name in REDUCING and not kind.knows_extent else ("SUM",):
        of_op = {"AVG": FLOATS, "SUM": (*ALL_DTYPES, torch.complex64)}.get(op, ALL_DTYPES)
        of_op += (torch.int16,) if name == "broadcast" else ()  # which gloo does not add
        for dtype in of_op if every else (torch.float64,):
            yield op, dtype


def checked(rank: int, ranks: int, name: str, kind: Kind, way: str) -> None:
    for op, dtype in asked(name, kind, way):
        compared(Trial(rank, ranks, kind, op, dtype), name, way)


def derived(rank: int, ranks: int, name: str, kind: Kind) -> None:
    def loss(y: Any, r: int) -> Any:
        weights = torch.randn(y.numel(), generator=torch.Generator().manual_seed(r)).double()
        return (y.to_dense().reshape(-1) ** 2 * weights).sum()

    for op in ("SUM", "AVG") if name in REDUCING else ("SUM",):
        mine, leaves = Trial(rank, ranks, kind, op), dict[tuple[int, int, int], Any]()
        args, _, _ = CASES[name](mine)
        x = args[0 if name in IN_PLACE else 1].requires_grad_()
        with deprecated():
            (result,) = called(name, mine, args, [], "functional")
            loss(result, rank).backward()
        alone = [loss(CASES[name](Trial(r, ranks, kind, op, leaves=leaves))[2][0], r) for r in range(ranks)]
        md.accumulate(*alone).backward()
        leaf = leaves[rank, len(x), 0]
        expected: Any = leaf.grad
        if expected is None:  # what this rank has goes nowhere
            expected = md.masked_tensor(torch.zeros_like(leaf.get_data()), leaf.get_mask())
        assert x.grad is not None, op
        md.testing.assert_close(x.grad.to_dense(), expected, msg=lambda text, op=op: f"{op}: {text}")


# The autograd functions of torch.distributed.nn, given a tensor and another of its shape.
OF_NN: dict[str, Callable[[Any, Any], Any]] = {
    "all_gather": lambda x, y: of_nn.all_gather(x),
    "all_reduce": lambda x, y: of_nn.all_reduce(x),
    "all_to_all": lambda x, y: of_nn.all_to_all([y] * groups.WORLD.size(), [x] * groups.WORLD.size()),
    "all_to_all_single": lambda x, y: of_nn.all_to_all_single(y, x),
    "broadcast": lambda x, y: of_nn.broadcast(x, 0),
    "gather": lambda x, y: of_nn.gather(x, 0),
    "reduce": lambda x, y: of_nn.reduce(x, 0),
    "reduce_scatter": lambda x, y: of_nn.reduce_scatter(y, [x] * groups.WORLD.size()),
    "scatter": lambda x, y: of_nn.scatter([x] * groups.WORLD.size(), 0),
}


def by_functions_of_nn(rank: int, ranks: int, name: str) -> None:
    """They move and add up elements, as they do with zeros for missing ones; an element is there if one of them is."""

    def called_with(x: Tensor) -> Tensor:
        with deprecated():
            found = OF_NN[name](x, torch.zeros_like(x))
        return found if isinstance(found, Tensor) else torch.stack(list(found))

    x = of_rank(rank, (ROWS, 3)).requires_grad_()
    y = x.to_tensor(0).detach().requires_grad_()
    found, expected = called_with(x), called_with(y)
    there = called_with(x.get_mask().double()) > 0
    (found.to_tensor(0) * (rank + 1)).sum().backward()
    (expected * there * (rank + 1)).sum().backward()
    if rank == 0 or name not in ("gather", "reduce"):
        md.testing.assert_close(found, md.masked_tensor(expected.detach(), there))
    assert x.grad is not None
    md.testing.assert_close(x.grad, md.masked_tensor(y.grad, x.get_mask()))


# Of each message in turn, to which rank it goes, counted from its sender, and its tag.
MESSAGES = {"eager": [(1, 3)], "async": [(1, 0), (1, 0)], "batch": [(1, 0), (-1, 1)]}


def ring(rank: int, ranks: int, kind: Kind, way: str) -> None:
    """send, recv, isend, irecv and batch_isend_irecv: each rank sends to its neighbours."""
    t, messages = Trial(rank, ranks, kind), MESSAGES[way]
    sent, outputs = [t.mine(seed=i) for i in range(len(messages))], t.buffers(*[ROWS] * len(messages))
    one_way, back = ("send", "recv") if way == "eager" else ("isend", "irecv")
    sends, receives = getattr(distributed, one_way), getattr(distributed, back)
    calls = [(sends, x, (rank + step) % ranks, tag) for x, (step, tag) in zip(sent, messages, strict=True)]
    calls += [(receives, x, (rank - step) % ranks, tag) for x, (step, tag) in zip(outputs, messages, strict=True)]
    if way == "batch":
        works = distributed.batch_isend_irecv([distributed.P2POp(f, x, to, tag=tag) for f, x, to, tag in calls])
    else:  # (odd ranks receive before they send)
        in_turn = reversed(calls) if way == "eager" and rank % 2 else calls
        works = [f(x, to, tag=tag) for f, x, to, tag in in_turn]
    for work in works if way != "eager" else []:
        work.wait()
    for i, (output, (step, _)) in enumerate(zip(outputs, messages, strict=True)):
        same_stored(output, t.dense((rank - step) % ranks, seed=i))


def objects(rank: int, ranks: int, kind: Kind) -> None:
    """The functions of objects: a masked tensor is pickled."""
    t = Trial(rank, ranks, kind)
    x = t.mine()
    found: list[Any] = [None] * ranks
    distributed.all_gather_object(found, x)
    gathered: Any = [None] * ranks if rank == 1 else None
    distributed.gather_object(x, gathered, 1)
    sent, scattered, passed = [x], [None], [None]
    distributed.broadcast_object_list(sent, 1)
    distributed.scatter_object_list(scattered, found if rank == 0 else None)
    if rank == 0:
        distributed.send_object_list([x], 1)
    if rank == 1:
        distributed.recv_object_list(passed, 0)
    pairs = [*zip(found, range(ranks), strict=True), (sent[0], 1), (scattered[0], rank)]
    pairs += [*zip(gathered, range(ranks), strict=True), (passed[0], 0)] if rank == 1 else []
    for one, r in pairs:
        assert one.layout == x.layout
        same_stored(one, t.dense(r))


def ways(name: str, kind: Kind) -> list[str]:
    """Of calling a function with a kind."""
    function = getattr(distributed, name.split()[0], None)
    if function is None:  # not in every version that is supported
        return []
    eager = ["eager", *(["async"] if "async_op" in inspect.signature(function).parameters else [])]
    if kind.plain != "nothing":
        pairwise = name.startswith(("all_to_all", "scatter")) and kind.stored is not MATRICES["dense"].stored
        return [] if name in IN_PLACE or (kind.plain == "received" and pairwise) else eager
    return [*eager, *(way for way, table in (("functional", FUNCTIONAL), ("writing", WRITING)) if name in table)]


for of, kind in KINDS.items():
    for name in CASES if of in STORED else DISTINCT:
        for way in ways(name, kind):
            CHECKS[f"{name}, {of}, {way}"] = functools.partial(checked, name=name, kind=kind, way=way)
    if kind.plain == "nothing":
        for way in MESSAGES:
            CHECKS[f"send and recv, {of}, {way}"] = functools.partial(ring, kind=kind, way=way)
        CHECKS[f"objects, {of}"] = functools.partial(objects, kind=kind)
for of, kind in MATRICES.items():
    for name in [name for name in FUNCTIONAL if name != "all_reduce_coalesced"]:
        CHECKS[f"{name}, {of}, derivative"] = functools.partial(derived, name=name, kind=kind)
CHECKS.update({f"torch.distributed.nn, {name}": functools.partial(by_functions_of_nn, name=name) for name in OF_NN})
