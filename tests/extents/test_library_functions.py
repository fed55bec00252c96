"""Functions of this library, and of torch's Python, on padded batches: each sample by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F

import comparison
import masked_dispatch as md
from masked_dispatch import interop, missing
from masked_dispatch.interop import DOORS

LENGTHS = (4, 2, 3)
PLACES = {
    "behind": ((0, 1, 2, 3), (0, 1), (0, 1, 2)),
    "in front": ((0, 1, 2, 3), (2, 3), (1, 2, 3)),
    "around": ((0, 1, 2, 3), (1, 2), (1, 2, 3)),
    "between": ((0, 1, 2, 3), (0, 3), (0, 2, 3)),
}
STORED = {
    "dense": lambda x: x,
    "packed": lambda x: x.to_packed(),
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_layout(torch.sparse_csr, sparse_dim=2),
}
Function = Callable[..., Any]


def of_each(
    module: ModuleType, names: Sequence[str], *calls: Function, prefix: str = ""
) -> dict[str, tuple[Function, ...]]:
    """Calls of each of a module's functions, made of functions of the function and the batch."""
    return {prefix + n: tuple(functools.partial(call, getattr(module, n)) for call in calls) for n in names}


# Of the batch (B, T, 2), and of a sample (1, n, 2).
EACH: dict[str, tuple[Function, ...]] = {
    **of_each(
        md,
        ["mean", "nanmean", "var", "std", "var_mean", "std_mean", "amax", "amin", "aminmax"],
        lambda f, x: f(x, 1),
        lambda f, x: f(x, 1, skipna=False),
        lambda f, x: f(x, 2, skipna=False),
    ),
    **of_each(
        md,
        ["max", "min", "median", "nanmedian", "mode"],  # (an index counts in the batch)
        lambda f, x: f(x, 1).values,
        lambda f, x: f(x, 1, skipna=False).values,
        lambda f, x: f(x, 2, skipna=False),
    ),
    **of_each(
        md,
        ["sum", "nansum", "prod", "logsumexp"],
        lambda f, x: f(x, 1),
        lambda f, x: f(x, 1, skipna=False),
        lambda f, x: f(x, 1, min_count=0),
        lambda f, x: f(x, 1, min_count=3),
        lambda f, x: f(x, 2, min_count=0),
        lambda f, x: f(x, 2, skipna=False),
    ),
    **of_each(
        md,
        ["any", "all"],
        lambda f, x: f(x > 1, 1),
        lambda f, x: f(x > 1, 2, min_count=0),
        lambda f, x: f(x > 1, 1, skipna=False),
    ),
    **of_each(
        md,
        ["cumsum", "cumprod", "logcumsumexp"],
        lambda f, x: f(x, 1),
        lambda f, x: f(x, 1, skipna=False),
        lambda f, x: f(x, 2, skipna=False),
    ),
    **of_each(md, ["cummax", "cummin"], lambda f, x: f(x, 1).values, lambda f, x: f(x, 1, skipna=False).values),
    "argmax": (lambda x: md.argmax(x, 2), lambda x: md.argmax(x, 2, skipna=False)),
    "argmin": (lambda x: md.argmin(x, 2), lambda x: md.argmin(x, 2, skipna=False)),
    "quantile": (lambda x: md.quantile(x, 0.3, 1), lambda x: md.quantile(x, 0.3, 1, skipna=False)),
    "nanquantile": (lambda x: md.nanquantile(x, 0.3, 1), lambda x: md.nanquantile(x, 0.3, 1, min_count=2)),
    "kthvalue": (lambda x: md.kthvalue(x, 1, 1).values, lambda x: md.kthvalue(x, 2, 1, skipna=False).values),
    "vector_norm": (lambda x: md.vector_norm(x, 2, 1), lambda x: md.vector_norm(x, 2, 2, min_count=0)),
    "average": (
        lambda x: md.average(x, dim=1),
        lambda x: md.average(x, x.square(), 1),
        lambda x: md.average(x, torch.tensor([1.0, 3.0]), 2),
    ),
    "accumulate": (lambda x: md.accumulate(x, x.sin()),),
    "align": (lambda x: md.align(of_batch(x), 1),),
    "first": (lambda x: md.first(of_batch(x), 1), lambda x: md.first(of_batch(x), 1, 2)),
    "last": (lambda x: md.last(of_batch(x), 1), lambda x: md.last(of_batch(x), 1, 2)),
    "positions": (lambda x: md.positions(of_batch(x), 1),),
    "as_masked_tensor": (lambda x: md.as_masked_tensor(x), lambda x: md.as_masked_tensor(x, torch.tensor([1, 0]))),
    "masked_tensor": (lambda x: md.masked_tensor(x), lambda x: md.masked_tensor(x, torch.tensor([True, False]))),
    "mask_like": (lambda x: md.mask_like(x, x > 1), lambda x: md.mask_like(torch.ones(x.shape), x)),
    "pad_stack": (lambda x: md.pad_stack(list(x)),),
    "sparse_relu": (lambda x: md.sparse_relu(x - 2),),
    "sparse_threshold": (lambda x: md.sparse_threshold(x, 2),),
    "sparse_where": (lambda x: md.sparse_where(x, x > 2),),
    "sparse_topk": (lambda x: md.sparse_topk(x, 1, 2),),
    "missing.bfill": (lambda x: missing.bfill(x, 1), lambda x: missing.bfill(x, 1, 1)),
    "missing.ffill": (lambda x: missing.ffill(x, 1), lambda x: missing.ffill(x, 1, 1), lambda x: missing.ffill(x, 2)),
    "missing.dropna": (lambda x: missing.dropna(x, 1),),
    "missing.dropna of samples": (lambda x: missing.dropna(x, 0, "all"),),
    "missing.fillna": (
        lambda x: missing.fillna(x, 9.0) if known(x) else md.as_masked_tensor(missing.fillna(x, 9.0)),
        lambda x: missing.fillna(x, md.masked_tensor(torch.ones(2), torch.tensor([1, 0]))),
        lambda x: missing.fillna(x, x.sin()),
    ),
    "missing.interpolate": (lambda x: missing.interpolate(x, 1),),
    "missing.nan_to_invalid": (lambda x: missing.nan_to_invalid((x - 3).sqrt()),),
    "missing.shift": (lambda x: missing.shift(x, 1, 1), lambda x: missing.shift(x, -2, 1)),
    "missing.rolling": tuple(
        lambda x, word=word, options=options: getattr(missing.rolling(x, dim=1, **options), word)()
        for word in ("count", "sum", "mean", "var", "std", "min", "max")
        for options in ({"window": 2}, {"window": 3, "center": True, "min_count": 1}, {"window": 2, "min_count": 0})
    ),
    "missing.groupby": (
        *(
            lambda x, word=word: getattr(missing.groupby(x, [0, 1, 0, 1, 2][: x.shape[1]], 1, num_groups=3), word)()
            for word in ("count", "sum", "mean", "std", "var", "min", "max", "median", "first", "last", "rank")
        ),
    ),
    "missing.groupby of features": (lambda x: missing.groupby(x, [0, 0], 2).mean(),),
    "functional.vmap": (lambda x: md.functional.vmap(lambda row: row.sin() + row.mean(0))(x),),
    "functional.grad": (lambda x: md.functional.grad(lambda t: t.square().mean(1).sum())(x),),
    "functional.grad_and_value": (lambda x: md.functional.grad_and_value(lambda t: t.sin().sum())(x)[0],),
    "functional.vjp": (lambda x: md.functional.vjp(lambda t: t.sin(), x)[1](torch.ones(x.shape))[0],),
    "functional.jvp": (lambda x: md.functional.jvp(lambda t: t.sin(), (x,), (torch.ones(x.shape),))[1],),
}
# Of the batch and another with the same extent, and of all their elements as one sample (1, n, 2) each.
WHOLE: dict[str, tuple[Function, ...]] = {
    "metrics.accuracy": (
        lambda x, y: md.metrics.accuracy(x.round(), y.round()),
        lambda x, y: md.metrics.accuracy(x, (y > 2).long()[..., 0]),
    ),
    "metrics.auroc": (
        lambda x, y: md.metrics.auroc(x, (y > 2).long()),
        lambda x, y: md.metrics.auroc(x, (y > 2).long()[..., 0]),
    ),
    "metrics.mae": (md.metrics.mae,),
    "metrics.mse": (md.metrics.mse,),
    "metrics.perplexity": (lambda x, y: md.metrics.perplexity(x, (y > 2).long()[..., 0]),),
    "metrics.r2": (md.metrics.r2,),
    "metrics.valid_pairs": (
        lambda x, y: md.metrics.valid_pairs(x, y),
        lambda x, y: md.metrics.valid_pairs(x, y[..., 0]),
    ),
    **of_each(
        md.metrics,
        ["confusion_matrix", "f1", "precision", "recall"],
        lambda f, x, y: f((x > 2).long(), (y > 2).long()),
        prefix="metrics.",
    ),
}
# Where samples lie in batches that a function refuses; all others have to be right.
REFUSED = {"missing.dropna": PLACES, "missing.groupby": ("in front", "around", "between")}
# Functions that take no padded batch, or whose results are no tensors.
OTHERS = {
    *("Audit", "BatchEndWarning", "DensificationWarning", "EmptiedSampleWarning"),
    *("InvalidValueError", "MaskDroppedWarning"),
    *("MaskedSemanticsError", "MaskedTensor", "Trace", "missing.GroupBy", "missing.Rolling"),
    *("audit", "densify", "explain", "export", "is_masked_tensor", "patches", "trace", "updates", "windows"),
    *("from_lengths", "from_nan", "pad_sequence", "padded"),  # they make one
    *("functional.hessian", "functional.jacfwd", "functional.jacrev"),  # tests/functional/test_functional_extents.py
}


