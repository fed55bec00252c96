"""Programs under P9, drawn from a seed: sources of samples, and lines that are the same for a batch and for a sample.

{0} and {1} are a line's operands, and {w:2,3} is a weight of shape (2, 3). Other names in braces are drawn:

{d}                a dimension after the batch
{r}, {before}      a dimension in which samples differ, and what an index has before it
{i}, {j}           a dimension after the batch, and the next
{dims}             one or two dimensions after the batch, but not all of them
{order}            all dimensions, those after the batch in random order
{k}                1 or 2
{a}, {b}           how much is added at each end, or cut off if it is negative
{K}, {S}, {P}      kernel, stride and padding of a window
{ceil}, {counted}  True or False
{C}, {F}, {O}      the sizes of dimension 1 and of the last dimension, and a new number of features
{F4}               {F} and 4
{ones}             a plain tensor like the first operand, of size 1 along {d}
{row}              what is made of a sample `r` without its dimension of samples
{reduce}           sum, mean or amax

If torch refuses a line for its operands' sizes, another one is drawn, so a line need not fit every operand.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_registry.fuzz import padding
from op_registry.fuzz.programs import Program, Source, Step, execute

# Letters are dimensions in which samples differ, numbers are features.
AXES: tuple[tuple[str | int, ...], ...] = (
    ("B", "T", 4), ("B", "T", 4), ("B", "S", 4), ("B", 3, "T"), ("B", 2, "H", "W"), ("B", 4), ("B", "T", 2),
    ("B", "T", 1),
)  # fmt: skip
LONGEST = 6
MOST_SAMPLES = 4
# Lengths along each axis that no sample has, each of them another.
LONGER = {"T": 13, "H": 11, "W": 17, "S": 19}
ATTEMPTS = 200
MOST_DIMS = 5
MOST_FEATURES = 16
LARGEST = 50_000  # elements of a value of longer samples
# Lines that join what may differ from sample to sample: along a dimension after the batch, or a step before others.
JOINS = re.compile(r"torch\.cat\(.*, \d\)|\*.*unbind\(1\)\]")
# Cuts that a join may not go before: one that happens to be at the join's border gives a part back, which is not what a
# cut of the sample's own positions gives; cuts at the end by a number that may be the width of a part.
FROM_THE_START = re.compile(r" (\d:|:\d|::2)|split\(2")
FROM_THE_END = re.compile(r":-\d")
LARGEST_CUT = 3
# Lines whose results may have gaps within a sample, beside joins.
MERGES = re.compile(r"flatten\(|view\(")
# Lines that are not drawn where a dimension in which samples differ has one position: which of several dimensions of
# size 1 are merged, and whether a loop of one step has stacked its state or kept it, cannot be told.
ONE = re.compile(r"idioms\.|flatten\(|view\(")


def program_of_samples(seed: int, most_steps: int) -> Program:
    """The program of a seed."""
    state = _State(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state.draw_sources()
        for _ in range(state.rng.randint(3, most_steps)):
            state.draw_step()
    return Program(seed, tuple(state.sources), tuple(state.steps))


def can_be_drawn(program: Program) -> bool:
    """Whether every line fits its operands: in a program made smaller, some may count something else."""
    state = _State(program.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for source in program.sources:
            state.add_source(source)
        return all(state.fits(step) and state.add_step(step) for step in program.steps)


class _State:
    """A program under construction.

    batch    its values in plain torch, in the sizes of the batch
    longer   the same in the sizes of longer samples, and
    shorter  of samples with one position and with two, if torch takes them: dimensions whose sizes differ are those in
             which samples do (one that is cut to two is as long in longer samples)
    joined   the values that contain a join, and the smallest width of its parts
    gaps     the values whose samples may have gaps
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.sources: list[Source] = []
        self.steps: list[Step] = []
        self.batch: dict[str, Tensor] = {}
        self.longer: dict[str, Tensor] = {}
        self.shorter: dict[int, dict[str, Tensor]] = {1: {}, 2: {}}
        self.joined: dict[str, int] = {}
        self.gaps: set[str] = set()

    @property
    def counted(self) -> str:
        """What lines may count in the batch, see padded_steps.drawn."""
        right = all(padding.side_of(source, self.seed) == "right" for source in self.sources if source.axes)
        return "^~" if right else "~"

    def draw_sources(self) -> None:
        sizes = {axis: self.rng.randint(1, LONGEST) for axis in LONGER}
        sizes["B"] = self.rng.randint(1, MOST_SAMPLES)
        mask = self.rng.choice(("random", "plain"))
        for n in range(self.rng.randint(2, 4)):
            axes = self.rng.choice(AXES)
            shape = tuple(a if isinstance(a, int) else sizes[a] for a in axes)
            self.add_source(self._source(f"x{n}", shape, mask, self.rng.random() < 0.7, axes))

    def _source(
        self, name: str, shape: tuple[int, ...], mask: str, requires_grad: bool, axes: tuple[str | int, ...] = ()
    ) -> Source:
        seed = self.rng.randrange(1 << 30) | 1
        return Source(name, shape, "float64", seed, mask, requires_grad=requires_grad, axes=axes)

    def add_source(self, source: Source) -> None:
        """Add a source and, if it is a batch, its values in all sizes."""
        self.sources.append(source)
        if source.axes:
            sizes = list(zip(source.axes, source.shape, strict=True))
            self.batch[source.name] = _zeros(source.shape)
            self.longer[source.name] = _zeros(tuple(LONGER.get(str(axis), size) for axis, size in sizes))
            for length, values in self.shorter.items():
                values[source.name] = _zeros(tuple(length if str(axis) in LONGER else size for axis, size in sizes))

    def draw_step(self) -> None:
        """Add a line that torch runs in both sizes, unless none is found."""
        names = list(self.batch)
        for _ in range(ATTEMPTS):
            operands = [names[-1] if self.rng.random() < 0.6 else self.rng.choice(names)]  # chains find more
            if self.rng.random() < 0.25:
                operands.append(self.rng.choice(names))
            line = drawn(self._kinds(operands), self.batch[operands[0]].shape, self._countable(operands), self.rng)
            if line is None:
                continue
            weights = [
                self._source(f"w{len(self.sources) + n}", shape, "plain", True) for n, shape in enumerate(line.weights)
            ]
            self.sources += weights
            step = Step(f"v{len(self.steps)}", line.code, (*operands, *(w.name for w in weights)), kind=line.kind)
            if self.add_step(step):
                return
            del self.sources[len(self.sources) - len(weights) :]

    def fits(self, step: Step) -> bool:
        """Whether the table has a step's line for its operands."""
        operands = [name for name in step.operands if name in self.batch]
        return fits(step.kind, self._kinds(operands), self._countable(operands))

    def _kinds(self, operands: Sequence[str]) -> list[str]:
        return [self._kinds_of(name) for name in operands]

    def _kinds_of(self, name: str) -> str:
        batch = self.batch[name]
        others = [values.get(name, batch) for values in (self.longer, *self.shorter.values())]
        kinds = [_kinds(batch, other) for other in others if other.ndim == batch.ndim]
        return "".join("r" if "r" in of_dim else "f" for of_dim in zip(*kinds, strict=True))

    def _countable(self, operands: Sequence[str]) -> str:
        return self.counted if self.gaps.isdisjoint(operands) else ""

    def add_step(self, step: Step) -> bool:
        """Run a line in both sizes; keep it if its result has a reasonable size."""
        operands = [name for name in step.operands if name in self.batch]
        width = min((self.joined[name] for name in operands if name in self.joined), default=None)
        if width is not None and (
            FROM_THE_START.search(step.code) or (width <= LARGEST_CUT and FROM_THE_END.search(step.code))
        ):
            return False
        if ONE.search(step.code) and any(self._has_one(name) for name in operands):
            return False
        made = {source.name: _zeros(source.shape) for source in self.sources if not source.axes}
        both = [{**values, **made} for values in (self.batch, self.longer)]
        if any(execute(step, values, 0) is not None for values in both):
            return False
        batch, longer = (values[step.name] for values in both)
        features = [size for size, kind in zip(batch.shape[1:], _kinds(batch, longer), strict=True) if kind == "f"]
        if batch.ndim > MOST_DIMS or max(features, default=0) > MOST_FEATURES or longer.numel() > LARGEST:
            return False
        self.steps.append(step)
        if width is not None or JOINS.search(step.code):
            self.joined[step.name] = min([*(s for name in operands for s in self.batch[name].shape[1:]), width or 99])
        if step.name in self.joined or MERGES.search(step.code) or not self.gaps.isdisjoint(operands):
            self.gaps.add(step.name)
        self.batch[step.name], self.longer[step.name] = batch, longer
        for shorter in self.shorter.values():
            values = {**shorter, **made}
            if values.keys() >= set(step.operands) and execute(step, values, 0) is None:
                shorter[step.name] = values[step.name]
        return True

    def _has_one(self, name: str) -> bool:
        """Whether a value has at most one position along a dimension in which samples differ."""
        kinds = self._kinds_of(name)
        return any(kind == "r" and size < 2 for kind, size in zip(kinds, self.batch[name].shape[1:], strict=True))


