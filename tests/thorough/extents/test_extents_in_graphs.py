"""Compiled calls follow an extent as eager calls do; a graph guards on what is known, and on no length.

Graphs join samples, steps and states as eager calls do, and give library functions what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch.nn import functional as F

import masked_dispatch as md
from comparison import same_extents as same
from compiled_regions import compiled
from loops_over_samples import LENGTHS, RIGHT_OR_LEFT, batch, with_mean_joined
from masked_dispatch import MaskedSemanticsError

pytestmark = pytest.mark.usefixtures("fresh_compiler")
LONGER = [6, 2, 3, 5, 1]


def check(run: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor], x: md.MaskedTensor) -> None:
    """Results and gradients of a compiled function are those of the function."""
    compiled_leaf, leaf = x.detach().requires_grad_(), x.detach().requires_grad_()
    found, expected = run(compiled_leaf), function(leaf)
    same(found, expected)
    found.tanh().sum().backward()
    expected.tanh().sum().backward()
    torch.testing.assert_close(compiled_leaf.grad.to_tensor(0), leaf.grad.to_tensor(0), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:x.* 0. is an end of the batch:masked_dispatch.BatchEndWarning")  # in the loop
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["features joined", "chomp", "heads", "steps stacked", "sorted"])
def test_a_graph_for_one_batch_serves_others_of_its_size(name: str, side: str) -> None:
    function = RIGHT_OR_LEFT[name]
    run, backend = compiled(function)
    check(run, function, batch(2, side=side)[0])
    check(run, function, batch(2, side=side, lengths=[3, 0, 4, 4])[0])
    assert backend.graphs == 1


def test_a_graph_of_unknown_sizes_serves_every_width() -> None:
    def several(x: Tensor) -> Tensor:
        merged = RIGHT_OR_LEFT["merged and split"](x) + with_mean_joined(x)
        return merged[:, 1:-1] * RIGHT_OR_LEFT["heads"](x)[:, 1:-1, :1]

    run, backend = compiled(several, dynamic=True)
    for lengths in ([5, 2, 0, 3, 6], [6, 2, 9, 3, 5, 1], [7, 10]):  # (no size that is one of the weights')
        check(run, several, batch(2, lengths=lengths)[0])
    assert backend.graphs == 1


def test_another_layout_and_other_dimensions_are_compiled_anew() -> None:
    run, backend = compiled(lambda x: x[:, 1:])
    right, left = batch(2)[0], batch(2, side="left")[0]
    plain = right.without_extent()
    assert run(plain).extent is None
    for graphs, x in enumerate((right, left, md.padded(right, dim=(1, 2))), 2):
        same(run(x), x[:, 1:])
        assert backend.graphs == graphs
    other, _ = batch(2, lengths=[1, 4, 3, 0])
    same(run(other), other[:, 1:])
    assert backend.graphs == 4


def test_what_merges_know_enters_and_leaves_a_graph() -> None:
    merge, back = compiled(lambda x: x.flatten(0, 1) * 2, dynamic=True)
    split, backend = compiled(lambda y, x: y.unflatten(0, (x.shape[0], x.shape[1])).mean(1), dynamic=True)
    for lengths in (LENGTHS, LONGER):
        x, _ = batch(2, lengths=lengths)
        merged = merge(x)
        assert merged._extent.places == x.flatten(0, 1)._extent.places
        same(split(merged, x), (x * 2).mean(1))
    assert (back.graphs, backend.graphs) == (1, 1)


def test_layouts_that_meet_are_an_assertion_of_the_graph() -> None:
    def added(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    run, _ = compiled(added)
    left, _ = batch(2, side="left")
    same(run(left, left * 2), left * 3)
    for other in (batch(2)[0], batch(2, side="left", lengths=[4, 1, 1, 3])[0]):
        with pytest.raises(RuntimeError, match=r"add: `self` and `other` have samples at different places"):
            run(left, other)


def test_an_assignment_in_a_graph_makes_no_position_be_there() -> None:
    def write(x: Tensor) -> Tensor:
        y = x * 1
        y[:, 1] = 5.0
        return y.mul_(2)

    run, _ = compiled(write)
    same(run(batch(2)[0]), write(batch(2)[0]))


def test_views_that_a_graph_takes_and_returns_have_their_own_masks() -> None:
    run, _ = compiled(lambda x: (x.mT, x[:, :-1]))
    x, _ = batch(2)
    for found, expected in zip(run(x[:, 1:]), (x[:, 1:].mT, x[:, 1:-1]), strict=True):
        same(found, expected)
        assert found.get_data().data_ptr() == expected.get_data().data_ptr()
    with pytest.raises(MaskedSemanticsError, match="leaves out positions at each sample's end"):
        run(x)[1].zero_()


def test_padded_names_its_dimensions_where_values_cannot_be_read() -> None:
    run, _ = compiled(lambda x: md.padded(x, dim=1).flip(1))
    x, _ = batch(2)
    same(run(x.without_extent()), x.flip(1))
    run, _ = compiled(lambda x: md.padded(x))
    with pytest.raises(Exception, match=r"cannot be read here.*name those that number positions, dim=1"):
        run(x.without_extent())


def test_branches_and_steps_carry_extents() -> None:
    def by_cond(x: Tensor) -> Tensor:
        return torch.cond(x.count() > 7, lambda x: (x * 2,), lambda x: (x.softmax(1),), (x,))[0]

    def by_loop(x: Tensor) -> Tensor:
        return while_loop(lambda n, h: n < 3, lambda n, h: (n + 1, h * 0.5 + x), (torch.tensor(0), x))[1]

    x, _ = batch(2)
    for function, expected in ((by_cond, x * 2), (by_loop, (((x * 0.5 + x) * 0.5) + x) * 0.5 + x)):
        run, _ = compiled(function)
        same(function(x), expected)
        same(run(x), expected)
    # (Dynamo passes the library's error on as its own, with the same words, or as it is.)
    with pytest.raises(RuntimeError, match=r"value 0 of shape .* knows of other padding in one branch"):
        torch.cond(x.count() > 7, lambda x: (x.without_extent() * 2,), lambda x: (x * 2,), (x,))
    with pytest.raises(RuntimeError, match="torch's scan does not carry that yet"):
        scan(lambda carry, row: (carry * row, row * 2), x[:, 0] * 1, x.transpose(0, 1))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own LeafSpec, in export and its copies
def test_an_exported_program_takes_an_extent_that_is_not_the_mask(strict: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return with_mean_joined(x)[:, 1:]

    shapes = ({0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=3)},)
    x, y, left = batch(2)[0], batch(2, lengths=LONGER)[0], batch(2, side="left")[0]
    only_padded = md.export(Model(), (x,), dynamic_shapes=shapes, strict=strict).module()
    # (a mean is invalid of a sample without positions, which may come: so the extent comes beside the mask)
    data, mask, extent = only_padded((y.get_data(), y.get_mask()))
    assert extent.tolist() == Model()(y).extent.tolist()
    assert mask.tolist() == Model()(y).get_mask().tolist()
    torch.testing.assert_close(data, Model()(y).to_tensor(0), rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match=r"a batch is padded otherwise than the example of this program.* sp-"):
        only_padded((left.get_data(), left.get_mask()))
    with_missing = [z.mask_with(torch.arange(z.shape[1])[:, None] != 1) for z in (x, y)]
    program = md.export(Model(), (with_missing[0],), dynamic_shapes=shapes, strict=strict)
    found = program.module()((with_missing[1].get_data(), with_missing[1].get_mask(), with_missing[1].extent))
    expected = Model()(with_missing[1])
    assert [t.tolist() for t in found[1:]] == [expected.get_mask().tolist(), expected.extent.tolist()]
    torch.testing.assert_close(found[0], expected.to_tensor(0), rtol=1e-12, atol=1e-12)
    assert not any("masked_dispatch" in str(node.target) for node in program.graph.nodes)


def test_the_lines_of_two_ones_in_graphs() -> None:
    kernel = torch.ones(1, 1, 3)

    def lines(x: Tensor) -> tuple[Tensor, ...]:
        return (
            F.conv1d(x, kernel, padding=2)[..., :-2].count(2),
            F.conv1d(F.pad(x, (1, 1)), kernel).count(2),
            F.conv_transpose1d(x, torch.ones(1, 1, 4), stride=2)[..., 1:-1].count(2),
            F.interpolate(x, scale_factor=2.0, mode="linear").count(2),
        )

    run, backend = compiled(lines)
    for lengths in ([4, 2], [1, 4]):
        x = md.from_lengths(torch.ones(2, 4), torch.tensor(lengths))[:, None]
        counts = [2 * n for n in lengths]
        assert [t.flatten().tolist() for t in run(x)] == [lengths, lengths, counts, counts]
    assert backend.graphs == 1


def test_modules_in_graphs() -> None:
    layer = nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True, dtype=torch.float64)
    run, backend = compiled(layer)
    check(run, layer, batch(2)[0])
    check(run, layer, batch(2, lengths=[1, 4, 3, 0])[0])
    assert backend.graphs == 1


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("storage", ["packed", "coo"])
def test_a_graph_of_stored_elements_knows_it_too(storage: str, missing: bool) -> None:
    run, backend = compiled(lambda x: (x.tanh() * x.sum(1, keepdim=True)).softmax(-1))
    for lengths in ([4, 2, 0, 3], [5, 1, 2, 5], [6, 6, 1, 3]):
        longest = max(lengths)
        x = md.from_lengths(torch.randn(4, longest, 2, dtype=torch.float64), torch.tensor(lengths))
        if missing:
            x = x.mask_with(torch.arange(longest)[:, None] != 1)
        stored = (x.to_packed() if storage == "packed" else x.to_sparse()).requires_grad_()
        leaf = x.detach().requires_grad_()
        found, expected = run(stored), (leaf.tanh() * leaf.sum(1, keepdim=True)).softmax(-1)
        same(found.to_dense(), expected)
        assert found._extent.known == expected._extent.known
        found.square().sum().backward()
        expected.square().sum().backward()
        assert stored.grad is not None
        assert leaf.grad is not None
        torch.testing.assert_close(stored.grad.to_tensor(0), leaf.grad.to_tensor(0), rtol=1e-12, atol=1e-12)
    assert backend.graphs == 2  # one for the sizes at hand, one for any


def test_sizes_that_depend_on_data() -> None:
    x = md.from_lengths(torch.tensor([[[1.0, 5, 2, 3]] * 2] * 2), torch.tensor([2, 1]))

    def chosen(x: Tensor) -> Tensor:
        columns = x[..., torch.arange(4) % 2 == 0]
        return columns.gather(2, columns.argmax(2, keepdim=True))

    def turned(x: Tensor) -> Tensor:
        columns = x[..., torch.arange(4) % 2 == 0].movedim(2, 0)
        return torch.cat([columns[0][None], columns[1:]])

    def rows_summed(x: Tensor) -> Tensor:
        rows = torch.stack(x[..., torch.arange(4) % 2 == 0].unbind(1), 1).sum(1)
        return torch.where(rows > 4, rows, -rows)

    for call in (chosen, turned, rows_summed):
        found, want = torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x)
        same(found, want)


def test_where_windows_find_samples_does_not_depend_on_what_is_known_of_them() -> None:
    """A graph doesn't know that states, stacked, follow one another; nor does an index that reads all in order."""
    there = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1]]).bool()[..., None].expand(2, 4, 2)
    x = md.padded(md.masked_tensor(torch.arange(1.0, 17).view(2, 4, 2), there), dim=1)
    cell = nn.GRUCell(2, 2)

    def shifted(x: Tensor) -> Tensor:
        state, states = torch.zeros(2, 2), []
        for step in x.unbind(1):
            state = cell(step, state)
            states.append(state)
        return F.pad(torch.stack(states, 1), (0, 0, 1, 0))[:, :-1]

    found = torch.compile(shifted, fullgraph=True, backend="aot_eager")(x)
    md.testing.assert_close(found, shifted(x), check_extent=True)
    read = x[:, torch.arange(4)]
    assert F.pad(read, (0, 0, 1, 0)).extent.equal(F.pad(x, (0, 0, 1, 0)).extent)


