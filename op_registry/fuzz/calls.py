"""Steps of random programs, written by hand, beside those derived from the rules.

A call is a line of Python. {0}, {1} … are its operands. Other names in braces are drawn
(:mod:`op_registry.fuzz.drawing`):

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

from dataclasses import dataclass


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
