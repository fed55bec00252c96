"""The words of pandas for missing values: pandas is the oracle, along any dimension of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

import masked_dispatch as md
from door_samples import FLOATS, INTEGERS, masked, same, shapes
from masked_dispatch import interop, missing
from words_for_missing_values import WORDS, F, T, X

N = float("nan")
DTYPES = (torch.bool, *INTEGERS, torch.float16, torch.bfloat16, *FLOATS, torch.complex64)


def small(dtypes: tuple[torch.dtype, ...] = (torch.float64,)) -> st.SearchStrategy[md.MaskedTensor]:
    return masked(dtypes, shapes(2))


def along(x: md.MaskedTensor, dim: int, by_column: Callable[[pd.DataFrame], pd.DataFrame]) -> md.MaskedTensor:
    """What pandas makes of every column, or of every row for dim=1."""
    turned = x if dim == 0 else x.t()
    found = interop.from_pandas(by_column(interop.to_pandas(turned)), dtype=x.dtype)
    return found if dim == 0 else found.t()  # type: ignore[return-value]


def close(found: Tensor, expected: Tensor) -> None:
    md.testing.assert_close(found, expected, equal_nan=True)


@given(small((torch.bool, *INTEGERS, *FLOATS)), st.sampled_from([0, 1]), st.sampled_from([None, 1, 2]))
def test_ffill_and_bfill(x: md.MaskedTensor, dim: int, limit: int | None) -> None:
    same(missing.ffill(x, dim, limit), along(x, dim, lambda frame: frame.ffill(limit=limit)))
    same(missing.bfill(x, dim - 2, limit), along(x, dim, lambda frame: frame.bfill(limit=limit)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_filled(dtype: torch.dtype) -> None:
    x = md.masked_tensor(torch.tensor([0, 1, 0, 0, 1, 0]).to(dtype), [F, T, F, T, T, F])
    same(missing.ffill(x, 0), md.masked_tensor(torch.tensor([0, 1, 1, 0, 1, 1]).to(dtype), [F, T, T, T, T, T]))
    same(missing.bfill(x, 0), md.masked_tensor(torch.tensor([1, 1, 0, 0, 1, 0]).to(dtype), [T, T, T, T, T, F]))
    if dtype.is_floating_point or dtype.is_complex:
        expected = torch.tensor([0, 1, 0.5, 0, 1, 0]).to(dtype)
        same(missing.interpolate(x, 0), md.masked_tensor(expected, [F, T, T, T, T, F]))


@given(masked((torch.float64,), st.tuples(st.integers(1, 6), st.integers(1, 2))), st.sampled_from([0, 1]))
def test_interpolate(x: md.MaskedTensor, dim: int) -> None:
    finite = x.masked_fill(~x.to_tensor(0).isfinite(), 2.5)
    expected = along(finite, dim, lambda frame: frame.astype("float64").interpolate(limit_area="inside"))
    close(missing.interpolate(finite, dim), expected)


def test_interpolate_next_to_infinity_and_nan() -> None:
    inf, nan = float("inf"), float("nan")
    x = md.masked_tensor([inf, 0.0, 1.0, 0.0, nan, 2.0], [T, F, T, F, T, T], requires_grad=True)
    y = missing.interpolate(x, 0)
    assert repr(y.to_tensor(0).tolist()) == repr([inf, inf, 1.0, nan, nan, 2.0])
    y.sum().backward()
    close(x.grad, md.masked_tensor([1.5, 0, 2, 0, 1.5, 1], x.get_mask()))


@given(small(), st.sampled_from([0, 1]), st.sampled_from(["any", "all"]))
def test_dropna(x: md.MaskedTensor, dim: int, how: str) -> None:
    expected = interop.to_pandas(x).dropna(axis=dim, how=how)
    same(missing.dropna(x, dim, how), interop.from_pandas(expected, dtype=x.dtype))  # type: ignore[arg-type]


@given(small((torch.bool, *INTEGERS, *FLOATS)), st.integers(-6, 6), st.sampled_from([0, 1]))
def test_shift(x: md.MaskedTensor, periods: int, dim: int) -> None:
    same(missing.shift(x, periods, dim - 2), along(x, dim, lambda frame: frame.shift(periods)))


@given(small((torch.bool, *INTEGERS, *FLOATS)))
def test_fillna(x: md.MaskedTensor) -> None:
    number = T if x.dtype is torch.bool else 1
    assert torch.equal(missing.fillna(x, number).isnan(), x.to_tensor(number).isnan())
    assert type(missing.fillna(x, number)) is Tensor
    other = md.masked_tensor(torch.full(tuple(x.shape), number, dtype=x.dtype), torch.arange(x.shape[1]) % 2 == 0)
    frame, others = interop.to_pandas(x), interop.to_pandas(other)
    same(missing.fillna(x, other), interop.from_pandas(frame.fillna(others), dtype=x.dtype))


def test_fillna_with_tensors() -> None:
    assert missing.fillna(X, torch.tensor([7.0, 8.0, 9.0])).tolist() == [[1, 8, 3], [4, 5, 9]]
    plain = torch.ones(2)
    assert missing.fillna(plain, 0) is plain
    row = missing.fillna(X, md.masked_tensor([7.0, 8.0, 9.0], [T, F, T]))
    same(row, md.masked_tensor([[1.0, 0, 3], [4, 5, 9]], [[T, F, T], [T, T, T]]))


@given(small(FLOATS))
def test_nan_to_invalid(x: md.MaskedTensor) -> None:
    found = missing.nan_to_invalid(x)
    assert torch.equal(found.get_mask(), x.get_mask() & ~x.to_tensor(0).isnan())
    same(found, x.mask_with(found.get_mask()))
    same(missing.nan_to_invalid(x.get_data()), md.from_nan(x.get_data()))


# ------------------------------------------------------------------------------------------------- laws of all of them


every_word = pytest.mark.parametrize("word", WORDS)


def over(hidden: float, mask: Tensor | None = None) -> md.MaskedTensor:
    """X with another payload, and with nothing valid for a mask of False."""
    mask = X.get_mask() if mask is None else mask
    return md.masked_tensor(X.to_tensor(2.0).double().masked_fill(~mask, hidden), mask, requires_grad=True)


def value_and_gradient(word: str, x: md.MaskedTensor) -> list[list[str]]:
    y = WORDS[word](x)
    weights = torch.arange(1.0, y.numel() + 1, dtype=torch.float64).reshape(y.shape)
    (y * weights).sum().backward() if not md.is_masked_tensor(y) else (y * weights).sum().to_tensor(0).backward()
    results = (y, x.grad)
    assert x.grad is not None
    return [repr(result.detach()).splitlines() for result in results]


@every_word
@pytest.mark.parametrize("nothing", [False, True])
def test_what_is_hidden_is_never_seen(word: str, nothing: bool) -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool) if nothing else None
    seen = [value_and_gradient(word, over(hidden, mask)) for hidden in (0.0, float("nan"), float("inf"), 1e300)]
    assert all(other == seen[0] for other in seen)


@every_word
@pytest.mark.parametrize("storage", ["to_sparse", "to_sparse_csr"])
def test_any_storage(word: str, storage: str) -> None:
    found = WORDS[word](getattr(X, storage)())
    md.testing.assert_close(found, WORDS[word](X), check_layout=False) if md.is_masked_tensor(found) else None
    assert md.is_masked_tensor(found) or torch.equal(found, WORDS[word](X))


@every_word
def test_gradients(word: str) -> None:
    def run(values: Tensor) -> Tensor:
        y = WORDS[word](md.as_masked_tensor(values, X.get_mask()))
        return y.to_tensor(0) if md.is_masked_tensor(y) else y  # type: ignore[attr-defined]

    values = torch.randn(2, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(run, (values,))
    assert torch.autograd.gradgradcheck(run, (values,))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: missing.interpolate(torch.arange(3), 0), TypeError, r"got torch.int64. Convert them: x.double\(\)"),
        (lambda: missing.nan_to_invalid(X.long()), TypeError, "which can be NaN; got torch.int64"),
        (lambda: missing.ffill(X, 0, limit=0), ValueError, "limit=0 fills nothing: pass at least 1"),
        (lambda: missing.ffill(X, 2), IndexError, "Dimension out of range"),
        (lambda: missing.dropna(X, how="some"), ValueError, "how='some' is neither 'any' nor 'all'"),
        (lambda: missing.shift(X, 1, 2), IndexError, "Dimension out of range"),
        (lambda: missing.shift(X, 0.5, 0), TypeError, "'float' object cannot be interpreted as an integer"),  # type: ignore[arg-type]
        (lambda: md.pad_stack([]), ValueError, "at least one tensor"),
        (lambda: md.pad_stack([X, X[0]]), ValueError, r"not of shapes \(2, 3\), \(3,\)"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_pad_stack() -> None:
    x = md.pad_stack([X, torch.ones(1, 4)], dim=-1)
    assert x.shape == (2, 4, 2)
    assert x[..., 0].get_mask().tolist() == [[T, F, T, F], [T, T, F, F]]
    assert x[..., 1].get_mask().tolist() == [[T] * 4, [F] * 4]
    assert md.pad_stack([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]


def test_pad_stack_collates_samples_as_torch_does() -> None:
    pairs = [(torch.ones(3, 2), 0, "a"), (torch.ones(1, 2), 1, "b")]
    frames, targets, names = next(iter(DataLoader(pairs, batch_size=2, collate_fn=md.pad_stack)))  # type: ignore[arg-type]
    assert frames.count((1, 2)).tolist() == [6, 2]
    assert not md.is_masked_tensor(targets)
    assert targets.tolist() == [0, 1]
    assert list(names) == ["a", "b"]
    nested = [{"x": (X[:1], np.ones(2)), "y": 0.5}, {"x": (X, np.ones(3)), "y": 1.5}]
    batch = md.pad_stack(nested)
    assert batch["x"][0].shape == (2, 2, 3)
    same(batch["x"][0][1], X)
    assert batch["x"][1].get_mask().tolist() == [[T, T, F], [T, T, T]]
    assert torch.equal(batch["y"], torch.tensor([0.5, 1.5], dtype=torch.float64))
    assert type(md.pad_stack([{"x": X}], dim=1)["x"]) is md.MaskedTensor
    assert md.pad_stack([{"x": X}], dim=1)["x"].shape == (2, 1, 3)


@pytest.mark.parametrize(
    "samples, error, text",
    [
        (
            [(X, 1), (X,)],
            ValueError,
            "pad_stack takes samples of one structure, .*: each element in list of batch should be of equal",
        ),
        (
            [(X, None)],
            TypeError,
            "pad_stack takes samples of one structure, made of tensors, arrays and numbers: .*NoneType",
        ),
        (
            [(X, 1), (None, 1)],
            TypeError,
            "pad_stack takes a list of tensors, .* and the parts of samples has None",
        ),
        ([(X, 1), (X[0], 1)], ValueError, r"same number of dimensions, not of shapes \(2, 3\), \(3,\)"),
    ],
)
def test_samples_that_pad_stack_cannot_collate(samples: list[Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        md.pad_stack(samples)


@pytest.mark.parametrize("word", ["bfill", "dropna", "ffill", "fillna", "interpolate", "nan_to_invalid", "shift"])
def test_a_series_is_refused_with_what_to_pass(word: str) -> None:
    others = {"shift": (1, 0), "dropna": (), "nan_to_invalid": ()}.get(word, (0,))
    with pytest.raises(TypeError, match=rf"{word} takes a tensor as x, not a Series: pass .*from_pandas\(x\)"):
        getattr(missing, word)(pd.Series([1.0, N]), *others)


@given(st.lists(masked((torch.int32,), shapes(2)), min_size=1, max_size=3))
def test_pad_stack_gives_its_parts_back(tensors: list[md.MaskedTensor]) -> None:
    stack = md.pad_stack(tensors)
    assert int(stack.count()) == sum(int(x.count()) for x in tensors)
    for part, x in zip(stack, tensors, strict=True):
        same(part[: x.shape[0], : x.shape[1]], x)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_weights_of_an_interpolation_have_the_digits_of_the_values(dtype: torch.dtype, default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        data = torch.tensor([1, N, N, 2, N, N, N, N, 1_700_000_000.25], dtype=torch.float64).to(dtype)
        found = missing.interpolate(md.from_nan(data), 0).to_tensor(0)
    finally:
        torch.set_default_dtype(before)
    step = (1_700_000_000.25 - 2) / 5
    exact = torch.tensor(
        [1, 4 / 3, 5 / 3, 2, *(2 + k * step for k in range(1, 5)), 1_700_000_000.25], dtype=torch.float64
    )
    torch.testing.assert_close(found, exact.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=0)