def known(x: Tensor) -> bool:
    return isinstance(x, md.MaskedTensor) and x.extent is not None


def of_batch(x: Tensor) -> Tensor:
    return x if known(x) else md.padded(x, torch.ones(x.shape, dtype=torch.bool), dim=1)


def public() -> Iterator[str]:
    for module, prefix in ((md, ""), (missing, "missing."), (md.metrics, "metrics."), (md.functional, "functional.")):
        for name in module.__all__:
            if not isinstance(getattr(module, name), ModuleType) and callable(getattr(module, name)):
                yield prefix + name


def test_every_function_is_in_a_table() -> None:
    assert set(public()) - {name.partition(" of ")[0] for name in EACH} - set(WHOLE) - OTHERS == set()


def samples(holes: bool, seed: int = 0) -> list[md.MaskedTensor]:
    generator = torch.Generator().manual_seed(seed)
    data = [torch.rand(n, 2, generator=generator, dtype=torch.float64) * 4 for n in LENGTHS]
    masks = [torch.rand(n, 2, generator=generator) > (0.35 if holes else -1) for n in LENGTHS]
    return [md.masked_tensor(d, m) for d, m in zip(data, masks, strict=True)]


def batch(of: list[md.MaskedTensor], side: str, form: str) -> md.MaskedTensor:
    data, mask = torch.full((3, 5, 2), torch.nan, dtype=torch.float64), torch.zeros(3, 5, 2, dtype=torch.bool)
    there = torch.zeros(3, 5, 1, dtype=torch.bool)
    for b, (sample, places) in enumerate(zip(of, PLACES[side], strict=True)):
        data[b, list(places)], mask[b, list(places)] = sample.get_data(), sample.get_mask()
        there[b, list(places)] = True
    x = md.masked_tensor(data, mask)
    return md.padded(x, dim=1) if form == "mask" else md.padded(x, there, dim=1)


