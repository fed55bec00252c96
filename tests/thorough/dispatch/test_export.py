"""torch.export and make_fx with masked tensors made inside of the program."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md
from compiled_regions import data_and_mask, masked, same
from exported_modules import check_model_of_frames as check_export_of_frames
from exported_modules import check_sparse_storage as check_export

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Classifier(nn.Module):
    """A module that takes data and mask: what an exported program can take."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, data: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = md.as_masked_tensor(data, mask)
        h = self.norm(self.hidden(x)).relu() + x
        return self.head(h).softmax(-1).mean(0).to_tensor(0.0), h.count(-1)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own LeafSpec, in export and its copies
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    net = Classifier().eval()
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(
        net, data_and_mask(), strict=strict, dynamic_shapes={"data": {0: batch}, "mask": {0: batch}}
    )
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    plain = program.run_decompositions()
    for form in (program, torch.export.load(stored), plain):
        for rows in (4, 3):
            arguments = data_and_mask(rows)
            same(form.module()(*arguments), net(*arguments))
    # Decomposed, a program is plain operators on plain tensors.
    assert not any(isinstance(node.meta.get("val"), md.MaskedTensor) for node in plain.graph.nodes)


class Mapped(nn.Module):
    """vmap inside: over parts with torch's, over masked tensors with ours."""

    def forward(self, data: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = md.as_masked_tensor(data, mask)
        first = torch.vmap(lambda d, m: md.as_masked_tensor(d, m).exp().mean().to_tensor(0.0))(data, mask)
        return first, md.functional.vmap(lambda r: (r * r).sum())(x).to_tensor(0.0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_export_of_vmap(strict: bool) -> None:
    program = torch.export.export(Mapped(), data_and_mask(), strict=strict)
    arguments = data_and_mask()
    same(program.module()(*arguments), Mapped()(*arguments))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_export_for_training() -> None:
    net = Classifier()
    arguments = data_and_mask()
    exported = torch.export.export(net, arguments).module()
    gradients = []
    for module in (net, exported):
        module(*arguments)[0].prod().backward()
        gradients.append([p.grad for p in module.parameters()])
    same(*gradients)


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str, pre_dispatch: bool) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(data: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        x = md.as_masked_tensor(data, mask)
        return (x.exp() * x).softmax(-1).mean(0).to_tensor(0.0), x.count(), x[0].sort().values.to_tensor(9.0)

    graph = make_fx(function, tracing_mode=mode, pre_dispatch=pre_dispatch)(*data_and_mask())
    for _ in range(2):
        arguments = data_and_mask()
        same(graph(*arguments), function(*arguments))


def test_make_fx_of_a_gradient() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(data: Tensor, mask: Tensor) -> Tensor:
        return torch.autograd.grad(md.as_masked_tensor(data, mask).exp().var().to_tensor(0.0), data)[0]

    data, mask = data_and_mask()
    graph = make_fx(function)(data.requires_grad_(), mask)
    data, mask = data_and_mask()
    same(graph(data.requires_grad_(), mask), function(data, mask))


@pytest.mark.parametrize("function", [lambda x: x.exp(), lambda x: x.mean().to_tensor(0.0)])
def test_make_fx_refuses_to_bake_masked_inputs_in(function: Callable[..., Any]) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    with pytest.raises(md.MaskedSemanticsError, match="would record its data and mask as constants"):
        make_fx(function)(masked())
    w, x = torch.randn(6), masked()  # captured, it is a constant, as a plain tensor would be
    same(make_fx(lambda w: (x * w).sum().to_tensor(0.0))(w)(w + 1), (x * (w + 1)).sum().to_tensor(0.0))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_export_of_packed_storage() -> None:
    check_export("packed", strict=False)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("stride 2", "holes"), ("stride 3", "padded"), ("two", "padded"), ("GELU", "holes"), ("residual", "padded")],
)
def test_each_length_that_the_plain_model_takes(name: str, kind: str) -> None:
    """md.export of models that shorten sequences: every length that torch.export takes of the plain model."""
    check_export_of_frames(name, kind)
