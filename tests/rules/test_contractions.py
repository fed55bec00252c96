"""Contractions and attention on bare records, against sums written out over the tuples whose factors are all valid.

Every check compares values, masks and gradients, and repeats the call with other garbage under the mask: nothing may
change, bit for bit.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bare_records import apply, seen
from called_operators import Calls
from op_registry.authoring import Dense

aten = torch.ops.aten
GARBAGE = (math.nan, math.inf, 1e38, 0.0)
KINDS = ("none", "full", "last", "empty")


def random_factor(shape, kind, seed, dtype=torch.float64):
    """Values and a mask: none, one for each element, one for each row, or nothing valid."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    values = values.to(dtype) if dtype.is_floating_point else (values * 4).to(dtype)
    if kind == "none":
        return values, None
    if kind == "empty":
        return values, torch.zeros(shape, dtype=torch.bool)
    mask_shape = (*shape[:-1], 1) if kind == "last" else shape
    return values, torch.rand(mask_shape, generator=generator) < 0.5


def everywhere(values, mask):
    return torch.ones(values.shape, dtype=torch.bool) if mask is None else mask.expand(values.shape)


def record(values, mask, garbage, requires_grad=False):
    """The record of `values` with garbage under the mask, and the leaf that gradients are asked of."""
    if mask is None:
        data = values.clone()
    elif values.dtype.is_floating_point:
        data = torch.where(mask, values, torch.full_like(values, garbage))
    else:
        data = torch.where(mask, values, torch.iinfo(values.dtype).min if garbage else 1)
    data = data.detach().requires_grad_(requires_grad and data.is_floating_point())
    return Dense(data, None if mask is None else mask.to(torch.int8))


def gradients(result, records):
    """Of a fixed weighting of the valid elements: what reaches each factor's valid elements."""
    _, values = seen(result)
    weights = torch.linspace(0.5, 2, values.numel(), dtype=torch.float64).reshape(values.shape)
    loss = (weights * values * values).sum()
    if not loss.requires_grad:
        return [torch.zeros_like(r.data) for r in records]
    found = torch.autograd.grad(loss, [r.data for r in records], allow_unused=True)
    return [torch.zeros_like(r.data) if g is None else r.like(g).filled(0) for g, r in zip(found, records, strict=True)]


def check(call, expected, factors):
    """`call(*records)` is `expected(*zero filled leaves, *masks)` whatever lies under the masks."""
    masks = [everywhere(v, m) for v, m in factors]
    leaves = [torch.where(m, v, torch.zeros_like(v)) for (v, _), m in zip(factors, masks, strict=True)]
    differentiable = all(v.is_floating_point() for v in leaves)
    leaves = [v.requires_grad_(differentiable) for v in leaves]
    want, want_mask = expected(*leaves, *masks)
    wanted = (
        gradients(Dense(want, want_mask), [Dense(v, m) for v, m in zip(leaves, masks, strict=True)])
        if differentiable
        else []
    )
    first = None
    for garbage in GARBAGE:
        records = [record(v, m, garbage, differentiable) for v, m in factors]
        result = call(*records)
        mask, values = seen(result)
        assert torch.equal(mask, want_mask)
        torch.testing.assert_close(values, torch.where(want_mask, want, torch.zeros_like(want)).to(values.dtype))
        found = gradients(result, records) if differentiable else []
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)
        again = [values.detach(), *found]
        first = first or again
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def by_einsum(equation):
    """The contraction of zero-filled factors, valid where a tuple of valid factors exists."""

    def expected(*leaves_and_masks):
        n = len(leaves_and_masks) // 2
        leaves, masks = leaves_and_masks[:n], leaves_and_masks[n:]
        return torch.einsum(equation, *leaves), torch.einsum(equation, *[m.to(torch.int64) for m in masks]) > 0

    return expected


