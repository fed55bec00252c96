"""Operators that are refused whatever the mask: the reason, and the way out, which has to work."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from masked_dispatch import MaskedSemanticsError, as_masked_tensor, masked_tensor
from op_registry import registry
from op_registry.authoring import refused
from op_registry.conformance.samples import database
from op_registry.report import coverage
from storages import STORAGES

aten = torch.ops.aten
MASK = torch.tensor([[True, False, True], [True, True, False]])
X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def x():
    return masked_tensor(X, MASK)


def test_another_size_is_refused_and_the_same_is_nothing_to_do(x):
    assert x.resize_(2, 3) is x
    assert x.resize_as_(torch.empty(2, 3)) is x
    assert x.get_mask().equal(MASK)
    for resize in (lambda: x.resize_(3, 3), lambda: x.resize_as_(torch.empty(3, 3)), lambda: x.resize_(3, 2)):
        with pytest.raises(MaskedSemanticsError) as refusal:
            resize()
        assert "refused on masked tensors: it exposes memory of unknown validity" in str(refusal.value)
        assert "(from (2, 3) to (3, " in str(refusal.value)
        assert "Use x.reshape(size) to keep the elements, slicing to drop some" in str(refusal.value)
    with pytest.raises(MaskedSemanticsError, match=r"\(with memory_format=torch.channels_last\)"):
        x[None, None].resize_((1, 1, 2, 3), memory_format=torch.channels_last)
    assert F.pad(x, (0, 0, 0, 1)).get_mask().tolist() == [*MASK.tolist(), [True] * 3]


def test_a_plain_tensor_gets_the_size_of_a_masked_one_and_stays_plain(x):
    resized = torch.zeros(4).resize_as_(x)
    assert type(resized) is torch.Tensor
    assert resized.shape == (2, 3)


def test_memory_is_not_exchanged(x):
    plain = torch.zeros(3)
    for memory, taken in ((x, (plain,)), (plain, (x,)), (x, ()), (x, (plain.untyped_storage(),))):
        with pytest.raises(MaskedSemanticsError, match="set_ is refused on masked tensors: it would replace the mem"):
            memory.set_(*taken)
    x.copy_(masked_tensor(X + 1, ~MASK))
    assert x.get_mask().equal(~MASK)


def test_an_empty_masked_tensor_still_takes_a_result(x):
    out = masked_tensor(torch.empty(0))
    assert torch.add(x, x, out=out) is out
    assert out.get_mask().equal(MASK)
    torch.testing.assert_close(out.to_tensor(0), torch.where(MASK, 2 * X, 0))


# Of one operand, of a list, and of several results.
RESIZING_OUT = {
    "mm": lambda x, out: torch.mm(x, torch.ones(3, 2), out=out),
    "cat": lambda x, out: torch.cat([x, x], out=out),
    "values of sort": lambda x, out: torch.sort(x, out=(out, torch.empty(0, dtype=torch.int64)))[0],
    "indices of sort": lambda x, out: torch.sort(x, out=(torch.empty(2, 3), out.long()))[1],
}


@pytest.mark.parametrize("stored", ["dense", "csr", "coo"])
@pytest.mark.parametrize("name", RESIZING_OUT)
def test_a_plain_out_is_not_resized_for_what_is_partly_invalid(name, stored):
    """Its new memory, which nobody wrote, would be seen where the result is invalid."""
    call = RESIZING_OUT[name]
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[0, 0] = True
    out = torch.empty(0)
    with pytest.raises(MaskedSemanticsError, match=r"out= is a plain tensor of shape \(0,\), which would be resized"):
        call(STORAGES[stored](masked_tensor(X, mask)), out)
    assert out.shape == (0,)
    whole = STORAGES[stored](masked_tensor(X, torch.ones(2, 3, dtype=torch.bool)))
    torch.testing.assert_close(call(whole, torch.empty(0)), call(X, torch.empty(0)))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:.*quantized tensor creation:UserWarning")
@pytest.mark.parametrize(
    "convert", [lambda x: x.to_mkldnn(), lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)]
)
def test_there_is_no_other_storage(x, convert):
    reason = (
        "a masked tensor is stored as strided data or in one of its sparse layouts only. Fill it first, x.to_tensor(0)"
    )
    with pytest.raises(MaskedSemanticsError, match=re.escape(reason)):
        convert(x)
    convert(x.to_tensor(0))


def test_torch_makes_no_sparse_tensor_of_a_masked_one(x):
    reason = "it makes a torch.sparse tensor, in which unspecified elements are zero. Call x.to_sparse(), or"
    with pytest.raises(MaskedSemanticsError, match=re.escape(reason)):
        torch.ops.aten._to_sparse(x)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_operators_on_sparse_tensors_take_no_masked_ones(x):
    why = r"it works on a torch\.sparse tensor.* Make the first operand a masked tensor"
    with pytest.raises(MaskedSemanticsError, match=why):
        torch.sparse.sampled_addmm(torch.eye(2).to_sparse_csr(), x, x.mT)


def test_a_step_of_batch_norm_may_leave_its_statistics_unwritten(x):
    """torch does so for an empty batch."""
    call = torch.ops.aten._batch_norm_impl_index
    with pytest.raises(MaskedSemanticsError, match=r"_batch_norm_impl_index is refused.*unwritten.*native_batch_norm"):
        call(x[:0], None, None, torch.zeros(3), torch.ones(3), False, 0.1, 1e-5, False)
    assert torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[1].shape == (3,)


def test_what_is_refused_is_so_in_the_coverage_table_with_its_reason():
    def entry(name):
        return str(coverage.entry_from(coverage.calls_of(database()[name])))

    assert entry("resize_") == ("resize_: refused (aten.resize_.default: it exposes memory of unknown validity)")
    assert entry("to_sparse") == (
        "to_sparse: refused (aten._to_sparse.default, aten._to_sparse.sparse_dim: it makes a torch.sparse tensor, "
        "in which unspecified elements are zero)"
    )


def test_a_refusal_of_ones_own():
    with torch.library._scoped_library("masked_tests", "FRAGMENT") as library:
        library.define("launder(Tensor x) -> Tensor")
        library.impl("launder", lambda x: x.clone(), "CompositeExplicitAutograd")
        op = torch.ops.masked_tests.launder.default
        with registry.overlay():
            refused(op, reason="it forgets where things came from", instead="Use x.clone()")
            assert coverage.state_of(op) == "refused"
            with pytest.raises(
                MaskedSemanticsError,
                match=r"^masked_tests::launder is refused on masked tensors: it forgets where things came from. Use x",
            ):
                op(as_masked_tensor(X, MASK))
            assert op(X).equal(X)