def rows(result: Any, i: int) -> list[tuple[Tensor, Tensor]]:
    """Values and mask of what is there of sample i, of each of a function's results."""
    results = result if isinstance(result, (tuple, list)) else [result]
    found = []
    for y in results:
        if not isinstance(y, md.MaskedTensor):
            found.append((y[i].flatten(), torch.ones(y[i].numel(), dtype=torch.bool)))
            continue
        y = y.to_dense()
        there = torch.ones_like(y.get_mask()) if y.extent is None else y.extent
        found.append((y.to_tensor(0)[i][there[i]], y.get_mask()[i][there[i]]))
    return found


@pytest.mark.parametrize("side", PLACES)
@pytest.mark.parametrize("name", EACH)
def test_a_batch_has_what_its_samples_have(name: str, side: str) -> None:
    for form in ("mask", "own", "own, with holes"):
        of = samples(holes="holes" in form)
        padded = batch(of, side, form)
        for f in EACH[name]:
            alone = [f(sample[None]) for sample in of]
            for storage in STORED if form != "own" and side in ("behind", "in front") else ["dense"]:
                with md.densify("always"):
                    if side in REFUSED.get(name, ()):
                        with pytest.raises(md.MaskedSemanticsError):
                            f(STORED[storage](padded))
                        continue
                    result = f(STORED[storage](padded))
                for b in range(len(of)):
                    for (values, valid), (right, there) in zip(rows(result, b), rows(alone[b], 0), strict=True):
                        assert valid.tolist() == there.tolist(), (form, storage)
                        torch.testing.assert_close(values, right, equal_nan=True, check_dtype=False)