PRODUCTS = [
    (aten.mm.default, "ik,kj->ij", (3, 4), (4, 5)),
    (aten.bmm.default, "bik,bkj->bij", (2, 3, 4), (2, 4, 5)),
    (aten.mv.default, "ik,k->i", (3, 4), (4,)),
    (aten.dot.default, "k,k->", (4,), (4,)),
    (aten.vdot.default, "k,k->", (4,), (4,)),
    (aten.matmul.default, "bik,kj->bij", (2, 3, 4), (4, 5)),
    (aten.matmul.default, "ik,bkj->bij", (3, 4), (2, 4, 5)),
    (aten.matmul.default, "bik,k->bi", (2, 3, 4), (4,)),
    (aten.matmul.default, "k,bkj->bj", (4,), (2, 4, 5)),
    (aten.matmul.default, "abik,bkj->abij", (2, 3, 3, 4), (3, 4, 2)),
    (aten.linalg_matmul.default, "k,k->", (4,), (4,)),
    (aten.linear.default, "bik,jk->bij", (2, 3, 4), (5, 4)),
    (aten.linear.default, "k,jk->j", (4,), (5, 4)),
    (aten.linear.default, "ik,k->i", (3, 4), (4,)),
]


# The law for every kind of mask is asked by conformance (P2); here each form of product meets one masked factor on
# either side, and two.
MASKED_FACTORS = (("full", "none"), ("none", "full"), ("full", "full"))


@pytest.mark.parametrize("kinds", MASKED_FACTORS, ids="-".join)
@pytest.mark.parametrize("op,equation,a,b", PRODUCTS, ids=lambda p: str(p) if not isinstance(p, tuple) else "x")
def test_products(op, equation, a, b, kinds):
    factors = [random_factor(a, kinds[0], 1), random_factor(b, kinds[1], 2)]
    check(lambda x, y: apply(op, x, y), by_einsum(equation), factors)


@pytest.mark.parametrize("kinds", [("last", "last"), ("empty", "full"), ("full", "empty")], ids="-".join)
def test_a_product_of_rows_and_of_nothing(kinds):
    factors = [random_factor((3, 4), kinds[0], 1), random_factor((4, 5), kinds[1], 2)]
    check(lambda x, y: apply(aten.mm.default, x, y), by_einsum("ik,kj->ij"), factors)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float32, torch.bfloat16])
def test_products_of_other_dtypes(dtype):
    factors = [random_factor((3, 4), "full", 1, dtype), random_factor((4, 5), "full", 2, dtype)]
    for garbage in GARBAGE:
        mask, values = seen(apply(aten.mm.default, *[record(*f, garbage) for f in factors]))
        filled = [torch.where(m, v, torch.zeros_like(v)) for v, m in factors]
        assert torch.equal(values, filled[0] @ filled[1])
        assert torch.equal(mask, (factors[0][1].int() @ factors[1][1].int()) > 0)


SUMS = [
    (aten.addmm.default, "ik,kj->ij", (5,), (3, 4), (4, 5)),
    (aten.addmv.default, "ik,k->i", (3,), (3, 4), (4,)),
    (aten.addbmm.default, "bik,bkj->ij", (3, 1), (2, 3, 4), (2, 4, 5)),
    (aten.baddbmm.default, "bik,bkj->bij", (2, 1, 5), (2, 3, 4), (2, 4, 5)),
    (aten.addr.default, "i,j->ij", (3, 5), (3,), (5,)),
]


@pytest.mark.parametrize("beta", [1, 0.5, 0])
@pytest.mark.parametrize("op,equation,s,a,b", SUMS, ids=lambda p: str(p) if not isinstance(p, tuple) else "x")
def test_products_and_a_sum(op, equation, s, a, b, beta):
    def expected(own, x, y, own_mask, x_mask, y_mask):
        product, mask = by_einsum(equation)(x, y, x_mask, y_mask)
        return (2 * product, mask) if beta == 0 else (beta * own + 2 * product, mask & own_mask)

    for kinds in itertools.product(("full", "none"), ("full", "last"), ("none", "full")):
        factors = [random_factor(shape, kind, n) for n, (shape, kind) in enumerate(zip((s, a, b), kinds, strict=True))]
        check(lambda *r: apply(op, *r, beta=beta, alpha=2), expected, factors)


