"""Rules in compiled code: windows, recurrent networks, matrices, what torch allocates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributions, nn
from torch._dynamo.testing import CompileCounter

import masked_dispatch as md
from few_elements import dashed as shown
from few_elements import rows_and_classes, without_second_row
from few_elements import three as some
from networks_with_samples import hidden, network, ragged, stack, states, steps
from networks_with_samples import shown as filled
from padded_slices import same

# Other tests compile torch's own functions, too: a function may be compiled eight times.
pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def adaptive() -> tuple[nn.Module, Tensor, Tensor]:
    return rows_and_classes()


def test_windows_of_padding():
    _, batch = ragged([(9,), (5,)], [(0,), (0,)], (12,))
    net = stack()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    missing = compiled(batch)
    assert torch.equal(missing, net(batch))
    with md.windows("padding"):
        x = batch.detach().requires_grad_()
        y, expected = compiled(x), net(batch)
        assert torch.equal(y.detach(), expected.detach())
        y.to_tensor(0).sum().backward()
    assert torch.equal(compiled(batch), missing)
    outer = torch.compile(md.windows("padding", stack()), backend="aot_eager")
    assert torch.equal(outer(batch).detach(), expected.detach())


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_relu"])
def test_compiled_where_torch_compiles_recurrent_networks(name):
    """It refuses the modules, whatever they are given, until it is told to allow them."""
    torch.manual_seed(0)
    model = network(name, bidirectional=True)
    data, mask = steps()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for x in (data, hidden(data, mask)):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Dynamo does not support RNN, GRU, or LSTM"):
            compiled(x)
    with torch._dynamo.config.patch(allow_rnn=True):
        x, y = hidden(data, mask), hidden(data, mask)
        made, state = compiled(x)
        wanted, last = model(y)
        for mine, theirs in zip((made, *states(state)), (wanted, *states(last)), strict=True):
            assert mine.get_mask().equal(theirs.get_mask())
            torch.testing.assert_close(filled(mine), filled(theirs))
        filled(made).square().sum().backward()
        filled(wanted).square().sum().backward()
        torch.testing.assert_close(filled(x.grad), filled(y.grad))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_log_prob_of_adaptive_softmax_was_plain(adaptive: tuple[nn.Module, Tensor, Tensor], backend: str) -> None:
    layer, x, _ = adaptive
    run = torch.compile(layer.log_prob, backend=backend, fullgraph=True)
    got = run(without_second_row(x))
    assert got.get_mask().sum(1).tolist() == [20, 0, 20, 20]
    kept = torch.tensor([0, 2, 3])
    torch.testing.assert_close(got.to_tensor(0)[kept], layer.log_prob(x)[kept])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_vector_as_triangular_matrix_was_plain(backend: str) -> None:
    run = torch.compile(distributions.utils.vec_to_tril_matrix, backend=backend, fullgraph=True)
    assert shown(run(some(1, 0, 3))) == [1, 0, "--", 3]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_copy_takes_a_number_in_a_graph(backend: str) -> None:
    run = torch.compile(lambda x: x.clone().copy_(2.0), backend=backend, fullgraph=True)
    assert shown(run(some(1, 2, 3))) == [2, 2, 2]


def bags_of(batch: int, length: int) -> md.MaskedTensor:
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(0, 10, (batch, length), generator=generator)
    return md.masked_tensor(ids, torch.rand(batch, length, generator=generator) > 0.3)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_every_batch_size_are_one_graph(mode):
    module, counter = nn.EmbeddingBag(10, 4, mode=mode), CompileCounter()
    compiled = torch.compile(module, backend=counter, dynamic=True)
    for batch in (3, 4, 5, 7, 9):
        found, expected = compiled(bags_of(batch, 6)), module(bags_of(batch, 6))
        same(found, expected.get_data(), expected.get_mask())
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own LeafSpec, in export
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("names", [("batch",), ("batch", "length")], ids=" and ".join)
def test_bags_are_exported_for_every_batch_size(names, mode):
    module = nn.EmbeddingBag(10, 4, mode=mode)
    dims = {n: torch.export.Dim(name, min=2, max=64) for n, name in enumerate(names)}
    program = md.export(module, (bags_of(4, 6),), dynamic_shapes=(dims,)).module()
    for batch, length in ((4, 6), (7, 6), (3, 6 if len(names) == 1 else 9)):
        ids = bags_of(batch, length)
        data, mask = program((ids.get_data(), ids.get_mask()))
        expected = module(ids)
        assert torch.equal(mask, expected.get_mask())
        torch.testing.assert_close(data, expected.to_tensor(0))