def _zeros(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _kinds(batch: Tensor, longer: Tensor) -> str:
    """For each dimension after the batch: r if samples differ in it, f for features."""
    return "".join("f" if a == b else "r" for a, b in zip(batch.shape[1:], longer.shape[1:], strict=True))


# -------------------------------------------------------------------------------------- the lines, and how one is drawn

# Groups of lines: how often a group is drawn, a pattern of the dimensions after the batch that its operand has (r if
# samples differ in it, f for features), and its lines. Those of a group with ^ count positions in the batch, and those
# with ~ differences of positions: they are the same for a sample only if samples have no gaps, and (^) begin at 0.
LINES = """
2 .* {0}.tanh() | {0} * {0} * 0.3 + 1 | torch.where({0} > 0, {0}, 0.1 * {0}) | F.gelu({0})
2 .*r.* {0} + {0}.sum({r}, keepdim=True) | {0} + {0}.mean({r}, keepdim=True) | {0} + {0}.amax({r}, keepdim=True)
    | {0} + {0}.var({r}, correction=0, keepdim=True) | {0} + {0}.logsumexp({r}, keepdim=True)
1 ..+ {0}.sum({dims}) | {0}.mean({dims}) | {0}.amax({dims}) | {0}.var({dims}, correction=0) | {0}.logsumexp({dims})
1 rf torch.cat([{0}, {0}.mean(1, keepdim=True).expand_as({0})], -1)
2 .+ torch.cat([{0}, {ones}], {d}) | torch.cat([{ones}, {0}], {d})
2 ..+ {0}.permute({order})
1 rf F.linear({0}.flatten(0, 1), {w:4,F}).unflatten(0, {0}.shape[:2])
    | F.embedding_bag(({0} > 0).long().flatten(0, 1), {w:2,3}, mode="sum").unflatten(0, {0}.shape[:2])
1 r F.embedding_bag(({0} > 0).long(), {w:2,3}, mode="sum")
1 rf {0}.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1).softmax(1).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)
1 ..+ {0}.flatten({i}, {j})
2 .+ {0}.softmax({d}) | {0}.cumsum({d}) | {0}.sort(dim={d}, stable=True)[0] | F.normalize({0}, dim={d}, eps=1e-3)
1 .*f F.linear({0}, {w:O,F}, {w:O})
1 .*f F.layer_norm({0}, ({F},)) + 0.01
1 rf {0}.transpose(1, 2) @ {0}
1 rf torch.cat([{0}[:, :, None].expand(-1, -1, {0}.shape[1], -1), {0}[:, None].expand(-1, {0}.shape[1], -1, -1)], -1)
2 fr F.conv1d({0}, {w:O,C,K}, {w:O}, stride={S}, padding={P})
    | F.conv_transpose1d({0}, {w:C,O,K}, stride={S}, padding={P})
2 frr F.conv2d({0}, {w:O,C,K,K}, {w:O}, stride={S}, padding={P})
    | F.conv_transpose2d({0}, {w:C,O,K,K}, stride={S}, padding={P})
1 fr F.max_pool1d({0}, {K}, {S}, {P}, ceil_mode={ceil}) | F.avg_pool1d({0}, {K}, {S}, {P}, {ceil}, {counted})
1 frr F.max_pool2d({0}, {K}, {S}, {P}, ceil_mode={ceil}) | F.avg_pool2d({0}, {K}, {S}, {P}, {ceil}, {counted})
1 .*r F.pad({0}, ({a}, {b}), value=0.3)
1 fr F.interpolate({0}, scale_factor=2.0, mode="nearest") | F.interpolate({0}, scale_factor=2.0, mode="linear")
2 .*r.* {0}[{before}{k}:] | {0}[{before}:-{k}] | {0}[{before}{k}:-1] | {0}[{before}:{k}] | {0}[{before}::2]
1 .*r.* {0}[{before}1:] - {0}[{before}:-1]
1 .*r.* {0} + {0}.flip({r}) | {0}.roll(1, {r})
1 fr {0} * F.linear({0}.mean(2), {w:C,C}).sigmoid().unsqueeze(2)
1 r|.r|r. {0}.unfold({r}, 2, 1)
"""
# Samples taken apart, worked on and joined again.
LINES += """
3 .* torch.stack([{row} for r in {0}]) | torch.cat([({row})[None] for r in {0}])
    | torch.stack([{row} for r in {0}.unbind(0)]) | torch.vstack([({row})[None] for r in {0}])
    | torch.stack([{0}[b].tanh() for b in range({0}.shape[0])])
    | torch.cat([{0}[b : b + 1].tanh() for b in range({0}.shape[0])])
    | torch.cat([{0}[b : b + 1].squeeze(0).tanh()[None] for b in range({0}.shape[0])])
    | torch.cat([{0}[0][None], {0}[1:]]) | torch.cat([s * 0.5 for s in {0}.split(1)])
    | torch.utils.data.default_collate(list({0}))
"""
# Steps taken apart and joined again, and loops over them.
LINES += """
3 rf torch.stack([s.tanh() for s in {0}.unbind(1)], 1) | torch.stack([{0}[:, t] for t in range({0}.shape[1])], 1)
    | torch.stack({0}.unbind(1), 1).{reduce}(1) | torch.stack([{w:F}.expand({0}.shape[0], -1), *{0}.unbind(1)], 1)
    | torch.cat([{0}[:, t : t + 1] * 2 for t in range({0}.shape[1])], 1) | torch.cat({0}.split(2, 1), 1)
    | {0}[:, :2].sum(1) + {0}[:, 2:].sum(1)
1^ rf torch.stack([{0}[:, 0] + {0}[:, 1], {0}[:, 1].tanh()], 1)
    | torch.stack([{0}[:, 1] + {0}[:, 2], {0}[:, 2].tanh()], 1).mean(1)
    | F.linear(torch.stack([{0}[:, 2] + {0}[:, 3], {0}[:, 3] * 2], 2), {w:3,2})
2^ rf idioms.recurrence({0}, {w:4,F4}) | idioms.decayed({0})
4 rf torch.stack(idioms.states("gru", {0}, {w:12,F}, {w:12,4}), 1)
    | torch.stack(idioms.states("lstm", {0}, {w:16,F}, {w:16,4}), 1)
    | idioms.states("rnn_tanh", {0}, {w:4,F}, {w:4,4})[-1] | idioms.states("gru", {0}, {w:12,F}, {w:12,4}, True)[0]
    | torch.stack([F.linear(h, {w:3,4}).tanh() for h in idioms.states("rnn_tanh", {0}, {w:4,F}, {w:4,4})], 1)
    | torch.stack([h for _, h in idioms.two_layers({0}, {w:4,F}, {w:4,4}, {w:4,4}, {w:4,4})], 1)
    | idioms.two_layers({0}, {w:4,F}, {w:4,4}, {w:4,4}, {w:4,4})[-1][1]
    | torch.stack(idioms.two_layers({0}, {w:4,F}, {w:4,4}, {w:4,4}, {w:4,4})[-1], 1)
2 rf torch.stack([idioms.states("gru", {0}, w, u, back)[-1 + back] for w, u, back in (({w:12,F}, {w:12,4}, False),
    ({w:12,F}, {w:12,4}, True))], 1)
    | torch.cat([idioms.states("rnn_tanh", {0}, w, u, back)[-1 + back] for w, u, back in (({w:4,F}, {w:4,4}, False),
    ({w:4,F}, {w:4,4}, True))], -1)
    | torch.cat([torch.stack(idioms.states("rnn_tanh", {0}, w, u, back), 1) for w, u, back in
    (({w:4,F}, {w:4,4}, False), ({w:4,F}, {w:4,4}, True))], -1)
2 rf torch.stack(idioms.held({0}, {w:4,F}, {w:4,4}), 1) | idioms.held({0}, {w:4,F}, {w:4,4})[-1]
1 rf torch.gru({0}, torch.zeros(1, {0}.shape[0], 4, dtype={0}.dtype), [{w:12,F}, {w:12,4}], False, 1, 0.0, False, False,
    True)[0]
    | torch.gru({0}, torch.zeros(2, {0}.shape[0], 4, dtype={0}.dtype), [{w:12,F}, {w:12,4}, {w:12,F}, {w:12,4}], False,
    1, 0.0, False, True, True)[1].transpose(0, 1)
"""
# What takes its shape from a tensor; reshapes beside what they come from; tokens joined to steps; selections.
LINES += """
2 .*r.* {0}.{reduce}({r}, keepdim=True).expand_as({0}) | {0}.{reduce}({r}, keepdim=True).expand_as({0}).sum({r})
    | torch.broadcast_tensors({0}.{reduce}({r}, keepdim=True), {0})[0].softmax({r})
1 .*rf {w:F}.expand_as({0}) * {0}
1 rf {0}.unflatten(2, (2, -1)).flatten(1, 2) @ {0}.unflatten(2, (2, -1)).flatten(1, 2).mT
    | {0}.flatten(1) * {0}.tanh().flatten(1) | {0} @ {0}.flatten(1).view({0}.shape).mT
1 rf idioms.attended({0}, {w:1,F})[:, 0] | idioms.attended({0}, {w:1,F})[:, 1:]
    | idioms.attended({0}, {w:1,F}, {w:2,F})[:, 1:-2] | idioms.attended({0}, {w:3,F}).mean(1)
1 rf torch.cat([{0}, F.linear({0}.{reduce}(1), {w:3,F}).unsqueeze(1).expand(-1, {0}.shape[1], -1)], -1)
    | torch.cat([{0}, {w:3}.expand(*{0}.shape[:2], 3)], -1)
1 .*f {0}[..., [{F} - 1, 0]] | {0}.index_select({0}.ndim - 1, torch.tensor([0, 0]))
    | {0}[..., torch.arange({F}) % 2 == 0]
    | torch.cat([p.tanh() for p in {0}.chunk(2, -1)], -1)
1 .+ {0}.gather({d}, {0}.argmax({d}, keepdim=True)) | {0}.gather({d}, {0}.argsort(dim={d}, stable=True))
    | {0}.masked_fill({0} > {0}.mean({d}, keepdim=True) + 0.01, 0.1) | {0}.detach().topk(1, {d})[0]
    | torch.where({0} == {0}.amax({d}, keepdim=True), {0}, 0.0) | idioms.chosen({0}, {0} > 0, torch.tanh)
1^ .*r.* {0}[{before}[0, 0, 1]] | {0}.index_select({r}, torch.tensor([1, 0])) | {0}.narrow({r}, 0, 1)
"""
# In place, and out=.
LINES += """
2 .+ {0}.clone().mul_(0.5) | {0}.clone().masked_fill_({0} > 0.47, -0.2)
    | {0}.clone().add_({0}, alpha=0.3).clamp_(min=-1)
    | {0}.clone().cumsum_({d}) | {0}.clone().copy_({0} * 2) | {0}.clone().sub_({0}.mean({d}, keepdim=True))
    | torch.zeros_like({0}).add_({0}) | {0}.clone().addcmul_({0}, {0}, value=0.2)
1 .+ torch.mul({0}.detach(), 0.5, out=torch.empty_like({0})) | torch.exp({0}.detach(), out=torch.zeros_like({0}))
    | torch.cumsum({0}.detach(), {d}, out=torch.empty_like({0}))
    | torch.sum({0}.detach(), {d}, keepdim=True, out={0}.new_empty({0}.sum({d}, keepdim=True).shape))
2 .*r.* idioms.written({0}, idioms.at[{before}{k}:-1], 0.5) | idioms.written({0}, idioms.at[{before}:-{k}], 0.5)
    | idioms.written({0}, idioms.at[{before}1:], {0}[{before}:-1]) | idioms.scaled({0}, idioms.at[{before}{k}:-1])
    | idioms.written({0}, idioms.at[{before}:-1], {0}[{before}1:])
1 .*f idioms.written({0}, idioms.at[..., 0], 0.3) | idioms.written({0}, idioms.at[..., :1], {0}[..., -1:] * 2)
    | idioms.scaled({0}, idioms.at[..., 0]) | idioms.written({0}, {0} > 0.47, 0.1)
    | idioms.written({0}, idioms.at[..., 0], {0}.mean(-1))
2 rf idioms.filled(torch.zeros_like({0}), [s.tanh() for s in {0}.unbind(1)])
    | idioms.filled(torch.empty_like({0}), {0}.unbind(1)) | idioms.filled({0}.new_zeros({0}.shape), {0}.unbind(1))
    | idioms.filled({0}.new_zeros(*{0}.shape[:2], 4), idioms.states("gru", {0}, {w:12,F}, {w:12,4}))
"""
# What models do beside that: statistics joined to steps, tables of differences, shifts, gates, normalisations.
LINES += """
2~ rf ({0} @ {0}.mT).masked_fill(idioms.differences({0}) < 0, -1e9).softmax(-1) @ {0}
    | ({0} @ {0}.mT - idioms.differences({0}).abs()).softmax(-1) @ {0}
    | ({0} @ {0}.mT).masked_fill(idioms.differences({0}).abs() > 1, -1e9).softmax(-1)
    | ({0} @ {0}.mT + F.embedding(idioms.differences({0}).abs().clamp(max=2), {w:3,1}).squeeze(-1)).softmax(-1)
    | F.scaled_dot_product_attention({0}, {0}, {0}, is_causal=True)
2 rf idioms.graph_convolution({0}) | idioms.additive_attention({0}, {w:F}, {w:F})
    | ({0} @ {0}.mT).sigmoid() @ {0} / ({0} @ {0}.mT).sigmoid().sum(-1, keepdim=True).clamp(min=1)
    | torch.einsum("bij->bi", {0} @ {0}.mT) | torch.einsum("bii->b", {0}.mT @ {0})
1 rr idioms.skewed({0}) | {0}.triu(1) | {0} - {0}.mT | idioms.sparsemax({0}) | torch.linalg.vector_norm({0}, dim=(1, 2))
2 rf idioms.located({0}, {w:3,2,3}, {w:F}) | idioms.slots({0}, {w:3,F}) | idioms.sparsemax({0})
    | {0}.softmax(-1) @ ({0}.softmax(1).mT @ {0}) | ({0}[..., None] * {0}[..., None, :]).cumsum(1)
    | ({0} - {0}.amax((1, 2), keepdim=True)).exp() | {0}.flip(1).cumsum(1).flip(1)
    | {0}.cumsum(1)[:, :, None] - {0}.cumsum(1)[:, None] | ({w:3,F} @ {0}.mT).softmax(-1) @ {0}
    | F.scaled_dot_product_attention({w:1,3,F}.expand({0}.shape[0], -1, -1), {0}, {0})
    | {0} * torch.ones({0}.shape[:2])[..., None] | {0} / (torch.ones_like({0}).sum(1, keepdim=True) + 1)
    | {0}.clone().masked_fill_(~idioms.mask_of({0}), 0.0)
1 rf F.pad({0}, (0, 0, 1, -1)) | F.pad({0}, (0, 0, 1, 0))[:, :-1] | F.pad({0}, (0, 0, 1, 1), value=-1.0).unfold(1, 3, 1)
    | torch.cat([F.pad({0}[..., :1], (0, 0, 1, -1)), {0}[..., 1:]], -1) | {0}[..., -1:] - {0}
    | F.linear({0}.transpose(0, 1), {w:4,F}).softmax(0).transpose(0, 1)
    | torch.stack([s.tanh() for s in {0}.transpose(0, 1)], 1)
    | torch.gru({0}.transpose(0, 1), torch.zeros(2, {0}.shape[0], 4, dtype={0}.dtype), [{w:12,F}, {w:12,4}, {w:12,F},
    {w:12,4}], False, 1, 0.0, False, True, False)[0].transpose(0, 1)
2 fr idioms.attentive_statistics({0}) | F.conv1d({0}, {w:O,C,3}, padding=2)[..., :-2]
    | torch.cat([{0}, {0}.mean(2, keepdim=True).repeat(1, 1, {0}.shape[2])], 1)
    | F.conv1d({0} * torch.ones_like({0}[:, :1]), {w:O,C,3}, padding=1) * torch.ones_like({0}[:, :1])
    | F.glu(F.conv1d({0}, {w:4,C,1}), 1) | F.conv1d({0}, {w:C,1,3}, padding=1, groups={C})
    | F.batch_norm({0}, {w:C}.detach(), {w:C}.detach().abs() + 1) | F.conv1d(F.pad({0}, (1, 0)), {w:O,C,2})
    | F.instance_norm({0}) + 0.01
1 f.+ F.group_norm({0}, 1) + 0.01 | {0} - {0}.mean(list(range(1, {0}.ndim)), keepdim=True)
1 .+ {0}.std({d}) | {0} + {0}.std({d}, correction=0, keepdim=True) | {0}.abs().sum({d}, keepdim=True).clamp(min=1).log()
1^ rf idioms.forward_algorithm({0}, {w:F,F}) | idioms.state_space({0}, False) | idioms.state_space({0}, True)
    | {0}.cumsum(1) / torch.arange(1, {0}.shape[1] + 1)[:, None] | {0} + {w:40,F}[: {0}.shape[1]]
    | torch.einsum("bnd,nk->bkd", {0}, {w:40,3}[: {0}.shape[1]])
"""
# Lines with another value, behind the dimensions of both.
PAIRS = r"""
2 (.*),\1 {0} + {1} | {0} * {1} | torch.where({0} > 0, {1}, {0}) | torch.stack([{0}, {1}], 1)
    | torch.cat([{0}, {1}], {d})
1 rf,rf ({0} @ {1}.transpose(1, 2)).softmax(-1) @ {1} | F.scaled_dot_product_attention({0}, {1}, {1})
    | {0} @ {1}.transpose(1, 2)
1 rf,rf torch.cat([{0}, {1}], 1)
1 (.*),\1 torch.stack([torch.stack([a, b]).mean(0) for a, b in zip({0}, {1})]) | torch.stack([{0}, {1}], 1).mean(1)
    | torch.stack([F.mse_loss(a, b) for a, b in zip({0}, {1})]) | {0}.clone().add_({1}) | {0}.clone().copy_({1})
    | torch.add({0}.detach(), {1}.detach(), out=torch.empty_like({0} + {1})) | {0}.clone().masked_fill_({1} > 0, 0.3)
    | idioms.written({0}, {1} > 0.47, 0.1)
2 (.+),\1 F.mse_loss({0}, {1}, reduction="none").mean({d}) | ({0} * {1}).sum({d})
    | F.cosine_similarity({0}, {1}, dim={d})
    | torch.stack([F.smooth_l1_loss(a, b, reduction="sum") for a, b in zip({0}, {1})])
    | {0}.gather({d}, {1}.argsort(dim={d}, stable=True)) | F.pairwise_distance({0}, {1})
2 rf,rf {0}.transpose(1, 2) @ {1} | torch.einsum("btd,bte->bde", {0}, {1}) | {0}[:, :, None] @ {1}[:, :, :, None]
    | torch.cat([{0}, F.scaled_dot_product_attention({0}, {1}, {1})], -1)
    | torch.einsum("btd,bsd->bts", {0}, {1}).amax(2)
    | torch.cdist({0}, {1}) | {0}.softmax(-1) @ ({1}.softmax(1).mT @ {1}) | {0} + ({0} @ {1}.mT).softmax(-1) @ {1}
"""
ROWS = (
    "r.tanh()", "r * 2 + 1", "r if r.ndim else r + 1", "F.linear(r, {w:4,F})", "r.softmax(0)", "r.cumsum(0)",
    "r + r.mean(0, keepdim=True)", "r @ r.T", "r.sum(0)",
)  # fmt: skip
ONES = "torch.full([1 if i == {d} else n for i, n in enumerate({{0}}.shape)], 0.7, dtype=torch.float64)"
BRACES = re.compile(r"\{([a-zA-Z][^}]*)\}")


@dataclass(frozen=True)
class Line:
    """A line with all that is drawn, the shapes of its weights, and the line of the table that it comes from."""

    code: str
    weights: tuple[tuple[int, ...], ...]
    kind: str


@dataclass(frozen=True)
class _Group:
    weight: int
    counts: str
    pattern: re.Pattern[str]
    lines: tuple[str, ...]

    def fits(self, kinds: Sequence[str], counted: str) -> bool:
        return self.counts in counted and self.pattern.fullmatch(",".join(kinds)) is not None


def _groups(lines: str) -> list[_Group]:
    found = []
    for group in re.split(r"\n(?=\d)", lines.strip()):
        often, fits, codes = group.split(maxsplit=2)
        split = (re.sub(r"\s+", " ", code) for code in re.split(r"\s+\|\s+", codes.strip()))
        found.append(_Group(int(often[0]), often[1:], re.compile(fits), tuple(split)))
    return found


GROUPS = {1: _groups(LINES), 2: _groups(PAIRS)}


def drawn(kinds: Sequence[str], shape: Sequence[int], counted: str, rng: random.Random) -> Line | None:
    """A line for operands with these kinds of dimensions; None if none fits.

    shape    of the first operand
    counted  what may be counted in the batch: "^~" if samples have no gaps and begin at 0, "~" if they have no gaps
    """
    fitting = [group for group in GROUPS[len(kinds)] if group.fits(kinds, counted)]
    if not fitting:
        return None
    (group,) = rng.choices(fitting, [group.weight * len(group.lines) ** 0.5 for group in fitting])
    numbers = _numbers(kinds[0], shape, rng)
    weights: list[tuple[int, ...]] = []

    def put(found: re.Match[str]) -> str:
        name, _, sizes = found[1].partition(":")
        if name != "w":
            return str(numbers[name])
        weights.append(tuple(int(numbers.get(size, size)) for size in sizes.split(",")))
        return f"{{{len(kinds) + len(weights) - 1}}}"

    kind = rng.choice(group.lines)
    line = kind.replace("{row}", rng.choice(ROWS))
    if not {name.partition(":")[0] for name in BRACES.findall(line)} <= {"w", *numbers}:
        return None
    return Line(BRACES.sub(put, line), tuple(weights), kind)


def fits(kind: str, kinds: Sequence[str], counted: str) -> bool:
    """Whether a line of the tables is there for operands with these kinds of dimensions."""
    return any(kind in group.lines and group.fits(kinds, counted) for group in GROUPS.get(len(kinds), ()))


def _numbers(kinds: str, shape: Sequence[int], rng: random.Random) -> dict[str, Any]:
    dims = range(1, len(shape))
    if not dims:  # of a number for each sample
        return {"F": 1}
    d, i, kernel = rng.choice(dims), rng.choice(dims[:-1] or dims), rng.randint(1, 3)
    r = rng.choice([dim for dim in dims if kinds[dim - 1] == "r"] or dims)
    some, order = rng.sample(dims, rng.randint(1, min(2, len(dims) - 1) or 1)), rng.sample(dims, len(dims))
    return {
        "d": d, "r": r, "before": ":, " * r, "i": i, "j": i + 1, "dims": some, "order": [0, *order],
        "k": rng.randint(1, 2), "a": rng.randint(-1, 2), "b": rng.randint(-1, 2),
        "K": kernel, "S": rng.choice((1, 1, 2, 3)), "P": rng.randint(0, kernel // 2),
        "ceil": rng.random() < 0.5, "counted": rng.random() < 0.5,
        "C": shape[1], "F": shape[-1], "F4": shape[-1] + 4, "O": rng.choice((2, 3, 4)), "ones": ONES.format(d=d),
        "reduce": rng.choice(("sum", "mean", "amax")),
    }  # fmt: skip
