"""densify("warn"): as "auto", with a warning for each line and operator; and what else goes by the policy."""

from __future__ import annotations

import pickle
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch.policies import Policy, densifying
from storages import some

LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.jagged]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def stored_densely(x: Tensor) -> Any:
    """An operator that has no sparse form."""
    return torch.linalg.qr(x)


@every_layout
def test_a_warning_names_operator_storage_shape_bytes_and_what_to_do(layout: torch.layout, warned: Any) -> None:
    x = some(layout).without_extent()
    with md.densify("warn"):
        stored_densely(x)
    (found,) = warned
    assert found.category is md.DensificationWarning
    assert found.filename == __file__
    pattern = (
        rf"^torch\.linalg\.qr stores shape \(2, 3\) as {re.escape(str(layout))} with \d stored densely, 30 "
        r"bytes: it works on a whole slice at once, .*\. Keep it sparse by an operator or a storage that has a sparse "
        r"form for it \(masked_dispatch\.explain names the reason\), store it densely yourself by x\.to_dense\(\), or "
        r"leave it to masked_dispatch\.densify\('auto'\)\.$"
    )
    assert re.search(pattern, str(found.message))


def test_once_for_each_line_and_operator_in_a_block(warned: Any) -> None:
    x = some()
    with md.densify("warn"):
        for _ in range(3):
            torch.linalg.qr(x)
        torch.linalg.qr(x)
        torch.linalg.qr(x), torch.svd(x)
    assert len(warned) == 4
    assert len({found.lineno for found in warned}) == 3
    with md.densify("warn"):
        stored_densely(x)
    assert len(warned) == 5


def test_only_inside_the_block_and_only_what_is_stored_densely(warned: Any) -> None:
    x = some()
    stored_densely(x)
    with md.densify("warn"):
        x.exp().sum(1)
        with md.densify("auto"):
            stored_densely(x)
    assert warned == []


def test_it_may_be_an_error() -> None:
    with md.densify("warn"), warnings.catch_warnings():
        warnings.simplefilter("error", md.DensificationWarning)
        with pytest.raises(md.DensificationWarning, match=r"torch\.linalg\.qr"):
            stored_densely(some())


def test_the_limit_holds(warned: Any) -> None:
    with md.densify("warn", limit=10), pytest.raises(md.MaskedSemanticsError, match=r"densify\('warn', limit=10\)"):
        stored_densely(some())
    assert warned == []


class DenselyInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        stored_densely(some())
        return grad


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("where", [lambda work: work(), in_thread], ids=["here", "in another thread"])
def test_backward_warns_where_its_forward_would(where: Callable[[Callable[[], object]], object], warned: Any) -> None:
    with md.densify("warn"):
        y = DenselyInBackward.apply(torch.ones(2, requires_grad=True))
    assert warned == []
    where(y.sum().backward)
    assert ["linalg.qr" in str(found.message) for found in warned] == [True]
    assert warned[0].filename == __file__


def test_a_policy_is_a_value() -> None:
    with md.densify("warn"):
        policy = densifying()
    assert policy == Policy("warn") == pickle.loads(pickle.dumps(policy))
    assert repr(policy) == "Policy(when='warn', limit=1073741824)"
    assert hash(policy) == hash(Policy("warn"))


# ---------------------------------------------------------------------------------------------- what goes by the policy


def permuted() -> Any:
    """A packed batch whose dense dimension is shown first, so that it has no form with sparse dimensions first."""
    return md.from_lengths(torch.arange(24.0).reshape(2, 3, 4), torch.tensor([3, 1])).to_packed().permute(2, 0, 1)


FOR_EVERY_ELEMENT: dict[str, Callable[[Any], object]] = {
    "get_data": lambda x: x.get_data(),
    "get_mask": lambda x: x.get_mask(),
}


@pytest.mark.parametrize("name", FOR_EVERY_ELEMENT)
@every_layout
def test_every_element_of_sparse_storage_is_given_if_the_policy_allows(name: str, layout: torch.layout) -> None:
    x = some(layout)
    message = rf"^{name} has no sparse form for this call: it gives a plain tensor of every element, stored or not\. "
    with md.densify("never"):
        with pytest.raises(md.MaskedSemanticsError, match=message):
            FOR_EVERY_ELEMENT[name](x)
        FOR_EVERY_ELEMENT[name](x.to_dense())
    with md.densify("auto", limit=29), pytest.raises(md.MaskedSemanticsError, match="limit=29"):
        FOR_EVERY_ELEMENT[name](x)
    with md.densify("warn"), pytest.warns(md.DensificationWarning, match=rf"^{name} stores shape \(2, 3\) as "):
        FOR_EVERY_ELEMENT[name](x)


IN_ANOTHER_ORDER: dict[str, Callable[[Any], Any]] = {
    "compressed": lambda x: x.compressed(),
    "sparse_topk": lambda x: md.sparse_topk(x, 1, 0),
    "sparse_where": lambda x: md.sparse_where(x, x > 3),
}


@pytest.mark.parametrize("name", IN_ANOTHER_ORDER)
def test_records_in_another_order_are_stored_densely_if_the_policy_allows(name: str) -> None:
    call, x = IN_ANOTHER_ORDER[name], permuted()
    assert x.storage_layout is torch.jagged
    assert x._order is not None
    dense = call(x.to_dense())
    md.testing.assert_close(call(x), dense)
    with md.densify("warn"), pytest.warns(md.DensificationWarning, match=rf"^{name} stores shape \(4, 2, 3\) as "):
        call(x)
    with md.densify("never"), pytest.raises(md.MaskedSemanticsError, match=rf"^{name} has no sparse form for this "):
        call(x)


ADVICE = (
    r"it is a product of matrices, a @ b, torch\.sparse\.sampled_addmm\(x, a, b, beta=0\) computes it at the elements "
    r"of x alone\.$"
)


@every_layout
def test_a_dense_product_that_is_only_read_where_the_other_stores_is_named(layout: torch.layout, warned: Any) -> None:
    x = md.masked_tensor(torch.ones(8, 10), torch.eye(8, 10).bool()).to_layout(
        layout, blocksize=(1, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    )
    a, b = torch.ones(8, 3, requires_grad=True), torch.ones(3, 10, requires_grad=True)
    with md.densify("warn"):
        for _ in range(2):
            (a @ b - x).square().mean().backward()
        torch.nn.functional.mse_loss(a @ b, x)
        torch.nn.functional.mse_loss(torch.sparse.sampled_addmm(x, a, b, beta=0), x).backward()
        x * torch.ones(10), x @ torch.ones(10, 8), x + 1
    assert [found.filename for found in warned] == [__file__] * 2
    (first, second) = (str(found.message) for found in warned)
    pattern = (
        r"^torch\.sub reads a dense operand of shape \(8, 10\), 320 bytes, only where the other one, of shape "
        rf"\(8, 10\) as {re.escape(str(layout))} with \d+ stored, has elements\. If "
    )
    assert re.search(pattern + ADVICE, first)
    assert second.startswith("torch.nn.functional.mse_loss reads a dense operand of shape (8, 10)")