def test_features_that_are_read_by_index_are_no_samples() -> None:
    x = md.padded(
        md.masked_tensor(
            torch.tensor([[[2.0, 1], [1, 2], [0, 0]]]), torch.tensor([[[1], [1], [0]]]).bool().expand(1, 3, 2)
        ),
        dim=1,
    )

    def steps(x: Tensor) -> Tensor:
        ordered = x.gather(1, x.argsort(dim=1, stable=True))
        return torch.stack([ordered[:, t] @ torch.ones(2, 2) for t in range(3)], 1)

    found = torch.compile(steps, fullgraph=True, backend="aot_eager")(x)
    assert found.extent.equal(steps(x).extent)

    def read(x: Tensor, index: Tensor) -> Tensor:
        return x.gather(1, index)

    index = torch.tensor([[[0, 2]]])
    assert read(x, index).extent.tolist() == [[[True, False]]]
    with pytest.raises(
        RuntimeError, match=r"MaskedSemanticsError: torch\.gather: along dimension 2 of its result some indices"
    ):
        torch.compile(read, fullgraph=True, backend="aot_eager")(x, index)


# ------------------------------------------------------------------------------------- what warns, and what is refused


@pytest.mark.parametrize("storage", ["clone", "to_packed"])
def test_a_write_to_a_part_ends_where_each_sample_does(storage: str) -> None:
    def trimmed(x: Any) -> Any:
        x = x * 1
        x[:, :-1] = 0.0
        return x

    x = getattr(md.from_lengths(torch.arange(1.0, 16).view(3, 5), torch.tensor([5, 2, 3])), storage)()
    run, _ = compiled(trimmed)
    rows = [row.compressed().tolist() for row in run(x).to_dense()]
    assert rows == [[0, 0, 0, 0, 5], [0, 7], [0, 0, 13]]