def test_a_bias_is_elementwise_and_never_revives():
    def expected(x, w, b, x_mask, w_mask, b_mask):
        product, mask = by_einsum("ik,jk->ij")(x, w, x_mask, w_mask)
        return product + b, mask & b_mask

    for kinds in itertools.product(KINDS, ("none", "full"), ("none", "full")):
        factors = [
            random_factor(s, k, 3 + n) for n, (s, k) in enumerate(zip(((3, 4), (5, 4), (5,)), kinds, strict=True))
        ]
        check(lambda *r: apply(aten.linear.default, *r), expected, factors)


def test_trilinear_is_valid_where_three_factors_meet():
    factors = [random_factor(s, "full", n) for n, s in enumerate(((3, 4), (6, 4, 5), (3, 5)))]

    def call(a, w, b):
        return apply(aten._trilinear.default, a, w, b, [1, 3], [0], [1, 2], [2, 3])

    check(call, by_einsum("ni,oij,nj->no"), factors)


def test_a_contraction_of_size_zero_is_zero_and_valid():
    x = Dense(torch.randn(3, 0), torch.zeros(3, 0, dtype=torch.int8))
    result = apply(aten.mm.default, x, Dense(torch.randn(0, 2)))
    assert result.validity is None
    assert torch.equal(result.data, torch.zeros(3, 2))


def test_a_mask_by_token_stays_one():
    mask = (torch.rand(2, 3, 1) < 0.5).to(torch.int8)
    x = Dense(torch.randn(2, 3, 4), mask)
    assert apply(aten.linear.default, x, Dense(torch.randn(5, 4)), Dense(torch.randn(5))).validity is mask
    assert apply(aten.matmul.default, x, Dense(torch.randn(4, 5))).validity is mask


def test_linear_is_one_product_whose_mask_costs_none():
    x = Dense(torch.randn(6, 4), (torch.rand(6, 4) < 0.5).to(torch.int8))
    with Calls() as calls:
        apply(aten.linear.default, x, Dense(torch.randn(5, 4)), Dense(torch.randn(5)))
    names = [op._schema.name.removeprefix("aten::") for op in calls.seen]
    assert [n for n in names if "mm" in n] == ["addmm"]


# ------------------------------------------------------------------------------------------------------- convolution


def test_a_convolution_by_hand():
    x = Dense(
        torch.tensor([[[1.0, math.nan, 3.0, math.nan, math.nan, 6.0]]]),
        torch.tensor([[[1, 0, 1, 0, 0, 1]]], dtype=torch.int8),
    )
    weight = Dense(torch.tensor([[[1.0, 10.0]]]))
    result = apply(aten.conv1d.default, x, weight, Dense(torch.tensor([0.5])))
    mask, values = seen(result)
    assert mask.tolist() == [[[True, True, True, False, True]]]
    assert values.tolist() == [[[1.5, 30.5, 3.5, 0.0, 60.5]]]


def test_the_holes_of_a_strided_transpose_are_torchs_own():
    x = Dense(torch.tensor([[[2.0, math.nan]]]), torch.tensor([[[1, 0]]], dtype=torch.int8))
    mask, values = seen(apply(aten.conv_transpose1d.default, x, Dense(torch.ones(1, 1, 1)), None, [3]))
    assert mask.tolist() == [[[True, True, True, False]]]
    assert values.tolist() == [[[2.0, 0.0, 0.0, 0.0]]]


def test_a_window_of_padding_alone_is_torchs_own():
    x = Dense(torch.tensor([[[math.nan, 1.0]]]), torch.tensor([[[0, 1]]], dtype=torch.int8))
    mask, _ = seen(apply(aten.conv1d.default, x, Dense(torch.ones(1, 1, 2)), None, [1], [2]))
    assert mask.tolist() == [[[True, False, True, True, True]]]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_padding_by_name_is_no_element():
    x = Dense(torch.tensor([[[math.nan, 1.0, 2.0]]]), torch.tensor([[[0, 1, 1]]], dtype=torch.int8))
    for op in (aten.conv1d.padding, aten._convolution_mode.default):
        mask, values = seen(apply(op, x, Dense(torch.ones(1, 1, 2)), None, [1], "same", [1], 1))
        assert mask.tolist() == [[[True, True, True]]]
        assert values.tolist() == [[[1.0, 3.0, 2.0]]]


