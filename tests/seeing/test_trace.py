"""`masked_dispatch.trace`: what each call did to validity, in order, and what is kept of it."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, nn

import masked_dispatch as md

MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False], [True, True, True]])


def some(requires_grad: bool = False) -> md.MaskedTensor:
    data = torch.arange(1.0, 13.0).reshape(4, 3).masked_fill(~MASK, torch.nan)
    return md.masked_tensor(data, MASK, requires_grad=requires_grad)


def names(calls: Any) -> list[str]:
    return [call.name for call in calls]


class PrintedForm(TestCase):
    """A trace as it prints, without times, which differ from run to run."""

    maxDiff = None

    def test_modules_operators_and_backward(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.ReLU(), nn.Softmax(-1)))
        x = some(requires_grad=True)
        with md.trace() as t:
            (model(x) * x[:, :2]).sum().backward()
        self.assertExpectedInline(
            t.to_text(times=False),
            """\
trace: 20 operator calls (13 in backward), 5 module calls, validity lost in 1, grown in 2
call                                                   valid in            valid out  rule           storage
Sequential                                             6/12 50%            6/8 75%    module         dense
  0 (Linear)                                           6/12 50%            6/8 75%    module         dense
    aten.linear.default                                6/12 50%            6/8 75%    contraction    dense    grown
  1 (Sequential)                                       6/8 75%             6/8 75%    module         dense
    1.0 (ReLU)                                         6/8 75%             6/8 75%    module         dense
      aten.relu.default                                6/8 75%             6/8 75%    elementwise    dense
    1.1 (Softmax)                                      6/8 75%             6/8 75%    module         dense
      aten.softmax.int                                 6/8 75%             6/8 75%    normalization  dense
aten.slice.Tensor                                      6/12 50%            5/8 62%    movement       dense
aten.mul.Tensor                                        6/8 75%, 5/8 62%    5/8 62%    elementwise    dense    lost 1
aten.sum.default                                       5/8 62%             1/1 100%   reduction      dense    grown
aten.ones_like.default                                 1/1 100%            1/1 100%   factory        dense
gradient of the result of aten.sum.default, call 10    1/1 100%            plain      derivative     dense    backward
gradient of an operand of aten.sum.default, call 10    plain               5/8 62%    derivative     dense    backward
gradient of the result of aten.mul.Tensor, call 9      5/8 62%             plain      derivative     dense    backward
gradient of an operand of aten.mul.Tensor, call 9      plain               5/8 62%    derivative     dense    backward
gradient of an operand of aten.mul.Tensor, call 9      plain               6/8 75%    derivative     dense    backward
gradient of the result of aten.softmax.int, call 7     6/8 75%             plain      derivative     dense    backward
gradient of an operand of aten.softmax.int, call 7     plain               6/8 75%    derivative     dense    backward
gradient of the result of aten.relu.default, call 5    6/8 75%             plain      derivative     dense    backward
gradient of an operand of aten.relu.default, call 5    plain               6/8 75%    derivative     dense    backward
gradient of the result of aten.linear.default, call 2  6/8 75%             plain      derivative     dense    backward
gradient of an operand of aten.linear.default, call 2  plain               6/12 50%   derivative     dense    backward
aten.add.Tensor                                        6/12 50%, 6/12 50%  6/12 50%   elementwise    dense    backward
aten.detach.default                                    6/12 50%            6/12 50%   plumbing       dense    backward""",  # noqa: E501
        )

    def test_storage_and_what_is_stored_densely(self) -> None:
        x = some().to_sparse_csr()
        with md.trace() as t:
            torch.svd(x.exp())
        self.assertExpectedInline(
            t.to_text(times=False),
            """\