def test_a_write_through_a_view_with_other_positions_is_refused() -> None:
    def written(x: Tensor, y: Tensor) -> Tensor:
        a, b = x.exp(), y.exp()
        a[:, 2:4].add_(b[:, 2:4])
        return a * 1

    run, _ = compiled(written)
    with pytest.raises((RuntimeError, MaskedSemanticsError), match="other positions"):
        run(*(md.from_lengths(torch.randn(3, 5, 1), torch.tensor(n)) for n in ([5, 5, 5], [3, 5, 4])))


def test_groups_of_positions_that_are_the_batchs_are_refused() -> None:
    there = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0]]).bool()
    run, _ = compiled(lambda x: x.view(2, 3, 2).sum(2))
    with pytest.raises(RuntimeError, match="groups of 2 positions are those of the batch"):
        run(md.padded(md.masked_tensor(torch.ones(2, 6), there)))


def computed(x: Tensor) -> Tensor:
    y = x * 2
    return y[:, -1] + md.last(y)


def test_an_end_of_the_batch_warns_when_it_is_traced_at_the_line_of_its_code() -> None:
    run, _ = compiled(computed)
    x = md.from_lengths(torch.ones(2, 3), torch.tensor([3, 1]))
    with pytest.warns(md.BatchEndWarning) as warned:
        run(x)
    run(x)  # (a warning would be an error)
    (found,) = warned
    assert (found.filename, found.lineno) == (__file__, computed.__code__.co_firstlineno + 2)


