"""What callers get for input that cannot be right: the exception, its text, and nothing changed by the failed call."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from op_registry import registry
from op_registry.authoring import elementwise, masked_rule
from op_registry.laws.categories import REDUCTION
from op_registry.records.dense import Dense

T, F = True, False
DATA = torch.arange(6.0).view(2, 3)
MASK = torch.tensor([[T, T, F], [T, F, T]])


@pytest.mark.parametrize("make", [md.masked_tensor, md.as_masked_tensor])
@pytest.mark.parametrize(
    ("data", "mask", "error", "text"),
    [
        pytest.param(
            DATA,
            torch.ones(3, 2, dtype=torch.bool),
            ValueError,
            "the mask has shape (3, 2), which does not broadcast to the data's shape (2, 3)",
            id="shape",
        ),
        pytest.param(
            DATA,
            torch.ones(1, 2, 3, dtype=torch.bool),
            ValueError,
            "the mask has shape (1, 2, 3), which does not broadcast to the data's shape (2, 3)",
            id="too many dimensions",
        ),
        pytest.param(
            DATA,
            torch.ones(2, 3),
            TypeError,
            "the mask has dtype torch.float32; it has to be bool (True = valid), or integers 0 and 1",
            id="dtype",
        ),
        pytest.param(
            DATA,
            torch.tensor([0, 1, 2]),
            ValueError,
            "the mask has dtype torch.int64 and values between 0 and 2; integers in a mask have to be 0 (invalid) or 1",
            id="integers",
        ),
        pytest.param(
            DATA,
            torch.ones(2, 3, dtype=torch.bool, device="meta"),
            RuntimeError,
            "data is on cpu and the mask on meta; move one of them: mask.to('cpu')",
            id="device",
        ),
        pytest.param(
            DATA,
            torch.ones(2, 3, requires_grad=True),
            ValueError,
            "the mask (shape (2, 3)) requires grad; a mask has no gradient, pass mask.detach()",
            id="mask requires grad",
        ),
        pytest.param(
            DATA.to_mkldnn(),
            None,
            md.MaskedSemanticsError,
            "data of layout torch._mkldnn and shape (2, 3) cannot be masked; pass data.to_dense()",
            id="other storage",
        ),
        pytest.param(
            DATA,
            MASK.to_sparse(),
            TypeError,
            "the mask has layout torch.sparse_coo; pass mask.to_dense()",
            id="sparse mask",
        ),
        pytest.param(
            DATA,
            md.masked_tensor(MASK, MASK),
            TypeError,
            "the mask is itself a masked tensor of shape (2, 3)",
            id="masked mask",
        ),
    ],
)
def test_a_mask_that_does_not_fit(
    make: Callable[..., Any], data: Tensor, mask: Tensor, error: type[Exception], text: str
) -> None:
    before = data.clone() if data.layout is torch.strided else None
    with pytest.raises(error) as caught:
        make(data, mask)
    assert text in str(caught.value)
    assert before is None or torch.equal(data, before)


@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")
def test_quantized_data() -> None:
    data = torch.quantize_per_tensor(DATA, 0.1, 0, torch.quint8)
    with pytest.raises(md.MaskedSemanticsError, match=r"quantized data \(torch.quint8, shape .* cannot be masked"):
        md.masked_tensor(data, MASK)


def test_a_bool_byte_of_255_is_true_once() -> None:
    mask = torch.tensor([255, 0, 1], dtype=torch.uint8).view(torch.bool)
    x = md.as_masked_tensor(torch.ones(3), mask)
    assert x.get_mask().tolist() == [T, F, T]
    assert x.count().item() == 2
    assert x.sum().item() == 2.0


def test_integers_zero_and_one_are_a_mask() -> None:
    for dtype in (torch.int8, torch.uint8, torch.int64):
        assert md.masked_tensor(DATA, MASK.to(dtype)).get_mask().tolist() == MASK.tolist()


def test_masked_tensor_is_made_by_functions() -> None:
    with pytest.raises(TypeError, match=r"masked_dispatch.masked_tensor\(data, mask\) copies into a new leaf"):
        md.MaskedTensor(DATA, MASK)


def test_integers_cannot_require_grad() -> None:
    text = "Only Tensors of floating point and complex dtype can require gradients"
    with pytest.raises(RuntimeError, match=text):
        torch.tensor([1], requires_grad=True)
    with pytest.raises(RuntimeError, match=rf"{text}; the data is torch.int64"):
        md.masked_tensor(torch.tensor([1]), requires_grad=True)


def test_from_nan_needs_dtypes_with_nan() -> None:
    with pytest.raises(TypeError, match=r"from_nan needs floating point or complex data, .*; got torch.int64"):
        md.from_nan(torch.tensor([1]))


@pytest.mark.parametrize(
    ("lengths", "error", "text"),
    [
        ([1.0, 2.0], TypeError, "lengths have to be integers, one for each row; got torch.float32"),
        ([1, 2, 3], ValueError, r"lengths of shape (3,) do not fit data of shape (2, 3)"),
        ([1, 4], ValueError, "lengths run from 1 to 4, but dimension 1 has 3 positions"),
        ([-1, 2], ValueError, "lengths run from -1 to 2, but dimension 1 has 3 positions"),
    ],
)
def test_lengths_that_do_not_fit(lengths: list[Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        md.from_lengths(DATA, torch.tensor(lengths))
    assert text in str(caught.value)


# -------------------------------------------------------------------------------- reading what is not there

X = md.masked_tensor(DATA, MASK)
NOTHING = md.masked_tensor(torch.tensor([1.0, 2.0]), torch.tensor([F, F]))


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda: NOTHING.sum().item(), id="item"),
        pytest.param(lambda: float(NOTHING.sum()), id="float"),
        pytest.param(lambda: int(NOTHING.sum()), id="int"),
        pytest.param(lambda: bool(NOTHING.any()), id="bool"),
        pytest.param(lambda: 1 if NOTHING[0] > 0 else 2, id="if"),
        pytest.param(lambda: X.tolist(), id="tolist"),
        pytest.param(lambda: X.numpy(), id="numpy"),
        pytest.param(lambda: __import__("numpy").asarray(X), id="asarray"),
    ],
)
def test_reading_something_invalid_raises(read: Callable[[], Any]) -> None:
    with pytest.raises(md.InvalidValueError) as caught:
        read()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, md.MaskedSemanticsError)
    assert "invalid" in str(caught.value)
    assert "to_tensor(" in str(caught.value)


def test_reading_what_is_there() -> None:
    assert X.sum().item() == 9.0
    assert float(X[0, 1]) == 1.0
    assert bool(X.any()) is True
    assert X[:, 0].tolist() == [0.0, 3.0]
    assert X[:, 0].numpy().tolist() == [0.0, 3.0]


# ------------------------------------------------------------------------------ surface that would crash or lie


def test_there_is_no_address() -> None:
    with pytest.raises(md.MaskedSemanticsError, match=r"a masked tensor of shape \(2, 3\) has no single address"):
        X.data_ptr()


def test_dlpack_cannot_carry_a_mask() -> None:
    with pytest.raises(md.InvalidValueError, match="DLPack of a masked tensor"):
        torch.from_dlpack(X)
    with pytest.raises(md.InvalidValueError, match=r"to_dlpack\(\) of a masked tensor"):
        torch.utils.dlpack.to_dlpack(X)


@pytest.mark.parametrize(
    "value, said",
    [
        (torch.zeros(2, 3), r"y is a Tensor \(\(2, 3\), torch\.float32\)"),
        (md.masked_tensor(torch.zeros(3)), r"y is a MaskedTensor \(\(3,\)"),
        (md.masked_tensor(torch.zeros(2, 3, dtype=torch.int64)), r"torch\.int64\)"),
        (md.masked_tensor(torch.zeros(2, 3)).to_sparse(), "y is a SparseMaskedTensor"),
    ],
)
def test_data_that_it_cannot_stand_for_cannot_be_assigned(value: torch.Tensor, said: str) -> None:
    x = md.masked_tensor(DATA, MASK)
    with pytest.raises(md.MaskedSemanticsError, match=rf"x\.data = y takes .* \(\(2, 3\).*{said}.* Use x\.copy_\(y\)"):
        x.data = value
    assert x.data.get_mask().tolist() == MASK.tolist()
    assert x.sum().item() == 9.0


def test_shared_memory_works() -> None:
    x = md.masked_tensor(DATA, MASK)
    assert not x.is_shared()
    assert x.share_memory_() is x
    assert x.is_shared()
    assert x.sum().item() == 9.0
    assert pickle.loads(pickle.dumps(x)).get_mask().tolist() == MASK.tolist()


# ------------------------------------------------------------------------------------------- the rule book


@torch.library.custom_op("badinput::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operator_without_a_rule_says_how_to_give_it_one() -> None:
    with pytest.raises(md.MaskedSemanticsError) as caught:
        torch.ops.badinput.twice(X)
    text = str(caught.value)
    assert "badinput.twice.default has no masked meaning" in text
    assert "argument 0 of shape (2, 3) and dtype torch.float32" in text
    assert "likely category: elementwise" in text
    assert "op_registry.authoring.elementwise(torch.ops.badinput.twice)" in text
    assert "x.to_tensor(value)" in text


def test_a_gradient_formula_called_by_hand_names_the_way_that_differentiates_what_is_masked() -> None:
    instead = r"tanh_backward.* has no masked meaning(.|\n)*torch\.autograd\.grad differentiates the masked operator"
    with pytest.raises(md.MaskedSemanticsError, match=instead):
        torch.ops.aten.tanh_backward(X, X)


def test_a_users_operator_becomes_masked_in_one_line_and_only_inside_the_overlay() -> None:
    version = registry.version
    with registry.overlay():
        elementwise(torch.ops.badinput.twice)
        assert torch.ops.badinput.twice(X).sum().item() == 18.0
        assert registry.version != version
    assert registry.version == version
    with pytest.raises(md.MaskedSemanticsError, match="no masked meaning"):
        torch.ops.badinput.twice(X)
    assert torch.ops.badinput.twice(DATA).tolist() == (DATA * 2).tolist()


def test_a_second_rule_is_refused_with_the_place_of_the_first() -> None:
    with pytest.raises(ValueError, match=r"already has a rule, elementwise at .*pointwise.py:[0-9]+; the second"):
        elementwise(torch.ops.aten.exp)


def test_replacing_what_has_no_rule_is_refused() -> None:
    wrong = r"^badinput\.twice\.default has no rule to replace; register one with masked_rule"
    with registry.overlay() as mine, pytest.raises(LookupError, match=wrong):
        mine.replace(torch.ops.badinput.twice.default, lambda x: x)


def test_an_overlay_gives_a_local_meaning() -> None:
    with registry.overlay() as mine:
        mine.replace(torch.ops.aten.exp.default, lambda x: x.like(x.data + 100))
        assert X.exp()[0, 0].item() == 100.0
    assert X.exp()[0, 0].item() == 1.0


def test_a_rule_that_returns_a_validity_of_a_wrong_shape_is_told() -> None:
    with registry.overlay() as mine:
        mine.replace(torch.ops.aten.amax.default, lambda x, dim=(), keepdim=False: Dense(x.data.sum(0), x.validity))
        with pytest.raises(
            ValueError,
            match=r"^a result of shape \(3,\) cannot have a mask of shape \(2, 3\), which does not broadcast to it\s+"
            r"in the rule of aten\.amax\.default: <lambda>, reduction, at .*test_bad_input\.py:\d+$",
        ):
            X.amax(0)


def test_an_unregistered_category_run_needs_an_operator_that_takes_a_tensor() -> None:
    with pytest.raises(ValueError, match="has no functional overload that takes a tensor"):
        elementwise(torch.ops.aten.arange)


def test_a_failed_inplace_call_changes_nothing() -> None:
    x = md.masked_tensor(DATA, MASK)
    with pytest.raises(RuntimeError):
        x.add_(torch.zeros(5))
    with pytest.raises(md.MaskedSemanticsError):
        torch.geqrf(x[:, :2])
    assert x.get_mask().tolist() == MASK.tolist()
    assert x.to_tensor(-1).tolist() == [[0, 1, -1], [3, -1, 5]]


def test_masked_rule_serves_the_operator_it_names() -> None:
    with registry.overlay():

        @masked_rule(torch.ops.badinput.twice, category=REDUCTION)
        def twice_rule(x: Dense) -> Dense:
            return x.like(x.data * 3)

        assert torch.ops.badinput.twice(X)[0, 1].item() == 3.0


@pytest.mark.parametrize("mask", [[], [[]]])
def test_an_empty_list_is_an_empty_mask(mask: list[object]) -> None:
    x = md.masked_tensor(torch.zeros(1, 0) if mask else torch.zeros(0), mask)
    assert x.get_mask().numel() == 0