@pytest.mark.parametrize("side", PLACES)
@pytest.mark.parametrize("name", WHOLE)
def test_a_measure_of_a_batch_is_that_of_all_its_elements(name: str, side: str) -> None:
    for form, storage in (("mask", "dense"), ("mask", "packed"), ("own, with holes", "dense"), ("own", "coo")):
        pairs = [samples(holes="holes" in form), samples(holes=False, seed=1)]
        x, y = (STORED[storage](batch(of, side, form)) for of in pairs)
        for f in WHOLE[name]:
            with md.densify("always"):
                found, right = f(x, y), f(*(torch.cat(of)[None] for of in pairs))
            for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, right)), strict=True):
                md.testing.assert_close(a, b)


@pytest.mark.parametrize("name", WHOLE)
def test_a_measure_of_samples_at_different_places_is_refused(name: str) -> None:
    x, y = batch(samples(holes=False), "behind", "own"), batch(samples(holes=False, seed=1), "in front", "own")
    for f in WHOLE[name]:
        with pytest.raises(md.MaskedSemanticsError, match="different places"):
            f(x, y)


# ---------------------------------------------------------------------------------------------------------------- doors

# Out: what says which positions are there, from the batch (B, T, 2) or its first feature.
SAYING: dict[str, Function] = {
    "to_attention_mask": lambda x: interop.from_attention_mask(x.to_tensor(9), interop.to_attention_mask(x)),
    "to_key_padding_mask": lambda x: interop.from_key_padding_mask(x.to_tensor(9), interop.to_key_padding_mask(x)),
    "to_lengths": lambda x: md.from_lengths(x.to_tensor(9), interop.to_lengths(x)),
    "to_nested_tensor": lambda x: interop.from_nested_tensor(interop.to_nested_tensor(x), 5),
    "to_packed_sequence": lambda x: interop.from_packed_sequence(interop.to_packed_sequence(x, True), True, 5),
    "to_batch_encoding": lambda x: interop.from_attention_mask(
        x.to_tensor(9), interop.to_batch_encoding({"x": x}, {"x": 9})["attention_mask"]
    ),
}
# Masks of attention say which keys are valid, and nothing of positions.
OF_ATTENTION = {"to_block_mask", "to_key_block_mask"}
IN_FRONT = {"to_attention_mask", "to_key_padding_mask", "to_batch_encoding"}


@pytest.mark.parametrize("name", sorted(name for name in DOORS if name.startswith("to_")))
def test_doors_say_which_positions_are_there_or_refuse(name: str) -> None:
    pytest.importorskip(DOORS[name][1])
    x = batch(samples(holes=False), "behind", "own")
    if name in SAYING:
        comparison.same_extents(SAYING[name](x), x)
        if name in IN_FRONT:
            left = batch(samples(holes=False), "in front", "own")
            comparison.same_extents(SAYING[name](left), left)
    elif name not in OF_ATTENTION:
        given: Any = {"x": x} if name == "to_tensordict" else x[..., 0] if name == "to_scipy_sparse" else x
        with pytest.raises(md.MaskedSemanticsError, match=r"positions are there.*ass x\.without_extent\(\)"):
            getattr(interop, name)(given)


@pytest.mark.parametrize("name", ["to_lengths", "to_nested_tensor", "to_packed_sequence"])
def test_lengths_do_not_leave_out_what_is_missing(name: str) -> None:
    there = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    x = md.padded(md.masked_tensor(torch.ones(2, 3), torch.tensor([[1, 1, 0], [1, 1, 0]])), there)
    with pytest.raises(ValueError, match=r"1 elements of a batch of .* are missing where its samples have positions"):
        getattr(interop, name)(x)


# ------------------------------------------------------------------------------ functions that torch writes in Python