def test_a_window_that_the_batch_has_warns() -> None:
    x = md.from_lengths(torch.ones(2, 4), torch.tensor([4, 2]))[:, None]
    run, _ = compiled(lambda x: F.max_pool1d(x * 1, 4))
    with pytest.warns(md.EmptiedSampleWarning) as warned:
        run(x)
    compiled(lambda x: F.max_pool1d(x * 1, 2))[0](x)
    (found,) = warned
    assert str(found.message).startswith("a window of 4 along dimension -1 may have been longer than some samples")


# -------------------------------------------------------------------------------------------------------------- joins


def counted(*lengths: int) -> Any:
    data = torch.arange(1.0, 4.0 * len(lengths) + 1).view(len(lengths), 4) / 10
    return md.from_lengths(data, torch.tensor(lengths))


torch.manual_seed(0)
FIRST, SECOND, LSTM = nn.GRUCell(1, 2), nn.GRUCell(2, 2), nn.LSTMCell(1, 2)


def states(x: Any) -> list[Any]:
    state, found = torch.zeros(len(x), 2), []
    for step in x.unbind(1):
        state = FIRST(step[:, None], state)
        found.append(state)
    return found


def pairs(x: Any) -> Any:
    state, found = (torch.zeros(len(x), 2), torch.zeros(len(x), 2)), []
    for step in x.unbind(1):
        state = LSTM(step[:, None], state)
        found.append(torch.stack(list(state), 1))
    return torch.stack(found, 1)