GEOMETRIES = [
    (aten.conv1d.default, (2, 4, 7), (8, 2, 3), ([2], [1], [1], 2)),
    (aten.conv1d.default, (4, 7), (8, 1, 3), ([1], [3], [2], 4)),
    (aten.conv2d.default, (2, 4, 5, 6), (6, 4, 3, 2), ([1, 2], [1, 0], [1, 1], 1)),
    (aten.conv2d.padding, (2, 4, 5, 6), (6, 2, 3, 3), ([1, 1], "same", [2, 2], 2)),
    (aten.conv3d.default, (1, 2, 3, 4, 3), (4, 2, 2, 2, 2), ([1, 1, 1], [1, 1, 1], [1, 1, 1], 1)),
    (aten.conv_transpose1d.default, (2, 4, 5), (4, 3, 2), ([3], [1], [1], 2, [1])),
    (aten.conv_transpose2d.input, (2, 4, 3, 4), (4, 2, 3, 3), ([2, 2], [1, 1], [0, 1], 1, [2, 1])),
    (aten.convolution.default, (2, 4, 7), (4, 6, 3), ([2], [0], [1], True, [1], 1)),
]
SMALL_MASKS = ("none", "position", "channel", "sample")


def image_mask(shape, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    if kind in ("none", "empty"):
        return None if kind == "none" else torch.zeros(shape, dtype=torch.bool)
    small = {
        "full": shape,
        "position": (shape[0], 1, *shape[2:]),
        "channel": (1, shape[1], *[1] * (len(shape) - 2)),
        "sample": (shape[0], *[1] * (len(shape) - 1)),
    }[kind]
    return torch.rand(small, generator=generator) < 0.4


# Each geometry under a full mask, and under one of the masks that broadcast; nothing valid once.
CONVOLVED = [
    *[(*geometry, "full") for geometry in GEOMETRIES],
    *[(*geometry, kind) for geometry, kind in zip(GEOMETRIES, itertools.cycle(SMALL_MASKS), strict=False)],
    (*GEOMETRIES[2], "empty"),
]


@pytest.mark.parametrize(
    "op,x_shape,w_shape,geometry,kind", CONVOLVED, ids=lambda p: str(p) if not isinstance(p, tuple) else "x"
)
def test_convolutions(op, x_shape, w_shape, geometry, kind):
    def convolve(x, w):
        return op(x, w, None, *geometry)

    def expected(x, w, x_mask, w_mask):
        taps = convolve(x_mask.to(torch.float64), w_mask.to(torch.float64))
        there = convolve(torch.ones_like(x), torch.ones_like(w))
        return convolve(x, w), (taps > 0.5) | (there < 0.5)

    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=generator, dtype=torch.float64) for s in (x_shape, w_shape))
    for weight_kind in ("none", "full", "channel"):
        factors = [(x, image_mask(x_shape, kind, 1)), (w, image_mask(w_shape, weight_kind, 2))]
        check(lambda a, b: apply(op, a, b, None, *geometry), expected, factors)


def test_the_mask_of_a_convolution_stays_as_small_as_its_input_has_it():
    weight = Dense(torch.randn(8, 4, 3))
    by_position = Dense(torch.randn(2, 4, 7), torch.ones(2, 1, 7, dtype=torch.int8))
    assert apply(aten.conv1d.default, by_position, weight, Dense(torch.randn(8))).validity.shape == (2, 1, 5)
    full = Dense(torch.randn(2, 4, 7), torch.ones(2, 4, 7, dtype=torch.int8))
    assert apply(aten.conv1d.default, full, weight).validity.shape == (2, 1, 5)


