"""masked_dispatch.export: modules that take, return and hold masked tensors, as programs of plain operators."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md
from compiled_regions import data_and_mask, masked, same
from exported_modules import BATCH, LENGTH, expected, pair
from op_registry import registry

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own LeafSpec, in export and its copies


def operators_of(program: torch.export.ExportedProgram) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def is_plain(program: torch.export.ExportedProgram) -> bool:
    """Whether nothing of the library is in the program: operators, values of the graph, state."""
    values = [node.meta.get("val") for node in program.graph.nodes] + [*program.state_dict.values()]
    return not any("masked_dispatch" in name for name in operators_of(program)) and not any(
        md.is_masked_tensor(value) for value in [*values, *program.constants.values()]
    )


class Scores(nn.Module):
    """Takes a masked batch of sequences (B, T, 4), returns a masked tensor and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.hidden(x)).relu()
        return h.softmax(-1).mean(1), h.count(1)


@pytest.mark.parametrize("strict, storage", [(True, "dense"), *((False, s) for s in ("dense", "coo", "csr", "packed"))])
def test_masked_arguments_and_results_are_pairs(strict: bool, storage: str) -> None:
    def batch(rows: int, length: int) -> Tensor:
        x = masked(rows, length, 4)
        stored = {
            "dense": x.to_dense,
            "coo": x.to_sparse,
            "csr": lambda: x.to_sparse_csr(1),
            "packed": lambda: x.to_packed().without_extent(),
        }
        return stored[storage]()

    net = Scores().eval()
    program = md.export(net, (batch(2, 3),), dynamic_shapes=({0: BATCH, 1: LENGTH},), strict=strict)
    assert is_plain(program)
    for rows, length in ((2, 3), (5, 7)):
        x = batch(rows, length)
        same(program.module()(pair(x)), expected(net(x.to_dense())))
        data, mask = pair(x)
        assert torch.equal(
            program.module()((torch.where(mask, data, 1e30), mask))[0][0], program.module()(pair(x))[0][0]
        )


class Nested(nn.Module):
    def forward(self, batch: dict[str, Any], scale: Tensor, *, offset: Tensor) -> dict[str, Any]:
        first, second = batch["parts"]
        return {"sum": first * scale + second + offset, "kept": [second], "scale": scale}