trace: 6 operator calls, validity lost in 1, grown in 0, stored densely in 1
call                          valid in  valid out                rule          storage
aten.exp.default              6/12 50%  6/12 50%                 elementwise   csr
aten.svd.default              6/12 50%  0/12 0%, 0/3 0%, 0/9 0%  decomposes    csr -> dense  lost
  aten.linalg_svd.default     6/12 50%  0/12 0%, 0/3 0%, 0/9 0%  decomposes    csr -> dense  lost
    aten._linalg_svd.default  6/12 50%  0/12 0%, 0/3 0%, 0/9 0%  whole slices  csr -> dense  lost, stored densely
        stores densely: aten._linalg_svd.default stores shape (4, 3) as torch.sparse_csr with 6 stored densely, 60 bytes: it works on a whole slice at once, whose elements have to lie side by side
  aten.mH.default             0/9 0%    0/9 0%                   decomposes    dense
    aten.transpose.int        0/9 0%    0/9 0%                   movement      dense""",  # noqa: E501
        )

    def test_nothing_masked(self) -> None:
        with md.trace() as t:
            nn.Linear(3, 2)(torch.ones(4, 3))
        self.assertExpectedInline(
            t.to_text(times=False),
            """\
trace: 0 operator calls, validity lost in 0, grown in 0
  nothing was called with a masked tensor""",
        )

    def test_a_path(self) -> None:
        x, y = some(), md.masked_tensor(torch.ones(4, 3), ~MASK)
        with md.trace() as t:
            (x.exp() * 2 + 1).sum(0)
            total = md.accumulate(x.cos(), y).mean(1)
        self.assertExpectedInline(
            str(t.of(total)),
            """\