def test_a_convolutions_bias_is_elementwise():
    x = Dense(torch.randn(2, 4, 5), (torch.rand(2, 4, 5) < 0.5).to(torch.int8))
    bias = Dense(torch.tensor([1.0, math.nan, 3.0]), torch.tensor([1, 0, 1], dtype=torch.int8))
    weight = Dense(torch.randn(3, 4, 2))
    mask, values = seen(apply(aten.conv1d.default, x, weight, bias))
    alone, plain = seen(apply(aten.conv1d.default, x, weight))
    assert torch.equal(mask, alone & torch.tensor([True, False, True])[:, None])
    torch.testing.assert_close(values[:, 2], torch.where(mask, plain + 3, 0)[:, 2])


# --------------------------------------------------------------------------------------------------------- attention


def attention_by_hand(q, k, v, q_mask, k_mask, v_mask, allowed, bias):
    """One query, one key, one feature at a time; `allowed` and `bias` say what attn_mask and causality leave."""
    out = torch.zeros(q.shape[0], v.shape[1], dtype=q.dtype)
    mask = torch.zeros(out.shape, dtype=torch.bool)
    for i in range(q.shape[0]):
        if not q_mask[i].any():
            continue
        if not allowed[i].any():
            mask[i] = True
            continue
        shared = [q_mask[i] & k_mask[s] for s in range(k.shape[0])]
        keys = [s for s in range(k.shape[0]) if allowed[i, s] and shared[s].any()]
        if not keys:
            continue
        scores = torch.stack([(q[i] * k[s])[shared[s]].sum() / math.sqrt(q.shape[1]) + bias[i, s] for s in keys])
        p = scores.softmax(0)
        for f in range(v.shape[1]):
            terms = [p[n] * v[s, f] for n, s in enumerate(keys) if v_mask[s, f]]
            if terms:
                mask[i, f], out[i, f] = True, sum(terms)
    return out, mask


# What restricts the keys, and the masks of queries, keys and values: any two of these meet in one case.
ATTENDED = [
    ("none", "none", "last", "full"), ("none", "last", "full", "none"), ("none", "full", "none", "last"),
    ("causal", "none", "full", "last"), ("causal", "last", "none", "full"), ("causal", "full", "last", "none"),
    ("bool", "none", "none", "none"), ("bool", "last", "last", "last"), ("bool", "full", "full", "full"),
    ("float", "none", "full", "full"), ("float", "last", "none", "none"), ("float", "full", "last", "last"),
    ("row", "none", "last", "none"), ("row", "last", "full", "last"), ("row", "full", "none", "full"),
    ("row", "full", "full", "full"),
]  # fmt: skip


@pytest.mark.parametrize("restriction,query,key,value", ATTENDED)
def test_attention(restriction, query, key, value):
    kinds = query, key, value
    length, source, width, features = 3, 4, 3, 2
    generator = torch.Generator().manual_seed(4)
    shapes = ((2, length, width), (2, source, width), (2, source, features))
    factors = [
        (torch.randn(s, generator=generator, dtype=torch.float64), random_factor(s, kind, 7 + n)[1])
        for n, (s, kind) in enumerate(zip(shapes, kinds, strict=True))
    ]
    allowed = torch.ones(length, source, dtype=torch.bool)
    bias = torch.zeros(length, source, dtype=torch.float64)
    given = None
    if restriction == "causal":
        allowed = allowed.tril()
    elif restriction != "none":
        allowed = torch.rand(length, source, generator=generator) < 0.6
        allowed[0], allowed[1] = True, allowed[1] if restriction != "row" else False
        given = allowed
        if restriction == "float":
            bias = torch.randn(length, source, generator=generator, dtype=torch.float64)
            given = torch.where(allowed, bias, -math.inf)
    options = {"is_causal": True} if restriction == "causal" else {}

    def call(q, k, v):
        return apply(
            aten.scaled_dot_product_attention.default, q, k, v, None if given is None else Dense(given), **options
        )

    def expected(*leaves_and_masks):
        pieces = [attention_by_hand(*[t[b] for t in leaves_and_masks], allowed, bias) for b in range(2)]
        return torch.stack([p[0] for p in pieces]), torch.stack([p[1] for p in pieces])

    check(call, expected, factors)