@pytest.mark.parametrize("by_name", [False, True])
def test_masked_tensors_inside_of_containers(by_name: bool) -> None:
    def arguments(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ({"parts": (masked(rows, 6), masked(rows, 6))}, torch.randn(6)), {"offset": masked(6)}

    def plain(args: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda t: pair(t) if md.is_masked_tensor(t) else t, args)

    row = {0: BATCH}
    shapes: Any = {"batch": {"parts": (row, row)}, "scale": None, "offset": None}
    args, kwargs = arguments(4)
    program = md.export(Nested(), args, kwargs, dynamic_shapes=shapes if by_name else tuple(shapes.values()))
    args, kwargs = arguments(3)
    result = program.module()(*plain(args), **plain(kwargs))
    wanted = expected(Nested()(*args, **kwargs))
    assert list(result) == list(wanted)
    same(result["sum"], wanted["sum"])
    same(result["kept"][0], wanted["kept"][0])


def test_results_of_every_kind_of_dtype() -> None:
    class Kinds(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x > 0, (x * 10).to(torch.int64), torch.complex(x, x)

    x = masked(4, 6)
    results = md.export(Kinds(), (x,)).module()(pair(x))
    for (data, mask), wanted in zip(results, Kinds()(x), strict=True):
        same((data, mask), (wanted.to_tensor(False if wanted.dtype is torch.bool else 0), wanted.get_mask()))


class Holding(nn.Module):
    """A masked parameter, a masked buffer, one that is not saved, and a masked attribute."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(masked(6, 6), requires_grad=trained)
        self.register_buffer("scale", masked(6))
        self.register_buffer("offset", masked(6), persistent=False)
        self.limit = masked(6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(x @ self.weight * self.scale + self.offset, self.limit).to_tensor(-1.0)


def by_adapter(module: nn.Module, strict: bool) -> torch.export.ExportedProgram:
    return md.export(module, (torch.randn(4, 6),), dynamic_shapes=({0: BATCH},), strict=strict)


def by_torch(module: nn.Module, strict: bool) -> torch.export.ExportedProgram:
    program = torch.export.export(module, (torch.randn(4, 6),), dynamic_shapes=({0: BATCH},), strict=strict)
    x = torch.randn(3, 6)
    same(program.module()(x), module(x))
    return program.run_decompositions()


@pytest.mark.parametrize("export", [by_adapter, by_torch])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("strict", [False, True])
def test_masked_state_is_exported_as_plain_state(strict: bool, trained: bool, export: Callable[..., Any]) -> None:
    net = Holding(trained)
    if export is by_torch:  # which keeps as constants of the program what is in no state_dict, as it is
        del net.limit, net.offset
        net.limit = net.offset = torch.zeros(6)
    before = dict(net.state_dict())
    program = export(net, strict)
    assert is_plain(program)
    assert {"weight_data", "weight_mask", "scale_data", "scale_mask"} <= set(program.state_dict)
    x = torch.randn(3, 6)
    same(program.module()(x), net(x))
    assert net.state_dict().keys() == before.keys()
    assert type(net) is Holding
    assert md.is_masked_tensor(net.weight)


def test_shared_masked_parameters_are_stored_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.first.weight = self.second.weight = nn.Parameter(masked(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)).to_tensor(0.0)

    net, x = Twice(), torch.randn(4, 6)
    program = md.export(net, (x,))
    same(program.module()(x), net(x))
    assert program.state_dict["first.weight_data"] is program.state_dict["second.weight_data"]


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_of_masked_arguments_is_refused(strict: bool) -> None:
    with pytest.raises(md.MaskedSemanticsError, match=r"shape \(2, 3, 4\).*Use program = masked_dispatch.export\("):
        torch.export.export(Scores(), (masked(2, 3, 4),), strict=strict)
    with pytest.raises(md.MaskedSemanticsError, match=r"Use program = masked_dispatch.export"):
        torch.export.export(Nested(), ({"parts": (masked(6), masked(6))}, torch.ones(6)), {"offset": torch.ones(6)})


@pytest.mark.parametrize(
    "mask, message",
    [
        (torch.ones(4, 6, dtype=torch.int64), "dtype mismatch! Expected: Bool, Got: long"),
        (torch.ones(4, 6, dtype=torch.int8), "dtype mismatch! Expected: Bool"),
        (torch.ones(4, 6), "dtype mismatch! Expected: Bool"),
        (torch.ones(3, 6, dtype=torch.bool), "Guard failed"),
        (torch.ones(4, 1, dtype=torch.bool), "Guard failed"),
        (torch.ones(6, dtype=torch.bool), "Guard failed"),
    ],
)
def test_a_program_refuses_masks_of_another_dtype_or_shape(mask: Tensor, message: str) -> None:
    net = nn.Linear(6, 6)
    program = md.export(net, (masked(4, 6),), dynamic_shapes=({0: BATCH},))
    with pytest.raises((RuntimeError, AssertionError), match=message):
        program.module()((torch.randn(4, 6), mask))


class Made(nn.Module):
    def forward(self, data: Tensor, mask: Tensor) -> Tensor:
        return md.as_masked_tensor(data, mask).exp().mean(0).to_tensor(0.0)


def test_a_program_of_another_version_is_refused() -> None:
    arguments = data_and_mask()
    with registry.overlay() as overlay:
        overlay.replace(torch.ops.aten.exp.default, lambda x: x.like(x.data + 100))
        program = torch.export.export(Made(), arguments)
        decomposed = program.run_decompositions()
        wanted = Made()(*arguments)
        same(program.module()(*arguments), wanted)
    for use in (lambda: program.module()(*arguments), program.run_decompositions):
        with pytest.raises(md.MaskedSemanticsError, match=r"another version.*Export it again"):
            use()
    same(decomposed.module()(*arguments), wanted)


class Windows(nn.Module):
    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.convolution, self.inside = nn.Conv1d(2, 2, 3, padding=1), inside

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            with md.windows("padding"):
                return self.convolution(x)
        return self.convolution(x)


def test_scopes_around_an_export_are_in_the_program() -> None:
    x = md.from_lengths(torch.randn(2, 2, 8), torch.tensor([3, 8]), dim=2).without_extent()
    net = Windows().eval()
    with md.windows("padding"):
        padding, wanted = md.export(net, (x,)), expected(net(x))
    own = md.windows("padding", Windows().eval())
    own.load_state_dict(net.state_dict())
    for program in (padding, md.export(own, (x,))):
        same(program.module()(pair(x)), wanted)
    missing = md.export(net, (x,)).module()(pair(x))
    same(missing, expected(net(x)))
    assert not torch.equal(missing[1], wanted[1])
    same(expected(own(x)), wanted)  # the module itself keeps its meaning


def test_scopes_inside_of_an_exported_module_are_refused() -> None:
    x = masked(2, 2, 8)
    with pytest.raises(md.MaskedSemanticsError, match=r"entered inside of a module.*around the export of the whole"):
        md.export(Windows(inside=True), (x,))
    with pytest.raises(md.MaskedSemanticsError, match=r"Windows has windows of its own, 'padding', inside"):
        md.export(nn.Sequential(md.windows("padding", Windows())), (x,))
    with md.windows("padding"):
        md.export(Windows(inside=True), (x,))


def test_a_masked_tensor_in_a_container_is_refused() -> None:
    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [masked(6)]

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scales[0]).to_tensor(0.0)

    with pytest.raises(md.MaskedSemanticsError, match=r"Hiding.scales .*shape \(6,\).*register_buffer\(name, tensor\)"):
        md.export(Hiding(), (torch.randn(4, 6),))


@pytest.mark.filterwarnings("ignore")  # of the exporter and of what it imports
def test_onnx_needs_no_translations(tmp_path: Path) -> None:
    """The models are in test_deployment.py; this is a module that makes masked tensors inside, given to torch.onnx."""
    onnxruntime: Any = pytest.importorskip("onnxruntime", reason="onnxruntime has no build for this Python")
    pytest.importorskip("onnxscript", reason="onnxscript has no build for this Python")
    torch.onnx.export(Made(), data_and_mask(), f=tmp_path / "made.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "made.onnx")
    arguments = data_and_mask()
    names = [entry.name for entry in session.get_inputs()]
    found = session.run(None, {name: value.numpy() for name, value in zip(names, arguments, strict=True)})
    same(torch.from_numpy(found[0]), Made()(*arguments))


@pytest.mark.filterwarnings("ignore")  # of the exporter and of what it imports
def test_onnx_of_a_masked_argument_names_the_program_to_export() -> None:
    pytest.importorskip("onnxscript", reason="onnxscript has no build for this Python")
    text = (
        "torch.export was given a masked tensor of shape (2,) as an argument, and an exported program takes plain "
        "tensors. Use program = masked_dispatch.export(module, args), which takes (data, mask) in place of it and runs "
        "without this library; for ONNX torch.onnx.export(program, f='model.onnx', dynamo=True)."
    )
    with pytest.raises(torch.onnx.OnnxExporterError, match=re.escape(text)):
        torch.onnx.export(torch.nn.ReLU().eval(), (md.masked_tensor([1.0, 2.0]),), dynamo=True, verbose=False)
