"""The steps of random programs: lines of Python, written by hand or derived from the rules in the registry.

{0}, {1} … are the operands of a line. Other names in braces are drawn:

{d}, {e}        dimensions of the first operand
{dims}          a list of its dimensions
{i}, {j}        indices into its dimension {d}
{at}            an index expression, as between brackets
{shape}         a shape with the same number of elements
{order}         its dimensions in random order
{f}             a floating-point number
{n}             1 or 2
{flag}          True or False

If plain torch refuses a call, another one is drawn, so a call need not fit every operand.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.fuzz.programs import Step
from op_registry.registry import registry
from op_registry.schema import is_inplace, mutable_forms


@dataclass(frozen=True)
class Call:
    """A line of Python with operands of the given kinds: "f"loating, "i"nteger, "b"ool, "a"ny."""

    code: str
    kinds: str
    writes: bool = False
    random: bool = False
    plain: str | None = None


VIEWS = """
{0}[{at}] | {0}.transpose({d}, {e}) | {0}.permute({order}) | {0}.mT | {0}.unsqueeze({d}) | {0}.squeeze()
{0}.flatten() | {0}.reshape({shape}) | {0}.view({shape}) | {0}.narrow({d}, {i}, 1) | {0}.select({d}, {i})
{0}.diagonal(0, {d}, {e}) | {0}.detach() | {0}.unbind({d})[0] | {0}.split(1, {d})[-1] | {0}.chunk(2, {d})[0]
{0}.unfold({d}, 2, 1) | {0}.expand(2, *[-1] * {0}.dim()) | {0}.movedim({d}, {e}) | {0}.swapaxes({d}, {e})
{0}.view_as({0}) | {0}.real | {0}[..., ::2] | {0}.as_strided({0}.shape, {0}.stride()) | {0}.alias()
torch.tensor_split({0}, 2, {d})[1]
"""
MOVES = """
{0}.contiguous() | {0}.clone() | {0}.flip({d}) | {0}.roll(1, {d}) | {0}.repeat(2, *[1] * {0}.dim()) | {0}.tril()
{0}.triu(1) | {0}.repeat_interleave(2, {d}) | F.pad({0}, (1, 1)) | F.pad({0}, (-1, 1), value=nan) | {0}.diag_embed()
{0}.rot90(1, ({d}, {e})) | {0}.to(torch.float64) | {0}.to(torch.float16).float() | {0}.to(torch.int64) | {0}.bool()
{0}.flatten().contiguous()
"""
JOINS = """
torch.cat([{0}, {1}], {d}) | torch.stack([{0}, {1}], {d}) | torch.where({2}, {0}, {1})
torch.cat([{0}, {1}, {0}], {d}) | torch.hstack([{0}, {1}]) | torch.block_diag({0}, {1})
torch.broadcast_tensors({0}, {1})[0] | torch.cat([{0}[:1], {0}], 0)
"""
READS = """
{0}[[{i}, {j}]] | {0}[..., [0, -1]] | {0}.masked_fill({1} > 0, {f})
{0}.index_select({d}, torch.tensor([{i}, {j}, {i}])) | torch.where({0} > 0, {0}, {f})
{0}[torch.tensor([True, False]).repeat({0}.shape[0])[:{0}.shape[0]]] | {0}.take_along_dim({0}.argsort({d}), {d})
torch.take({0}, torch.tensor([0, 1])) | {0}[None, ..., -1]
"""
INDEXED = """
{0}[{1}] | {0}[:, {1}] | {0}.gather({d}, {1}) | {0}.index_select({d}, {1}.flatten()) | {0}.take({1})
F.embedding({1}, {0}) | {0}.index_add({d}, {1}.flatten()[:1], {0}.narrow({d}, 0, 1)) | {0}.scatter({d}, {1}, {f})
{0}.index_fill({d}, {1}.flatten(), {f}) | torch.where({1} > 0, {0}, 0.0) | {0}.index_put(({1},), torch.tensor({f}))
{0}.index_put(({1},), torch.tensor({f}), accumulate=True)
"""
WRITES = """
{0}[{at}] = {f} | {0}.add_({f}) | {0}.mul_({f}) | {0}.fill_({f}) | {0}.zero_() | {0}.clamp_(min=0) | {0}.exp_()
{0}.neg_() | {0}.narrow({d}, {i}, 1).zero_() | {0}.select({d}, {i}).mul_({f}) | {0}.transpose({d}, {e}).add_({f})
{0}.relu_() | {0}.index_fill_({d}, torch.tensor([{i}, {j}]), {f}) | {0}.masked_fill_({0} > 0, {f}) | {0}.cumsum_({d})
{0}.fill_diagonal_({f}) | {0}[{0} > 0] = {f} | {0}.tril_() | {0}.sub_({0}.mean()) | {0}.copy_({0}.flip({d}))
{0}.data.mul_({f}) | {0}.detach().add_({f})
"""
WRITES_OF_TWO = """
{0}[{at}] = {1} | {0}.copy_({1}) | {0}.add_({1}) | {0}.mul_({1}) | {0}.sub_({1}, alpha=2) | {0}.addcmul_({1}, {1})
{0}.lerp_({1}, 0.5) | {0}[:1] = {1}[-1:] | {0}.narrow({d}, {i}, 1).copy_({1}.narrow({d}, {j}, 1))
{0}.masked_fill_({1} > 0, {f}) | {0}.div_({1}) | {0}.index_copy_({d}, torch.tensor([{i}]), {1}.narrow({d}, {j}, 1))
{0}.index_add_({d}, torch.tensor([{i}, {i}]), {1}.narrow({d}, 0, 2)) | {0}.masked_scatter_({1} > 0, {1}.clone())
{0}.transpose({d}, {e}).copy_({1}) | torch.add({1}.expand_as({0}), {f}, out={0})
torch.mul({0}, {1}.expand_as({0}), out={0}) | torch._foreach_add_([{0}, {1}.clone()], {f})
{0}.select({d}, {i}).copy_({1}.select({d}, {j})) | {0}.sub_({1}.mean())
torch.maximum({0}, {1}.expand_as({0}), out={0}) | {0}.scatter_reduce_({d}, {1}.argsort({d}), {1}, "amax")
{0}.swapdims({d}, {e}).mul_({1}) | {0}[{1} > 0] = {f}
"""
INDEXED_WRITES = """
{0}[{1}] = {f} | {0}.scatter_({d}, {1}, {f}) | {0}.index_fill_({d}, {1}.flatten(), {f})
{0}.scatter_add_({d}, {1}, {0}.clone()) | {0}[{1}] += {f} | {0}.index_put_(({1},), torch.tensor({f}), accumulate=True)
{0}.put_({1}, {1}.to({0}.dtype))
"""
ARITHMETIC = """
{0} + {1} | {0} - {1} | {0} * {1} | {0} / {1} | {0} * {f} + {1} | {0} ** 2 | {0}.exp() | {0}.sigmoid() | {0}.tanh()
{0}.relu() | {0}.abs() | {0}.clamp(-1, 1) | torch.maximum({0}, {1}) | torch.addcmul({0}, {1}, {1})
torch.lerp({0}, {1}, {f}) | {0} > {1} | {0} == {1} | F.gelu({0}) | F.dropout({0}, 0.5, False) | {0}.nan_to_num()
{0}.isnan() | {0} != {0} | F.mse_loss({0}, {1}) | F.glu({0}, {d})
"""
REDUCTIONS = """
{0}.sum() | {0}.sum({dims}) | {0}.mean({d}, {flag}) | {0}.amax({dims}) | {0}.max({d})[0] | {0}.max({d})[1]
{0}.argmin({d}) | {0}.var({dims}) | {0}.prod({d}) | {0}.norm() | torch.linalg.vector_norm({0}, {n}, {dims})
{0}.logsumexp({dims}) | {0}.median({d})[0] | {0}.std() | {0}.quantile(0.5, {d}) | {0}.kthvalue(1, {d})[0]
{0}.nansum({d}) | {0}.mode({d})[0] | ({0} > 0).any({d}) | ({0} > 0).all({d}) | {0}.mean({d}, True) - {0}
{0}.aminmax(dim={d})[1] | torch.var_mean({0}, {d})[1] | {0}.count_nonzero({d}) | torch.trapezoid({0}, dim={d})
"""
SCANS = """
{0}.cumsum({d}) | {0}.cumprod({d}) | {0}.cummax({d})[0] | {0}.cummin({d})[1] | {0}.logcumsumexp({d})
{0}.softmax({d}) | {0}.log_softmax({d}) | {0}.sort({d})[0] | {0}.sort({d}, descending=True)[1] | {0}.topk(2, {d})[0]
{0}.argsort({d}) | F.layer_norm({0}, {0}.shape[-1:]) | F.normalize({0}, dim={d}) | F.rms_norm({0}, {0}.shape[-1:])
{0}.diff(dim={d}) | {0}.renorm(2, {d}, 1.0) | torch.gradient({0}, dim={d})[0]
F.batch_norm({0}, None, None, training=True) | F.instance_norm({0}) | F.group_norm({0}, 1) | {0}.unique()
{0}.nonzero()
"""
CONTRACTIONS = """
{0} @ {1} | {0} @ {1}.mT | {0}.mT @ {1} | F.linear({0}, {1}) | torch.einsum("...i,...i->...", {0}, {1})
{0}.flatten().dot({1}.flatten()) | torch.tensordot({0}, {1}, 1) | torch.outer({0}.flatten()[:3], {1}.flatten()[:3])
torch.bmm({0}, {1}.mT) | torch.cdist({0}, {1}) | torch.addmm({0}, {1}, {1}.mT)
F.scaled_dot_product_attention({0}, {1}, {1}) | F.cosine_similarity({0}, {1}, {d}) | torch.mv({0}, {1}[0])
F.conv1d({0}, {1}[:, :, :2], padding=1) | F.avg_pool1d({0}, 2) | F.max_pool1d({0}, 2, 1)
torch.baddbmm({0}, {0}, {0}.mT @ {0}) | F.bilinear({0}, {1}, {1}.unsqueeze(1) * {0}.unsqueeze(-1)) | torch.cov({0})
torch.cross({0}, {1}, dim={d}) | torch.kron({0}, {1})
"""
RANDOM = """
F.dropout({0}) | torch.bernoulli({0}.sigmoid()) | torch.rand_like({0}) | {0}.clone().uniform_() | torch.normal({0}, 1.0)
"""


def _calls(lines: str, kinds: str, writes: bool = False, random: bool = False) -> list[Call]:
    """The calls of one list above. A call that reads fewer operands than `kinds` has gets only those."""
    codes = [code.strip() for line in lines.strip().splitlines() for code in line.split(" | ")]
    return [Call(code, kinds[: 1 + max(n for n in range(3) if f"{{{n}}}" in code)], writes, random) for code in codes]


# Calls by kind of work, with how often each kind is drawn.
GROUPS: tuple[tuple[int, tuple[Call, ...]], ...] = tuple(
    (weight, tuple(calls))
    for weight, calls in (
        (14, _calls(VIEWS, "a")),
        (5, _calls(MOVES, "f")),
        (6, _calls(JOINS, "ffb")),
        (5, _calls(READS, "ff")),
        (7, _calls(INDEXED, "fi")),
        (9, _calls(WRITES, "f", writes=True)),
        (12, _calls(WRITES_OF_TWO, "ff", writes=True)),
        (4, _calls(INDEXED_WRITES, "fi", writes=True)),
        (10, _calls(ARITHMETIC, "ff")),
        (8, _calls(REDUCTIONS, "f")),
        (8, _calls(SCANS, "f")),
        (7, _calls(CONTRACTIONS, "ff")),
        (1, _calls(RANDOM, "f", random=True)),
    )
)
# How often calls of the registry's rules, and the subject's own calls, are drawn.
WEIGHT_OF_RULES = 22
WEIGHT_OF_OWN_CALLS = 8


# ------------------------------------- calls of the rules: from the schemas of their operators, in-place forms included

# We leave out rules of these categories: they have no result to compare, values that torch leaves open (an inverse of a
# singular matrix, say), or many operands.
LEFT_OUT = (
    "refused",
    "composite",
    "plumbing",
    "factory",
    "random",
    "derivative",
    "recurrent",
    "pooling",
    "opaque",
    "whole slices",
)
# Operators that return uninitialised memory, change the shape of their operand in place, return tensors that share
# memory without torch's knowledge (unsafe_), have a result exponential in a size (histogramdd), or (those whose names
# begin with an underscore) trust their callers to check the arguments.
UNSUITABLE = (
    "_",
    "empty",
    "resize",
    "set_",
    "as_strided",
    "squeeze_",
    "unsqueeze_",
    "t_",
    "transpose_",
    "swap",
    "detach_",
    "unsafe_",
    "histogramdd",
)

# Code for an argument of each type.
CODE_OF_TYPE = {
    "number": "{f}",
    "float": "{f}",
    "Scalar": "{f}",
    "bool": "{flag}",
    "List[int]": "{dims}",
    "Optional[List[int]]": "{dims}",
}
DIMENSIONS = ("dim", "dim0", "dim1", "dim2", "axis")


@functools.cache
def calls_of_rules() -> tuple[Call, ...]:
    """A call, or several with different arguments, for each suitable rule; ordered by name."""
    overloads = sorted((op for op in registry if _suitable(op)), key=str)
    return tuple(call for op in overloads for call in _calls_of(op))


def _suitable(op: OpOverload) -> bool:
    rule = registry.get(op)
    name = op._schema.name.partition("::")[2]
    return rule is not None and rule.category.name not in LEFT_OUT and not name.startswith(UNSUITABLE)


def _calls_of(op: OpOverload) -> Iterator[Call]:
    if not op._schema.is_mutable:
        yield from _call(op, False)
    for form in (op, *mutable_forms(op)):
        if is_inplace(form) and not form._schema.name.partition("::")[2].startswith(UNSUITABLE):
            yield from _call(form, True)


def _call(op: OpOverload, writes: bool) -> Iterator[Call]:
    positional: list[str] = []
    keywords: list[str] = []
    kinds = ""
    for argument in op._schema.arguments:
        code = _code(argument, len(kinds))
        if code is None and argument.has_default_value():
            continue
        if code is None:
            return
        if str(argument.type) == "Tensor":
            kinds += "i" if argument.name in ("index", "indices") else "f"
        elif str(argument.type) == "List[Tensor]":
            kinds += "ff"
        # After an argument that was left out, the others need their names.
        if argument.kwarg_only or len(positional) + len(keywords) < op._schema.arguments.index(argument):
            keywords.append(f"{argument.name}={code}")
        else:
            positional.append(code)
    if not kinds or len(kinds) > 3 or not op._schema.returns:
        return
    called = f"torch.ops.{op!s}({', '.join([*positional, *keywords])})"
    random = torch.Tag.nondeterministic_seeded in op.tags
    if writes:
        yield Call(called, kinds, writes=True, random=random)
    elif len(op._schema.returns) == 1:
        one_of_a_list = "[0]" if str(op._schema.returns[0].type) == "List[Tensor]" else ""
        yield Call(called + one_of_a_list, kinds, random=random)
    else:
        for number in range(len(op._schema.returns)):
            yield Call(f"{called}[{number}]", kinds, random=random)


def _code(argument: torch.Argument, operands: int) -> str | None:
    """Code for an argument; None if no value is obvious, or if the default is good enough."""
    kind = str(argument.type)
    if kind == "Tensor":
        return f"{{{operands}}}"
    if kind == "List[Tensor]":
        return f"[{{{operands}}}, {{{operands + 1}}}]"
    if kind in ("int", "Optional[int]") and argument.name in DIMENSIONS:
        return "{d}"
    if kind == "int" and not argument.has_default_value():
        return "{n}"
    if argument.has_default_value() and argument.name not in ("dim", "keepdim", "dims"):
        return None
    return CODE_OF_TYPE.get(kind)


# ---------------------------------------------------------------- random choices: operands, and the numbers in the code

NUMBERS = ("0.5", "2.0", "-1.5", "0.0", "1.0", "3")
# Index expressions, by the least number of dimensions that they need.
INDEX_EXPRESSIONS = (
    (1, "0"), (1, "-1"), (1, "1:"), (1, ":1"), (1, "::2"), (1, "..., 0"), (1, "..., 1:"), (0, "..."), (0, "None"),
    (2, ":, 0"), (2, "1:, :-1"), (2, "0, 1:"), (2, ":, None"), (2, "0, 0"), (1, "[0, -1]"), (2, ":, [1, 0]"),
    (2, "[0, 1], [1, 0]"), (3, "..., 0, :"), (3, ":, 0, ::2"), (2, "[[0], [1]], [0, 1]"), (2, "0:0"),
)  # fmt: skip


def operand(kind: str, values: Mapping[str, Tensor], like: Tensor | None, rng: random.Random) -> str | None:
    """The name of a value of the kind, or None; it prefers recent values, and values that broadcast to `like`."""
    of_the_kind = [name for name, value in values.items() if _is_of_kind(kind, value)]
    fitting = [name for name in of_the_kind if like is None or _broadcasts(values[name], like)]
    if fitting and rng.random() < 0.8:
        of_the_kind = fitting
    if not of_the_kind:
        return None
    recent = of_the_kind[-4:] if rng.random() < 0.5 else of_the_kind
    return rng.choice(recent)


def _is_of_kind(kind: str, value: Tensor) -> bool:
    if kind == "f":
        return value.is_floating_point()
    if kind == "b":
        return value.dtype.is_signed is False and value.element_size() == 1
    if kind == "i":
        return not (value.is_floating_point() or value.is_complex())
    return True


def _broadcasts(value: Tensor, to: Tensor) -> bool:
    pairs = zip(reversed(value.shape), reversed(to.shape), strict=False)
    return value.ndim <= to.ndim and all(a in (1, b) for a, b in pairs)


def filled_in(code: str, first: Tensor, rng: random.Random) -> str:
    """The code with a random choice for every name in braces."""
    dims = list(range(first.ndim))
    d = rng.choice(dims) if dims else 0
    drawn = {
        "d": str(d - rng.choice((0, first.ndim))),
        "e": str(rng.choice(dims) if dims else 0),
        "dims": str(sorted(rng.sample(dims, rng.randint(1, first.ndim)))) if dims else "[]",
        "i": str(_index(first, d, rng)),
        "j": str(_index(first, d, rng)),
        "at": rng.choice([text for least, text in INDEX_EXPRESSIONS if least <= first.ndim]),
        "shape": str(_shape(first.shape, rng)),
        "order": str(rng.sample(dims, len(dims))),
        "n": str(rng.randint(1, 2)),
        "flag": str(rng.random() < 0.5),
    }
    return re.sub(r"\{([a-z]+)\}", lambda found: rng.choice(NUMBERS) if found[1] == "f" else drawn[found[1]], code)


def _index(first: Tensor, dim: int, rng: random.Random) -> int:
    size = first.shape[dim] if first.ndim else 1
    return rng.randrange(size) if size else 0


def _shape(shape: Sequence[int], rng: random.Random) -> list[int]:
    """Another shape with the same number of elements."""
    shape = list(shape)
    choices = [[-1], [*shape, 1], [1, *shape]]
    if len(shape) >= 2:
        choices += [[-1, *shape[2:]], [*shape[:-2], -1], [shape[1], shape[0], *shape[2:]]]
    if shape and shape[-1] % 2 == 0:
        choices.append([*shape[:-1], shape[-1] // 2, 2])
    return rng.choice(choices)


# -------------------------- steps that are left out: what torch leaves open or gets wrong, and calls that take too long

# In-place operators that torch doesn't check for operands that overlap their target: whether they read new or old
# elements there depends on the kernel.
UNCHECKED = re.compile(
    "masked_scatter_|cumsum_|cumprod_|addmm_|addmv_|addbmm_|baddbmm_|addr_|renorm_|tril_|triu_|ldexp_"
)
# Code that writes to an operand and reads the others themselves, not views of them.
OF_WHOLE_OPERANDS = re.compile(r"(\{0\}\.\w+_|torch\.ops\.aten\.\w+\.\w+)\((\{0\}, )?\{1\}[^.\[]*\)$")
GREATEST_DEGREE = 10_000


def left_open(step: Step, values: Mapping[str, Tensor]) -> bool:
    """Whether a step writes to a tensor several of whose elements share memory, or may read what it overwrites.

    torch: "in-place operations on such tensors, especially ones that are vectorized, may result in incorrect behavior"
    (Tensor.unfold, torch.as_strided). torch refuses operands that overlap the target only if it can tell this by their
    strides (at::get_overlap_status), and only in some operators.
    """
    target, *others = (values[name] for name in step.operands)
    if shares_elements(target):
        return True
    if not any(_same_memory(other, target) for other in others):
        return False
    known = OF_WHOLE_OPERANDS.match(step.code) and not UNCHECKED.search(step.code)
    return not (known and all(_is_packed(t) for t in (target, *others)))


def misread(step: Step, values: Mapping[str, Tensor]) -> bool:
    """Whether torch (2.13, 2.14) reads memory outside the operand.

    Its median of an expanded dimension does, and so does the derivative of pdist without rows, which kills the process.
    """
    if "median" in step.code:
        return 0 in values[step.operands[0]].stride()
    return "pdist" in step.code and values[step.operands[0]].shape[:1] == (0,)


def endless(step: Step, values: Mapping[str, Tensor]) -> bool:
    """Whether torch takes minutes: a polynomial takes as many steps as its degree, which is the last operand."""
    if "_polynomial_" not in step.code:
        return False
    degrees = values[step.operands[-1]]
    return bool((degrees.isfinite() & (degrees.abs() > GREATEST_DEGREE)).any())


def shares_elements(tensor: Tensor) -> bool:
    """Whether several elements may share an address: a stride is smaller than the extent of the inner dimensions."""
    extent = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= extent:
            return tensor.numel() > 0
        extent += stride * (size - 1)
    return False


def _is_packed(tensor: Tensor) -> bool:
    """Whether the elements fill a range of memory without gaps or overlaps."""
    span = sum((n - 1) * s for s, n in zip(tensor.stride(), tensor.shape, strict=True)) + 1
    return not shares_elements(tensor) and span == tensor.numel()


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