def test_an_attn_mask_may_be_masked_itself():
    q, k, v = (torch.randn(3, 2), torch.randn(4, 2), torch.randn(4, 2))
    for given in (torch.ones(3, 4, dtype=torch.bool), torch.zeros(3, 4)):
        known = torch.rand(3, 4) < 0.6
        known[0] = False
        garbage = torch.where(known, given, False if given.dtype is torch.bool else math.nan)
        result = apply(
            aten.scaled_dot_product_attention.default,
            Dense(q),
            Dense(k),
            Dense(v),
            Dense(garbage, known.to(torch.int8)),
        )
        mask, values = seen(result)
        assert mask.any(-1).tolist() == known.any(-1).tolist()
        torch.testing.assert_close(values[1:], F.scaled_dot_product_attention(q, k, v, known)[1:])


def test_grouped_queries_share_keys():
    q, k, v = torch.randn(2, 4, 3, 2), torch.randn(2, 2, 5, 2), torch.randn(2, 2, 5, 2)
    mask = torch.rand(2, 2, 5, 1) < 0.6
    record_of_k, record_of_v = (Dense(torch.where(mask, t, math.nan), mask.to(torch.int8)) for t in (k, v))
    grouped = apply(aten.scaled_dot_product_attention.default, Dense(q), record_of_k, record_of_v, enable_gqa=True)

    def repeated(r):
        return Dense(r.data.repeat_interleave(2, 1), r.validity.repeat_interleave(2, 1))

    whole = apply(aten.scaled_dot_product_attention.default, Dense(q), repeated(record_of_k), repeated(record_of_v))
    for mine, theirs in zip(seen(grouped), seen(whole), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_mask_by_token_reaches_the_kernel_as_one_by_key():
    mask = (torch.rand(2, 1, 5, 1) < 0.5).to(torch.int8)
    x = Dense(torch.randn(2, 3, 5, 4), mask)
    seen_masks: list[Tensor] = []

    class Kernel(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "flash_attention" in func._schema.name:
                seen_masks.append(kwargs["attn_mask"])
            return func(*args, **(kwargs or {}))

    with Kernel():
        result = apply(aten.scaled_dot_product_attention.default, x, x, x)
    assert [m.shape for m in seen_masks] == [(2, 1, 1, 5)]
    assert result.validity.shape == (2, 1, 5, 1)


def test_attention_math_gives_weights_over_valid_keys():
    q, k, v = torch.randn(3, 2), torch.randn(4, 2), torch.randn(4, 2)
    known = torch.tensor([True, False, True, False])[:, None]
    keys = Dense(torch.where(known, k, math.nan), known.to(torch.int8))
    output, weights = apply(aten._scaled_dot_product_attention_math.default, Dense(q), keys, Dense(v))
    mask, values = seen(weights)
    assert torch.equal(mask, known.T.expand(3, 4))
    kept = known[:, 0]
    torch.testing.assert_close(values[:, kept], (q @ k[kept].T / math.sqrt(2)).softmax(-1))
    torch.testing.assert_close(seen(output)[1], values[:, kept] @ v[kept])


@pytest.mark.parametrize(("rows", "size"), [(2, [2, 1, 3, 4]), (3, [2, 1, 3, 2, 4])])
def test_affine_grid_is_theta_times_base_points(rows, size):
    """As the product is written out: of a row of theta, what is valid takes part."""
    theta, mask = random_factor((2, rows, rows + 1), "full", 5)
    mask[1, 0] = False
    steps = [torch.linspace(-1, 1, n, dtype=torch.float64) for n in size[2:]]
    points = torch.stack([*reversed(torch.meshgrid(*steps, indexing="ij")), torch.ones(size[2:])], -1)
    want = torch.einsum("...k,nrk->n...r", points, torch.where(mask, theta, 0.0))
    for garbage in GARBAGE:
        got = apply(aten.affine_grid_generator.default, Dense(torch.where(mask, theta, garbage), mask), size, True)
        valid = mask.any(-1)[(slice(None), *[None] * (rows))].expand(want.shape)
        assert torch.equal(got.valid.expand(want.shape), valid)
        torch.testing.assert_close(got.data[valid], want[valid])