STEPS = torch.tensor([4, 2, 0, 3])
STORAGES_OF_STEPS = {"dense": lambda x: x, "packed": lambda x: x.to_packed(), "coo": lambda x: x.to_sparse()}
# Two operands of steps (…, 3): real numbers, and numbers between 0 and 1. One number, or one for each step.
FUNCTIONS: dict[str, Callable[[Any, Any], Tensor]] = {
    "gaussian_nll_loss": lambda x, p: F.gaussian_nll_loss(x, x.sin(), p),
    "gaussian_nll_loss, each": lambda x, p: F.gaussian_nll_loss(x, x.sin(), p, reduction="none"),
    "poisson_nll_loss": lambda x, p: F.poisson_nll_loss(x, p, full=True),
    "multilabel_soft_margin_loss": lambda x, p: F.multilabel_soft_margin_loss(flat(x), flat(p)),
    "cosine_embedding_loss": lambda x, p: F.cosine_embedding_loss(flat(x), flat(p), flat(p)[:, 0].sign()),
    "triplet_margin_loss": lambda x, p: F.triplet_margin_loss(flat(x), flat(p), flat(p * 2)),
    "triplet_margin_with_distance_loss": lambda x, p: F.triplet_margin_with_distance_loss(x, p, p * 2),
    "margin_ranking_loss": lambda x, p: F.margin_ranking_loss(x, p, p.sign()),
    "hinge_embedding_loss": lambda x, p: F.hinge_embedding_loss(x, p.sign()),
    "kl_div, batchmean": lambda x, p: F.kl_div(flat(x).log_softmax(-1), flat(p), reduction="batchmean"),
    "cosine_similarity": lambda x, p: F.cosine_similarity(x, p, -1),
    "normalize": lambda x, p: F.normalize(x, dim=-1) * p,
    "gumbel, none drawn": lambda x, p: distributions.Gumbel(x, p).entropy(),
    "log_prob of Normal": lambda x, p: distributions.Normal(x, p).log_prob(p),
    "log_prob of Categorical": lambda x, p: distributions.Categorical(logits=x).entropy(),
    "KL of Bernoulli": lambda x, p: distributions.kl_divergence(
        distributions.Bernoulli(logits=x), distributions.Bernoulli(p)
    ),
    "log_prob of LogNormal": lambda x, p: distributions.LogNormal(x, p).log_prob(p),
    "masked mean": lambda x, p: torch.masked.mean(x * p, -1),
    "masked deviation": lambda x, p: torch.masked.std(x * p, -1),
}


def flat(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # of kl_div
@pytest.mark.parametrize("storage", STORAGES_OF_STEPS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_padded_batch_is_its_steps(name: str, storage: str) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(4, 4, 3, dtype=torch.float64, generator=generator)
    there, padded = torch.arange(4) < STEPS[:, None], [numbers, numbers.sigmoid().flip(0, 1)]
    steps = [t[there].requires_grad_() for t in padded]
    batches = [md.from_lengths(t.masked_fill(~there[..., None], 0.5), STEPS) for t in padded]
    given = [STORAGES_OF_STEPS[storage](x).requires_grad_() for x in batches]
    found, expected = FUNCTIONS[name](*given), FUNCTIONS[name](*steps)
    each = found.compressed() if found.ndim else found.to_tensor(torch.nan)
    torch.testing.assert_close(each.flatten(), expected.flatten(), rtol=1e-12, atol=1e-12)
    found.sum().backward()
    expected.sum().backward()
    for x, step in zip(given, steps, strict=True):
        assert (x.grad is None) == (step.grad is None)
        if x.grad is not None:
            torch.testing.assert_close(x.grad.compressed(), step.grad.flatten(), rtol=1e-12, atol=1e-12)


def test_adaptive_softmax_of_a_padded_batch() -> None:
    torch.manual_seed(0)
    layer = nn.AdaptiveLogSoftmaxWithLoss(3, 8, [3], div_value=1.0).double()
    x = md.from_lengths(torch.randn(4, 4, 3, dtype=torch.float64), STEPS)
    classes = md.from_lengths(torch.arange(16).view(4, 4) % 8, STEPS)
    output, loss = layer(flat(x), classes.flatten())
    expected, mean = layer(x.compressed().view(-1, 3), classes.compressed())
    torch.testing.assert_close(output.compressed(), expected)
    torch.testing.assert_close(loss.to_tensor(0), mean)