sources: self of shape (4, 3) (6/12 50%), tensors of shape (4, 3) (6/12 50%)
   4  aten.cos.default: 6/12 50% -> 6/12 50% (elementwise; dense)
   5  masked_dispatch.accumulate.default: 6/12 50%, 6/12 50% -> 12/12 100% (this library's; dense; grown)
   6  aten.mean.dim: 12/12 100% -> 4/4 100% (reduction; dense)""",
        )

    def test_a_call(self) -> None:
        with md.trace() as t:
            some() * md.masked_tensor(torch.ones(4, 3), ~MASK)
        self.assertExpectedInline(
            str(t.lost()[0]),
            """\
aten.mul.Tensor: 6/12 50%, 6/12 50% -> 0/12 0% (elementwise; dense; lost 12)""",
        )


# ------------------------------------------------------------------------------------------------- lost and grown

OTHER = torch.tensor([[True, False, False], [True, True, False], [True, False, False], [True, True, True]])


def other() -> md.MaskedTensor:
    return md.masked_tensor(torch.ones(4, 3), OTHER)


# (call, lost, grown): numbers of elements, True where only shares can be compared, 0 if it did not happen.
CHANGES: dict[str, tuple[Callable[[Any], object], int, int]] = {
    "one mask": (lambda x: x + x, 0, 0),
    "a number": (lambda x: x + 1, 0, 0),
    "two masks": (lambda x: x + other(), 3, 0),
    "broadcast": (lambda x: x + other()[0], 4, 0),
    "where": (lambda x: torch.where(x.get_mask(), x, torch.tensor(0.0)), 0, 6),
    "mask_with": (lambda x: x.mask_with(OTHER), 1, 0),
    "fill": (lambda x: x.fill_(1.0), 0, 6),
    "to_tensor": (lambda x: x.to_tensor(0), 0, 6),
    "get_data": (lambda x: x.get_data(), 0, 6),
    "copy": (lambda x: x.copy_(other()), 1, 2),
    "scan": (lambda x: x.cumsum(1), 0, 0),
    "softmax": (lambda x: x.softmax(1), 0, 0),
    "sum of rows": (lambda x: x.sum(1), 0, True),
    "sum": (lambda x: x.sum(), 0, True),
    "a count": (lambda x: x.count(), 0, 0),
    "a view": (lambda x: x[2:], 0, 0),
    "selection": (lambda x: x[x.get_mask()], 0, 0),
    "join": (lambda x: torch.cat([x, other()]), 0, 0),
    "product": (lambda x: x.T @ other(), 0, True),
    "a matrix with holes": (lambda x: torch.linalg.inv(x[1:]), True, 0),
    "invalid index": (lambda x: torch.arange(20.0)[md.masked_tensor(torch.zeros(2, dtype=int), OTHER[0, :2])], 0, 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_became_invalid_or_valid(name: str) -> None:
    call, lost, grown = CHANGES[name]
    with md.trace() as t:
        call(some())
    changes = [c.change for c in t.calls]
    assert [c.lost_elements or c.lost for c in changes if c.lost] == ([lost] if lost else [])
    assert [c.grown_elements or c.grown for c in changes if c.grown] == ([grown] if grown else [])
    assert (len(t.lost()), len(t.grown())) == (bool(lost), bool(grown))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.jagged], ids=str)
def test_counts_are_those_of_every_storage(layout: torch.layout) -> None:
    x = some()[..., None].contiguous()
    stored = x.to_layout(layout)
    with md.trace() as t:
        stored * stored
        stored.sum(1)
    seen = [(c.operands[0].valid, c.operands[0].numel, c.results[0].valid) for c in t.calls if c.depth == 0]
    # (a packed row without elements is a sample of length 0, whose sum is 0)
    assert seen == [(6, 12, 6), (6, 12, 4 if layout is torch.jagged else 3)]
    assert {operand.storage for call in t.calls for operand in call.operands} == {
        {"torch.jagged": "packed"}.get(str(layout), str(layout).removeprefix("torch.sparse_"))
    }


def test_a_composite_operator_is_shown_with_the_calls_it_makes() -> None:
    x, y = some(), other()
    with md.trace() as t:
        torch.einsum("ij,ij->ij", x, y)
    composite, *pieces = t.calls
    assert composite.name == "aten.einsum.default"
    assert {call.parent for call in pieces if call.depth == 1} == {composite.number}
    assert composite.change.lost
    assert composite not in t.lost()
    assert names(t.lost())


def test_what_raises_is_shown() -> None:
    with md.trace() as t, pytest.raises(md.MaskedSemanticsError):
        nn.Sequential(nn.ReLU(), Refuses())(some())
    with md.trace() as after:
        some().exp()
    refused = t.calls[-1]
    assert refused.name == "aten.linalg_ldl_factor_ex.default"
    assert refused.error.startswith(
        "MaskedSemanticsError: torch.linalg.ldl_factor (linalg_ldl_factor_ex) has no meaning"
    )
    assert refused.marks == ["raised MaskedSemanticsError"]
    assert [call.depth for call in after.calls] == [0]


class Refuses(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.linalg.ldl_factor(x)


# ------------------------------------------------------------------------------------------------------------- paths


def test_the_path_of_a_tensor() -> None:
    x, y = some(), other()
    with md.trace() as t:
        unrelated = y.exp()
        z = (x.sin() * y).cumsum(0)
    assert names(t.of(z).calls) == ["aten.sin.default", "aten.mul.Tensor", "aten.cumsum.default"]
    assert [(s.name, s.valid) for s in t.of(z).sources] == [("self", 6), ("other", 7)]
    assert names(t.of(unrelated).calls) == ["aten.exp.default"]


def test_a_path_leads_through_views_and_writes_to_them() -> None:
    x = some()
    with md.trace() as t:
        y = x.exp()
        y[0].fill_(1.0)
        z = y.sum()
    assert names(t.of(z).calls) == ["aten.exp.default", "aten.select.int", "aten.fill_.Scalar", "aten.sum.default"]


def test_a_path_leads_through_plain_tensors_that_a_call_made() -> None:
    x = some()
    with md.trace() as t:
        y = other().mask_with(x.cos().get_mask())
    assert names(t.of(y).calls) == [
        "aten.cos.default",
        "masked_dispatch.get_mask.default",
        "masked_dispatch.mask_with.default",
    ]


def test_the_path_of_a_gradient_leads_through_backward() -> None:
    x = some(requires_grad=True)
    with md.trace() as t:
        x.exp().sum().backward()
    assert [call.backward for call in t.of(x.grad).calls][-1]


def test_only_the_outer_levels_are_shown() -> None:
    x = md.from_nan(torch.tensor([[1.0, float("nan")]]))
    with md.trace() as t:
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())(x)
    indents = {depth: t.to_text(times=False, depth=depth).splitlines()[2:] for depth in (1, 2, 3)}
    assert [line.split()[0] for line in indents[1]] == ["Sequential"]
    assert [line.split()[0] for line in indents[2]] == ["Sequential", "0", "1"]
    assert t.to_text(times=False, depth=3) == t.to_text(times=False)
    with pytest.raises(ValueError, match="depth=0 shows nothing: pass at least 1"):
        t.to_text(depth=0)


def test_a_path_belongs_to_a_tensor() -> None:
    with md.trace() as t:
        pass
    with pytest.raises(TypeError, match=r"this is a dict: pass one of its tensors, such as output\.last_hidden_state"):
        t.of({})  # type: ignore[arg-type]


def test_a_source_has_no_path_and_a_stranger_is_refused() -> None:
    x = some()
    with md.trace() as t:
        x.exp()
    assert t.of(x).calls == ()
    assert str(t.of(x)) == "a source: no call of the trace made it"
    with pytest.raises(ValueError, match=r"^no call of this trace has made or taken this tensor of shape \(4, 3\): "):
        t.of(other())


# ------------------------------------------------------------------------------------------------- what it leaves alone


def test_nothing_is_kept_alive() -> None:
    x = some()
    with md.trace() as t:
        y = x.exp()
        z = y[0].mul_(2)
    alive = [weakref.ref(x.get_data()), weakref.ref(y), weakref.ref(y._data), weakref.ref(z)]
    del x, y, z
    gc.collect()
    assert len(t) == 3
    assert [a() for a in alive] == [None] * 4


def test_results_are_the_same_inside_a_trace() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).double()
    batch = md.from_lengths(torch.randn(3, 5, 8, dtype=torch.float64), torch.tensor([5, 2, 0]))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return [loss, *(p.grad for p in model.parameters())]

    plain = gradients()
    with md.trace():
        traced = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))


def python_calls(function: Callable[[], object]) -> list[str]:
    """The Python functions that a call runs, in order."""
    seen: list[str] = []

    def profile(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            seen.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


def test_nothing_is_added_to_a_call_while_no_trace_is_open() -> None:
    x, layer = some(requires_grad=True), nn.Linear(3, 2)

    def step() -> None:
        layer(x + x)[:, 0].sum().backward()

    for _ in range(2):  # the first accumulates into nothing, the second runs some code for the first time
        step()
    before = python_calls(step)
    with md.trace():
        inside = python_calls(step)
    assert python_calls(step) == before
    assert not any("masked_dispatch/seeing" in call for call in before)
    assert any("masked_dispatch/seeing" in call for call in inside)


def test_hooks_and_methods_are_put_back() -> None:
    def replaced() -> Any:
        # A removed hook that takes keyword arguments leaves its number behind in torch.
        hooks = [d for name, d in vars(nn.modules.module).items() if name.startswith("_global_forward")]
        return [len(d) for d in hooks], md.MaskedTensor.__torch_dispatch__, list(warnings.filters)

    before = replaced()
    for _ in range(3):
        with md.trace(), md.trace(), pytest.raises(ZeroDivisionError), md.trace():
            raise ZeroDivisionError
    assert replaced() == before
    assert replaced()[0]


def test_traces_nest() -> None:
    x = some()
    with md.trace() as outer:
        x.exp()
        with md.trace() as inner:
            x.sin()
        x.cos()
    x.tan()
    assert names(outer.calls) == ["aten.exp.default", "aten.sin.default", "aten.cos.default"]
    assert names(inner.calls) == ["aten.sin.default"]


def test_a_thread_sees_its_own_calls() -> None:
    traces: dict[str, md.Trace] = {}
    ready = threading.Barrier(2)

    def work(name: str) -> None:
        with md.trace() as traces[name]:
            ready.wait()
            for _ in range(20):
                getattr(some(), name)()
            ready.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("exp", "sin")]
    with md.trace() as mine:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {name: set(names(t.calls)) for name, t in traces.items()} == {
        "exp": {"aten.exp.default"},
        "sin": {"aten.sin.default"},
    }
    assert len(mine) == 0


def test_rules_that_change_inside_a_trace() -> None:
    x = some()
    with md.trace() as t, md.windows("padding"):
        nn.functional.max_pool1d(md.masked_tensor(torch.ones(1, 1, 4), torch.tensor([[[True, True, True, False]]])), 2)
        x.exp()
    assert "aten.exp.default" in names(t.calls)
    assert any("pool" in name for name in names(t.calls))


def test_under_vmap_there_are_no_counts() -> None:
    with md.trace() as t:
        md.functional.vmap(lambda row: row.exp())(some())
    call = next(c for c in t.calls if c.name == "aten.exp.default")
    assert call.operands[0].valid is None
    assert "?/3" in str(call)
    assert not call.change.lost