def two_layers(x: Any) -> Any:
    state, found = torch.zeros(len(x), 2), []
    for below in states(x):
        state = SECOND(below, state)
        found.append(state)
    return torch.stack(found, 1)


def held(x: Any) -> Any:
    total, totals = torch.zeros(len(x)), []
    for step in x.unbind(1):
        total = torch.where(step.get_mask(), total + step, total)
        totals.append(torch.stack([total, total * 2], 1))
    return torch.stack(totals, 1)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: torch.stack([row * 2 for row in x]),
    "rows unsqueezed": lambda x: torch.cat([row[None].cumsum(1) for row in x]),
    "samples, then steps": lambda x: torch.stack([torch.stack(row.unbind(0)) for row in x.unbind(0)]),
    "steps": lambda x: torch.stack([step * 2 for step in x.unbind(1)], 1),
    "a step and the next": lambda x: torch.stack([x[:, 2] + x[:, 3], x[:, 3] + 0], 1).mean(1),
    "states": lambda x: torch.stack(states(x), 1),
    "a mean of states": lambda x: torch.stack(states(x), 1).mean(1),
    "two states of each step": pairs,
    "two layers": two_layers,
    "two directions": lambda x: torch.stack([states(x)[-1], states(x.flip(1))[-1]], 1),
    "held states": held,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_gives_the_same(name: str) -> None:
    run = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")
    for x in (counted(4, 2, 1), counted(1, 4, 0)):
        md.testing.assert_close(run(x), FUNCTIONS[name](x), check_extent=True)


@torch.no_grad()
def test_a_graph_of_one_step_returns_the_last_state_and_does_not_know_the_recurrence() -> None:
    run = torch.compile(FIRST, fullgraph=True, backend="aot_eager")
    x, state, found = counted(4, 2, 1), torch.zeros(3, 2), []
    for step in x.unbind(1):
        state = run(step[:, None], state)
        found.append(state)
    torch.testing.assert_close(state.to_tensor(0.0), states(x)[-1].to_tensor(0.0))
    with pytest.raises(MaskedSemanticsError, match=r"compiled regions have returned .* Compile the whole loop"):
        torch.stack(found, 1)


def test_samples_at_different_places_are_not_summed() -> None:
    x = counted(4, 2, 1)
    left = md.padded(md.masked_tensor(x.to_tensor(0.0).flip(1), x.get_mask().flip(1)), dim=1)
    run = torch.compile(lambda x: torch.stack([row * 1 for row in x]).sum(0), fullgraph=True, backend="aot_eager")
    md.testing.assert_close(run(x), torch.stack(x.unbind(0)).sum(0))
    with pytest.raises(RuntimeError, match="lie at different places along dimension 1"):
        run(left)


# -------------------------------------------------------------------------------------------------- library functions


OF_THE_LIBRARY: dict[str, Callable[[Tensor], Tensor]] = {
    "ffill": lambda x: md.missing.ffill(x * 2, 1),
    "interpolate": lambda x: md.missing.interpolate(x * 2, 1),
    "shift": lambda x: md.missing.shift(x * 2, 1, 1),
    "fillna": lambda x: md.missing.fillna(x * 2, 9.0),
    "rolling": lambda x: md.missing.rolling(x * 2, 2, 1, min_count=1).mean(),
    "groups of samples": lambda x: md.missing.groupby(x * 2, [0, 1], 0, num_groups=2).sum(),
    "skipna": lambda x: md.mean(x * 2, 1, skipna=False),
    "a scan": lambda x: md.cumsum(x * 2, 1, skipna=False),
    "min_count": lambda x: md.sum(x * 2, 1, min_count=0),
}


@pytest.mark.parametrize("side", ["behind", "in front", "between"])
@pytest.mark.parametrize("name", OF_THE_LIBRARY)
def test_library_functions_of_what_a_graph_computes(name: str, side: str) -> None:
    places = {"behind": [1, 1, 0, 0], "in front": [0, 0, 1, 1], "between": [1, 0, 1, 1]}[side]
    there = torch.tensor([[1, 1, 1, 1], places]).bool()
    data = torch.arange(8.0).view(2, 4)
    x = md.padded(md.masked_tensor(data, there & (data != 2)), there, dim=1)
    same(torch.compile(OF_THE_LIBRARY[name], fullgraph=True, backend="aot_eager")(x), OF_THE_LIBRARY[name](x))
