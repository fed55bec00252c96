"""An assignment of something partly invalid to a plain tensor says that the mask is gone, at the caller's line."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md
from masked_dispatch.torch_internals import aten_names, overload_named
from op_registry import resolve
from op_registry.laws.categories import ASSIGNMENT
from op_registry.schema import is_inplace

aten = torch.ops.aten
INDEX = torch.tensor([[2, 1, 0], [0, 2, 1]])
LEFT = torch.tensor([[True, True, False], [False, False, False]])

# Into a plain (2, 3), from a masked one. A line each, whose number is that of the call.
ASSIGNMENTS: dict[str, Callable[[Tensor, Any], object]] = {
    "copy_": lambda o, x: o.copy_(x),
    "o[:] = x": lambda o, x: o.__setitem__(slice(None), x),
    "o[1] = x[1]": lambda o, x: o.__setitem__(1, x[1]),
    "o[0, 1] = x[0, 1]": lambda o, x: o.__setitem__((0, 1), x[0, 1]),
    "o[0, 2] = x[0, 2]": lambda o, x: o.__setitem__((0, 2), x[0, 2]),
    "o[indices] = x": lambda o, x: o.__setitem__(torch.tensor([1, 0]), x),
    "o[mask] = x[mask]": lambda o, x: o.__setitem__(LEFT, x.to_dense()[LEFT]),
    "index_put_": lambda o, x: o.index_put_((torch.tensor([0, 1]),), x),
    "_index_put_impl_": lambda o, x: aten._index_put_impl_(o, [torch.tensor([0, 1])], x),
    "put_": lambda o, x: o.put_(INDEX, x),
    "index_copy_": lambda o, x: o.index_copy_(1, torch.tensor([2, 0, 1]), x),
    "scatter_": lambda o, x: o.scatter_(1, INDEX, x),
    "masked_scatter_": lambda o, x: o.masked_scatter_(torch.ones(2, 3) > 0, x),
    "masked_scatter_ of two": lambda o, x: o.masked_scatter_(LEFT, x),
    "fill_": lambda o, x: o.fill_(x[0, 1]),
    "bernoulli_": lambda o, x: o.bernoulli_(x),
    "_foreach_copy_": lambda o, x: torch._foreach_copy_([torch.ones(1), o], [torch.ones(1), x]),
    "add(out=)": lambda o, x: torch.add(x, 0, out=o),
    "sum(out=)": lambda o, x: torch.sum(x[1:], 0, out=o[0]),
    "stack(out=)": lambda o, x: torch.stack([x[0], torch.zeros(3)], out=o),
    "cat(out=)": lambda o, x: torch.cat([x[:1], torch.zeros(1, 3)], out=o),
    "where(out=)": lambda o, x: torch.where(LEFT, x, torch.zeros(2, 3), out=o),
    "index_select(out=)": lambda o, x: torch.index_select(x, 0, torch.tensor([1, 1]), out=o),
    "max(out=)": lambda o, x: torch.max(x[:, 2:], 1, out=(o[:, 0], torch.zeros(2, dtype=torch.int64))),
    "slice_scatter(out=)": lambda o, x: aten.slice_scatter.out(o.clone(), x[:, :2], 1, 0, 2, out=o),
    "concatenate(out=)": lambda o, x: torch.concatenate([x[:1], x[1:]], out=o),
}
# Nothing of these is an assignment, or an element that is written to keeps its value because its index is invalid.
OTHERS: dict[str, Callable[[Tensor, Any], object]] = {
    "add_": lambda o, x: o.add_(x),
    "addcmul_": lambda o, x: o.addcmul_(x, x),
    "addcdiv_": lambda o, x: o.addcdiv_(x, torch.ones(2, 3)),
    "lerp_": lambda o, x: o.lerp_(x, 0.5),
    "masked_fill_": lambda o, x: o.masked_fill_(x > -1.0, 1.0),
    "index_add_": lambda o, x: o.index_add_(1, torch.tensor([2, 0, 1]), x),
    "scatter_add_": lambda o, x: o.scatter_add_(1, INDEX, x),
    "index_put_(accumulate=True)": lambda o, x: o.index_put_((torch.tensor([0, 1]),), x, accumulate=True),
    "put_(accumulate=True)": lambda o, x: o.put_(INDEX, x, accumulate=True),
    "_foreach_add_": lambda o, x: torch._foreach_add_([o], [x]),
    "o[x > -1.0] = 1.0": lambda o, x: o.__setitem__(x.to_dense() > -1.0, 1.0),
    "scatter_ of a number": lambda o, x: o.scatter_(1, (x.to_dense() * 0).long(), 1.0),
}

DATA = torch.zeros(2, 3)
HOLES = torch.tensor([[True, False, True], [True, True, False]])
IN_PLACES: dict[str, Callable[[Any], Any]] = {
    "dense": lambda x: x,
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "packed": lambda x: x.to_packed().without_extent(),
    "padded": lambda x: md.padded(x, torch.ones(2, 3, dtype=torch.bool), dim=1),
}
SOURCES: dict[str, Callable[[], md.MaskedTensor]] = {
    **{f"holes, {n}": lambda to=to: to(md.masked_tensor(DATA, HOLES)) for n, to in IN_PLACES.items()},
    **{f"all valid, {n}": lambda to=to: to(md.masked_tensor(DATA, HOLES | True)) for n, to in IN_PLACES.items()},
    "no mask": lambda: md.as_masked_tensor(DATA.clone()),
}
HELD, FILL = -7.0, 1.0  # what the plain tensor held before; what no element of DATA is


def target() -> Tensor:
    return torch.full((2, 3), HELD)


def skips(call: Callable[[Tensor, Any], object], x: md.MaskedTensor) -> bool:
    """Whether the call writes an invalid element, as plain torch does it with one that is known by its value."""
    written = target()
    call(written, x.to_tensor(FILL))
    return bool((written == FILL).any())


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_an_assignment_says_exactly_when_it_skips_something(name: str, source: str, warned: Any) -> None:
    call, x = ASSIGNMENTS[name], SOURCES[source]()
    expected = skips(call, x)
    call(target(), x)
    assert [w.category for w in warned] == [md.MaskDroppedWarning] * expected
    for found in warned:
        assert (found.filename, found.lineno) == (__file__, call.__code__.co_firstlineno)
    with md.updates("silent"):
        call(written := target(), x)
    assert len(warned) == expected
    with md.updates("refuse"):
        if not expected:
            call(target(), x)
            return
        refused = target()
        with pytest.raises(md.MaskedSemanticsError, match=r"would skip its invalid elements, \d of \d\. "):
            call(refused, x)
    assert (refused == HELD).all()  # before anything is written
    assert not torch.equal(written, refused) or name in ("fill_", "o[0, 1] = x[0, 1]")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", OTHERS)
def test_what_assigns_nothing_says_nothing(name: str, source: str) -> None:
    with md.updates("refuse"):
        OTHERS[name](target(), SOURCES[source]())


def test_every_in_place_form_of_an_assignment_is_here() -> None:
    assigning = set()
    for name in aten_names():
        op = overload_named(name)
        meaning = resolve(op)
        operands = [a for a in op._schema.arguments[1:] if "Tensor" in str(a.type)]
        if operands and is_inplace(op) and meaning.rule is not None and meaning.rule.category is ASSIGNMENT:
            assigning.add(op._schema.name.removeprefix("aten::"))
    assert assigning <= {*ASSIGNMENTS}


# ---------------------------------------------------------------------------------------------------- Python's warnings


def holes() -> md.MaskedTensor:
    return md.masked_tensor(DATA, HOLES)


def test_once_for_a_line_and_whatever_is_assigned() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for rows in (2, 1, 2):
            target()[:rows] = holes()[:rows]
        target().copy_(holes())
    assert [w.category for w in found] == [md.MaskDroppedWarning] * 2
    assert found[1].lineno == found[0].lineno + 1


def test_the_text() -> None:
    expected = (
        "aten.copy_.default: the assignment to a plain tensor skips invalid elements. The plain tensor keeps its old "
        "values there, and nothing marks them. Assign to a masked buffer (x.new_empty(shape), which is invalid until "
        "written to), fill first (x.to_tensor(fill)), or use a container's own conversion "
        "(masked_dispatch.interop.to_tensordict). masked_dispatch.updates('silent') allows it, "
        "masked_dispatch.updates('refuse') raises."
    )
    with pytest.warns(md.MaskDroppedWarning, match=f"^{re.escape(expected)}$"):
        target().copy_(holes())
    refusal = (
        r"^torch\.Tensor\.copy_: a masked tensor of shape \(2, 3\) to a plain tensor of shape \(2, 3\) would skip its "
        r"invalid elements, 2 of 6\. .* This was refused by masked_dispatch\.updates\('refuse'\)\.$"
    )
    with md.updates("refuse"), pytest.raises(md.MaskedSemanticsError, match=refusal):
        target().copy_(holes())


@pytest.mark.parametrize(("action", "calls"), [("error", 0), ("ignore", 0), ("once", 1), ("module", 1), ("always", 3)])
def test_filters_apply(action: Any, calls: int) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.resetwarnings()
        warnings.simplefilter(action, md.MaskDroppedWarning)
        for _ in range(3):
            if action == "error":
                written = target()
                with pytest.raises(md.MaskDroppedWarning):
                    written.copy_(holes())
                assert (written == HELD).all()
            else:
                target().copy_(holes())
    assert len(found) == calls


def test_a_filter_names_the_module_of_the_caller() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=md.MaskDroppedWarning, module=__name__)
        target().copy_(holes())


def test_the_line_is_that_of_the_caller_of_torch(warned: Any) -> None:
    layer = nn.Linear(3, 2)
    layer.load_state_dict({"weight": holes(), "bias": torch.zeros(2)})
    (found,) = warned
    assert (found.filename, found.lineno) == (
        __file__,
        test_the_line_is_that_of_the_caller_of_torch.__code__.co_firstlineno + 2,
    )


def test_other_modes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^updates takes 'silent', 'warn' or 'refuse', not 'never'$"):
        md.updates("never").__enter__()  # type: ignore[arg-type]


def test_a_mode_ends_with_its_block_and_is_one_threads(warned: Any) -> None:
    with md.updates("refuse"):
        thread = threading.Thread(target=lambda: target().copy_(holes()))
        thread.start()
        thread.join()
        with md.updates("warn"):
            target().copy_(holes())
    target().copy_(holes())
    assert len(warned) == 3


def test_backward_is_in_the_mode_of_its_forward() -> None:
    class Assigns(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            target().copy_(holes())
            return grad

    with md.updates("silent"):
        y = Assigns.apply(torch.ones(2, requires_grad=True))
    y.sum().backward()
    with pytest.warns(md.MaskDroppedWarning):
        Assigns.apply(torch.ones(2, requires_grad=True)).sum().backward()


# -------------------------------------------------------------------------------------- where asking would have to wait


def test_elsewhere_a_mask_that_is_stored_counts_as_partly_invalid(warned: Any) -> None:
    on_meta = target().to("meta")
    on_meta.copy_(md.as_masked_tensor(DATA.clone()).to("meta"))
    assert warned == []
    on_meta.copy_(md.masked_tensor(DATA, HOLES | True).to("meta"))
    assert len(warned) == 1


def test_in_a_transform_a_mask_that_is_stored_counts_as_partly_invalid(warned: Any) -> None:
    md.functional.vmap(lambda row: row + torch.zeros(3).copy_(torch.ones(3)))(holes())
    assert warned == []
    md.functional.vmap(lambda row: torch.zeros_like(row.get_data()).copy_(row))(md.masked_tensor(DATA, HOLES | True))
    assert len(warned) == 1


# ------------------------------------------------------------------------------------------- what is no such assignment


@pytest.mark.parametrize("foreach", [False, True])
def test_torch_optimizers_assign_nothing_in_this_sense(foreach: bool) -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    for optimizer in (
        torch.optim.SGD([weight], 0.1, foreach=foreach),
        torch.optim.Adagrad([weight], 0.1, foreach=foreach),
    ):
        weight.grad = holes()
        with md.updates("refuse"):
            optimizer.step()


def test_an_optimizer_of_the_callers_own_does(warned: Any) -> None:
    class Sets(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.data.copy_(p.grad)

    weight = nn.Parameter(torch.ones(2, 3))
    weight.grad = holes()
    Sets([weight], {}).step()
    assert [w.filename for w in warned] == [__file__]
