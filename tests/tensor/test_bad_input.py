"""Errors: bad input, interfaces that a masked tensor does not have."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
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


MASKS_THAT_DO_NOT_FIT: dict[str, tuple[Any, type[Exception], str]] = {
    "shape": (
        torch.ones(3, 2, dtype=torch.bool),
        ValueError,
        "the mask has shape (3, 2), which does not broadcast to the data's shape (2, 3)",
    ),
    "too many dimensions": (
        torch.ones(1, 2, 3, dtype=torch.bool),
        ValueError,
        "the mask has shape (1, 2, 3), which does not broadcast to the data's shape (2, 3)",
    ),
    "dtype": (torch.ones(2, 3), TypeError, "torch.float32; it has to be bool (True = valid), or integers 0 and 1"),
    "integers": (
        torch.tensor([0, 1, 2]),
        ValueError,
        "the mask has dtype torch.int64 and values between 0 and 2; integers in a mask have to be 0 (invalid) or 1",
    ),
    "device": (MASK.to("meta"), RuntimeError, "data is on cpu and the mask on meta; move one of them: mask.to('cpu')"),
    "mask requires grad": (
        torch.ones(2, 3, requires_grad=True),
        ValueError,
        "the mask (shape (2, 3)) requires grad; a mask has no gradient, pass mask.detach()",
    ),
    "sparse mask": (MASK.to_sparse(), TypeError, "the mask has layout torch.sparse_coo; pass mask.to_dense()"),
    "masked mask": (md.masked_tensor(MASK), TypeError, "the mask is itself a masked tensor of shape (2, 3)"),
}


@pytest.mark.parametrize("make", [md.masked_tensor, md.as_masked_tensor])
@pytest.mark.parametrize(("mask", "error", "text"), MASKS_THAT_DO_NOT_FIT.values(), ids=MASKS_THAT_DO_NOT_FIT)
def test_a_mask_that_does_not_fit(make: Callable[..., Any], mask: Tensor, error: type[Exception], text: str) -> None:
    before = DATA.clone()
    with pytest.raises(error, match=re.escape(text)):
        make(DATA, mask)
    assert torch.equal(DATA, before)


@pytest.mark.parametrize("make", [md.masked_tensor, md.as_masked_tensor])
def test_data_that_cannot_be_masked(make: Callable[..., Any]) -> None:
    text = r"data of layout torch\._mkldnn and shape \(2, 3\) cannot be masked; pass data\.to_dense\(\)"
    with pytest.raises(md.MaskedSemanticsError, match=text):
        make(DATA.to_mkldnn(), None)


@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")
def test_quantized_data() -> None:
    data = torch.quantize_per_tensor(DATA, 0.1, 0, torch.quint8)
    with pytest.raises(md.MaskedSemanticsError, match=r"quantized data \(torch.quint8, shape .* cannot be masked"):
        md.masked_tensor(data, MASK)


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
        ([1, 2, 3], ValueError, "lengths of shape (3,) do not fit data of shape (2, 3)"),
        ([1, 4], ValueError, "lengths run from 1 to 4, but dimension 1 has 3 positions"),
        ([-1, 2], ValueError, "lengths run from -1 to 2, but dimension 1 has 3 positions"),
    ],
)
def test_lengths_that_do_not_fit(lengths: list[Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        md.from_lengths(DATA, torch.tensor(lengths))


# -------------------------------------------------------------------------------- reading what is not there

X = md.masked_tensor(DATA, MASK)
NOTHING = md.masked_tensor(torch.tensor([1.0, 2.0]), torch.tensor([F, F]))


READS: dict[str, Callable[[], Any]] = {
    "item": lambda: NOTHING.sum().item(),
    "float": lambda: float(NOTHING.sum()),
    "int": lambda: int(NOTHING.sum()),
    "bool": lambda: bool(NOTHING.any()),
    "if": lambda: 1 if NOTHING[0] > 0 else 2,
    "tolist": X.tolist,
    "numpy": X.numpy,
    "asarray": lambda: np.asarray(X),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_something_invalid_raises(read: Callable[[], Any]) -> None:
    with pytest.raises(md.InvalidValueError, match=r"invalid(.|\n)*to_tensor\(") as caught:
        read()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, md.MaskedSemanticsError)


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


@torch.library.custom_op("badinput::hypotenuse", mutates_args=())
def hypotenuse(x: Tensor, y: Tensor) -> Tensor:
    return (x * x + y * y).sqrt()


def test_an_operator_of_two_tensors_without_a_rule_may_be_elementwise() -> None:
    with pytest.raises(md.MaskedSemanticsError) as caught:
        torch.ops.badinput.hypotenuse(X, X)
    assert str(caught.value).splitlines()[2:6] == [
        "  likely category: elementwise, if it computes each element from one element of each tensor; else a function "
        "of its own; to register it:",
        "    op_registry.authoring.elementwise(torch.ops.badinput.hypotenuse)  # or",
        "    @op_registry.authoring.masked_rule(torch.ops.badinput.hypotenuse, category=...)",
        "    def hypotenuse(x, y): ...",
    ]


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


# --------------------------------------------------------------------------------------------------------- interfaces


STORAGES = [torch.strided, torch.sparse_coo, torch.sparse_csr, torch.jagged]


def example(layout: torch.layout = torch.strided) -> md.MaskedTensor:
    data = torch.arange(6.0).view(2, 3)
    return md.masked_tensor(data, torch.tensor([[T, T, F], [T, F, F]])).to_layout(layout)


# ------------------------------------------------------------------------------------------------------------- memory


def pointer_as_safetensors_reads_it(tensor: Tensor) -> int:
    """safetensors.torch.save_file looks for shared memory like this, before it writes anything."""
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:
        try:
            return tensor.storage().data_ptr()
        except NotImplementedError:
            return 0


@pytest.mark.parametrize("layout", STORAGES, ids=str)
def test_safetensors_is_told_what_to_save(layout: torch.layout) -> None:
    message = (
        r"masked tensor of shape \(2, 3\) has no memory.* safetensors, takes x.to_tensor\(fill\) and x.get_mask\(\)"
    )
    with pytest.raises(md.MaskedSemanticsError, match=message):
        pointer_as_safetensors_reads_it(example(layout))
    with pytest.raises(md.MaskedSemanticsError, match=r"has no memory of its own: it is data and a mask"):
        example(layout).storage()


@pytest.mark.parametrize("layout", STORAGES, ids=str)
@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("apply_", lambda x: x.apply_(lambda v: v + 1)),
        ("map_", lambda x: x.map_(x, lambda v, w: v + w)),
        ("map2_", lambda x: x.map2_(x, x, lambda u, v, w: u)),
    ],
)
def test_python_functions_of_every_element(layout: torch.layout, method: str, call: Callable[[Any], Any]) -> None:
    x = example(layout)
    before = x.to_tensor(0)
    write = re.escape(f"as_masked_tensor(x.to_tensor(fill).{method}(...), x.get_mask())")
    with pytest.raises(md.MaskedSemanticsError, match=rf"x.{method}\(\) calls a Python function .*\(2, 3\).*{write}"):
        call(x)
    assert torch.equal(x.to_tensor(0), before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo], ids=str)
@pytest.mark.parametrize(
    "function",
    [lambda x: x * 2, lambda x: x.sum(), lambda x: x.relu(), lambda x: x.to_tensor(0), lambda x: x @ torch.ones(3)],
    ids=["mul", "sum", "relu", "to_tensor", "matmul"],
)
def test_jit_trace(layout: torch.layout, function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        md.MaskedSemanticsError, match=r"torch.jit.trace records.* Use torch.compile\(f\), or torch.exp"
    ):
        torch.jit.trace(function, (example(layout),))


MASK_OF_ROWS = torch.tensor([[True], [False]])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["linear", "exp", "add", "sum"])
def test_jit_trace_of_what_is_masked_inside(name: str) -> None:
    layer = torch.nn.Linear(3, 2)
    call = {"linear": layer, "exp": torch.exp, "add": lambda x: x + x, "sum": torch.sum}[name]

    def function(data: Tensor) -> Tensor:
        return call(md.as_masked_tensor(data, MASK_OF_ROWS)).get_data()

    with torch.no_grad(), pytest.raises(md.MaskedSemanticsError, match=r"torch.jit.trace records"):
        torch.jit.trace(function, (torch.ones(2, 3),))


# ---------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("layout", STORAGES, ids=str)
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: x.to_sparse_bsr((2.0, 3.0)), "a blocksize is two integers (rows, columns), not (2.0, 3.0)"),
        (lambda x: x.to_sparse_bsc(["1", 1]), "a blocksize is two integers (rows, columns), not ['1', 1]"),
        (lambda x: x.to_sparse(1.5), "an integer from 1 to 2 for shape (2, 3); got 1.5"),
        (lambda x: x.to_sparse("a"), "got 'a'. To choose a layout pass it by name: x.to_sparse(layout=torch.sparse_c"),
        (lambda x: x.to_sparse_csr(0.5), "an integer from 0 to 1 for shape (2, 3); got 0.5"),
        (lambda x: x.to_sparse(dense_dim="1"), "an integer from 0 to 1 for shape (2, 3); got '1'"),
        (lambda x: x.to_layout(torch.sparse_coo, sparse_dim=2.0), "an integer from 1 to 2 for shape (2, 3); got 2.0"),
    ],
    ids=["bsr", "bsc", "float", "string", "csr", "dense_dim", "to_layout"],
)
def test_sizes_that_are_no_integers(layout: torch.layout, call: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        call(example(layout))


@pytest.mark.parametrize("layout", STORAGES, ids=str)
@pytest.mark.parametrize("plain", [False, True], ids=["mask_with", "as_masked_tensor"])
def test_a_masked_mask(layout: torch.layout, plain: bool) -> None:
    x = example(layout)
    with pytest.raises(TypeError, match=r"the mask is itself a masked tensor of shape \(2, 3\)") as caught:
        md.as_masked_tensor(torch.zeros(2, 3), x < 2) if plain else x.mask_with(x < 2)
    assert "x.mask_with((x < 2).to_tensor(False))" in str(caught.value)
    assert x.mask_with((x < 2).to_tensor(False)).get_mask().tolist() == [[T, T, F], [F, F, F]]


@pytest.mark.parametrize("layout", STORAGES, ids=str)
def test_from_nan_of_what_is_masked(layout: torch.layout) -> None:
    x = example(layout)
    with pytest.raises(
        TypeError, match=r"of shape \(2, 3\) is masked .* write from_nan\(x.to_tensor\(float\('nan'\)\)\)"
    ):
        md.from_nan(x)
    assert torch.equal(md.from_nan(x.to_tensor(float("nan"))).get_mask(), x.get_mask())


def test_masked_lengths() -> None:
    lengths = md.masked_tensor(torch.tensor([2, 9]), torch.tensor([T, F]))
    with pytest.raises(TypeError, match=r"lengths is a masked tensor of shape \(2,\).*lengths.to_tensor\(0\)"):
        md.from_lengths(torch.zeros(2, 3), lengths)


# -------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("sizes", [(2**62,), (2**40, 2**22)], ids=str)
@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_results_with_more_elements_than_int64(sizes: tuple[int, ...], join: Callable[[list[Tensor]], Tensor]) -> None:
    indices = torch.ones(len(sizes), 1, dtype=torch.int64)
    x = md.as_masked_tensor(torch.sparse_coo_tensor(indices, torch.ones(1), sizes, check_invariants=True))
    with pytest.raises(ValueError, match="9,223,372,036,854,775,808 elements, more than int64 can number"):
        join([x, x])
