"""`python -m op_registry explain`: everything that people call an operator has an honest answer, never a traceback."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import get_testing_overrides, resolve_name

import op_registry
from op_registry import registry
from op_registry.__main__ import main
from op_registry.report import coverage
from op_registry.report.explain import LAYOUTS, as_values, explain
from op_registry.report.names import UnknownName, named, operator_of
from op_registry.sparse.lowering import lowering_of
from op_registry.sparse.record import Sparse

aten = torch.ops.aten


def aten_packets() -> list[str]:
    names = {n.partition(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")}
    return sorted(n.replace("::", ".") for n in names)


def torch_names() -> list[str]:
    """Every function, method and attribute that torch lists as overridable, by the name that torch gives it."""
    names = (resolve_name(f) for f in get_testing_overrides())
    return sorted(
        {n.removesuffix(".__get__") for n in names if n is not None and not n.endswith(("__set__", "__delete__"))}
    )


def more_names() -> Iterator[str]:
    """What people type: every public name of these, whether it is an operator or not."""
    for path, of in (
        ("F", torch.nn.functional), ("torch.linalg", torch.linalg), ("torch.special", torch.special),
        ("torch.fft", torch.fft), ("nn", torch.nn), ("torch.masked", torch.masked),
    ):  # fmt: skip
        yield from (f"{path}.{name}" for name in dir(of) if not name.startswith("_"))


def test_every_aten_packet_has_an_answer() -> None:
    names = aten_packets()
    assert len(names) >= 1500
    for name in names:
        text = explain(name, samples=False)
        for overload in getattr(torch.ops.aten, name.partition(".")[2]).overloads():
            assert f"{name}.{overload}" in text, (name, overload)


def test_every_function_of_torch_has_an_answer() -> None:
    names = torch_names()
    assert len(names) >= 1300
    for name in names:
        assert explain(name, samples=False).strip(), name


def test_every_public_name_has_an_answer() -> None:
    names = list(more_names())
    assert len(names) >= 450
    no_operators = 0
    for name in names:
        try:
            text = explain(name, samples=False)
        except UnknownName as error:
            no_operators += 1
            text = str(error)
        assert "\n" in text or re.search("written in|it is no operator", text), name
    assert 0 < no_operators < 100


def test_a_function_written_in_c_is_the_operator_that_torch_itself_says_it_is() -> None:
    """torch.jit has a table of its own, for torch, torch.linalg, torch.special, torch.fft and torch._C._nn."""
    from torch.jit._builtins import _get_builtin_table, _modules_containing_builtins

    table = _get_builtin_table()
    compared = 0
    for module in _modules_containing_builtins:
        for name in dir(module):
            function = getattr(module, name)
            if type(function).__name__ != "builtin_function_or_method" or id(function) not in table:
                continue
            ours, theirs = operator_of(function), table[id(function)]
            if hasattr(torch.ops.aten, theirs.partition("::")[2]) and theirs.startswith("aten::"):
                compared += 1
                assert ours is not None, (name, theirs)
                assert ours._qualified_op_name == theirs
    assert compared > 700


def calls_made(call: Callable[[], Any]) -> list[str]:
    from op_registry.conformance.plain_torch import calls_of

    return [op._schema.name.partition("::")[2] for op in calls_of(call)]


ATTRIBUTES = tuple(
    name for name, member in vars(torch._C.TensorBase).items()
    if isinstance(member, types.GetSetDescriptorType) and operator_of(member) is not None
)  # fmt: skip
CONVERSIONS = ("bool", "byte", "char", "double", "half", "bfloat16", "int", "long", "short", "cfloat", "cdouble")
UNARY = ("__neg__", "__pos__", "__abs__", "__invert__", *CONVERSIONS)
OF_ONE_ELEMENT = ("__bool__", "__float__", "__int__", "__complex__", "__index__")
BINARY = (
    "__add__", "__radd__", "__iadd__", "__sub__", "__isub__", "__rsub__", "__mul__", "__rmul__", "__imul__",
    "__truediv__", "__itruediv__", "__floordiv__", "__mod__", "__imod__", "__pow__", "__ipow__", "__matmul__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__ior__", "__lshift__", "__xor__",
)  # fmt: skip


@pytest.mark.parametrize("name", [*ATTRIBUTES, *UNARY, *OF_ONE_ELEMENT, *BINARY])
def test_a_method_or_attribute_is_the_operator_that_it_dispatches(name: str) -> None:
    x = torch.arange(4).reshape(2, 2) + 1
    if name in ("__itruediv__", "real", "imag"):
        x = x.to(torch.complex64)
    if name in OF_ONE_ELEMENT:
        x = x[0, 0]

    def call() -> Any:
        member = getattr(x, name)
        return member(x) if name in BINARY else member if name in ATTRIBUTES else member()

    overloads = as_values(f"torch.Tensor.{name}", samples=False)["overloads"]
    assert {each["overload"].split(".")[1] for each in overloads} & set(calls_made(call))


# ------------------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    "name, operator",
    [
        ("aten.cumsum", aten.cumsum), ("cumsum", aten.cumsum), ("aten::add_.Tensor", aten.add_.Tensor),
        ("torch.ops.aten.add.Tensor", aten.add.Tensor), ("torch.cumsum", aten.cumsum),
        ("torch.Tensor.add_", aten.add_), ("Tensor.T", aten.numpy_T), ("torch.Tensor.__radd__", aten.add),
        ("torch.linalg.norm", aten.linalg_norm), ("linalg.norm", aten.linalg_norm), ("F.linear", aten.linear),
        ("torch.nn.functional.gelu", aten.gelu), ("torch.special.expit", aten.special_expit),
        ("torch.fft.rfft", aten.fft_rfft), ("torch.Tensor.half", aten.to),
    ],
)  # fmt: skip
def test_what_a_name_stands_for(name: str, operator: Any) -> None:
    assert named(name).operator is operator


@pytest.mark.parametrize(
    "name, called",
    [
        ("F.softmax", {"aten.softmax.int"}), ("F.max_pool2d", {"aten.max_pool2d.default"}),
        ("torch.norm", {"aten.linalg_vector_norm.default"}), ("nn.LSTM", {"aten.lstm.input"}),
        ("nn.Softmax", {"aten.softmax.int"}),
        ("F.multi_head_attention_forward", {"aten.linear.default", "aten.bmm.default"}),
    ],
)  # fmt: skip
def test_what_a_python_function_calls(name: str, called: set[str]) -> None:
    assert named(name).function is not None
    assert called <= {each["overload"] for each in as_values(name, samples=True)["overloads"]}


def rows(text: str) -> dict[str, str]:
    """The titled rows of the first rule."""
    texts: dict[str, str] = {}
    title = ""
    for line in text.splitlines():
        match = re.match(r"  (\w+)  +(.*)", line)
        if match and match[1] not in texts:
            title = match[1]
            texts[title] = match[2]
        elif line.startswith(" " * 12) and title:
            texts[title] += " " + line.strip()
    return texts


def test_everything_about_an_operator() -> None:
    text = explain("torch.cumsum")
    assert re.match(r"torch\.cumsum is aten\.cumsum\.\naten\.cumsum \(default\b.*\): scan\n", text)
    explained = rows(text)
    assert list(explained) == [
        "law",
        "family",
        "rule",
        "traits",
        "dims",
        "serves",
        "lowering",
        "oracle",
        "samples",
        "gaps",
    ]
    assert explained["law"].startswith("at valid positions what torch gives")
    assert re.match(
        r"op_registry/ops/scans/rules.py:\d+, run by run_scan \(op_registry/laws/categories.py:\d+\) The op",
        explained["rule"],
    )
    assert explained["traits"] == "identity=0"
    assert explained["dims"] == "a result for each element of each slice along `dim`; other dimensions are batch"
    assert {"aten.cumsum.default", "aten.cumsum.out (written back)"} <= {*explained["serves"].split(", ")}
    assert explained["lowering"].startswith("COO, CSR, CSC, BSR, BSC, packed: ")
    assert re.search(r"tried as .*: (\d+) of \1 sample calls stay sparse", explained["lowering"])
    assert "op_registry/conformance/oracles/by_category.py:" in explained["oracle"]
    assert "torch's operator database: cumsum" in explained["samples"]
    assert explained["gaps"] == "none"


def test_which_calls_need_dense_storage_and_why() -> None:
    lowering = rows(explain("aten.index_put"))["lowering"]
    assert re.search(r"\d+ of \d+ sample calls stay sparse; \d+: it has a mask among other indices", lowering)


@pytest.mark.parametrize(
    "name, why",
    [
        ("aten.max_pool2d_with_indices.default", "stored densely: a window reads neighbours"),
        ("aten.log_sigmoid_forward.default", "stored densely: its second result is an internal buffer of torch"),
        ("aten.resize_.default", "refused, as in every storage: it exposes memory"),
    ],
)
def test_the_reason_where_there_is_no_lowering(name: str, why: str) -> None:
    assert f"COO, CSR, CSC, BSR, BSC, packed: {why}" in rows(explain(name, samples=False))["lowering"]


def test_every_rule_has_a_lowering_or_a_reason_in_every_layout() -> None:
    for op in registry:
        lowering = rows(explain(str(op), samples=False))["lowering"]
        assert all(layout in lowering for layout in LAYOUTS), op
        rule = registry.get(op)
        assert rule is not None
        lowered = re.search(r"\(.*:\d+", lowering) is not None
        assert lowered or re.search("stored densely: .|refused, as in|as the operators", lowering), op
        assert lowered <= (lowering_of(rule, Sparse) is not None), op


def test_what_has_no_rule() -> None:
    assert "aten.add on each element of its lists" in explain("aten._foreach_add.Scalar")
    assert "decomposes" in explain("aten.linalg_det.default")
    assert "aten._linalg_det.default" in explain("aten.linalg_det.default")
    assert "takes no tensor" in explain("aten.arange.default")
    assert "TorchScript only" in explain("aten.eq.str")
    assert "missing" in explain("aten._mkldnn_transpose.default")
    assert "op_registry.authoring.elementwise(torch.ops.aten._mkldnn_transpose.default)" in " ".join(
        explain("aten._mkldnn_transpose.default").split()
    )


def test_what_is_neither_an_operator_nor_python() -> None:
    assert "returns a property of a tensor" in explain("torch.Tensor.data_ptr")


def test_a_python_function_says_what_was_seen() -> None:
    explained = rows(explain("F.mse_loss", samples=False))
    assert explained["seen"].startswith("with torch's samples (entry nn_functional_mse_loss): ")
    assert "aten.mse_loss.default" in explained["seen"]
    assert rows(explain("nn.LSTM", samples=False))["seen"].startswith("in sample calls: ")
    assert "aten.lstm.input: recurrent [op_registry/ops/recurrent/rules.py" in explain("nn.LSTM", samples=False)


def test_an_entry_of_the_database() -> None:
    for name in coverage.known_calls():
        assert explain(name, samples=False).strip()
    explained = rows(explain("nn_functional_mse_loss"))
    assert explained["calls"] == "aten.broadcast_tensors.default, aten.mse_loss.default"
    assert re.match(r"trials that stayed sparse: coo \d+ of \d+, csr ", explained["sparse"])
    assert "takes no strided tensor" in explain("signal_windows_hann")


def test_an_operator_of_ones_own() -> None:
    torch.library.define("explained::halved", "(Tensor x) -> Tensor")
    torch.library.impl("explained::halved", "CompositeExplicitAutograd")(lambda x: x / 2)
    assert "missing" in explain("explained.halved")
    with registry.overlay():
        rule = op_registry.authoring.elementwise(torch.ops.explained.halved)

        @rule.oracle
        def by_hand(x: Any) -> Any:
            """Half of it."""

        @rule.samples
        def few(make: Any) -> Any:
            yield (make((2, 3)),)

        rule.gap("P5", why="it has no derivative")
        explained = rows(explain("explained::halved"))
    assert re.match(r"test_explain\.py:\d+", explained["rule"].split(", run by")[0].split("/")[-1])
    assert explained["oracle"].startswith("by_hand (")
    assert explained["oracle"].endswith("Half of it")
    assert explained["samples"].startswith("few (")
    assert explained["gaps"] == "gap in P5: it has no derivative"
    assert "1 of 1 sample calls stay sparse" in explained["lowering"]


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "name, near",
    [
        ("aten.cumsumm", "aten.cumsum"), ("torch.cumsumm", "torch.cumsum"), ("cumsumm", "torch.cumsum"),
        ("F.sofmax", "torch.nn.functional.softmax"), ("torch.linalg.nrom", "torch.linalg.norm"),
        ("torch.Tensor.ad_", "torch.Tensor.add_"), ("nobody.knows", ""), ("", ""), ("..", ""), ("aten.", ""),
        ("aten.add.Nothing", ""), ("torch.float32", ""), ("torch.nn", ""), ("a b", ""), ("torch.ops", ""),
    ],
)  # fmt: skip
def test_an_unknown_name_is_one_line_with_the_nearest_ones(
    name: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", name]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("python -m op_registry explain: ")
    assert printed.err.count("\n") == 1
    assert near in printed.err
    assert ("did you mean" in printed.err) or not near


SUBJECT = "masked_dispatch.conformance_subject:eager"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["check", "--op", "sofmax"], "no operator is called sofmax"),
        (["check", "--op", "sofmax"], "did you mean softmax"),
        (["check", "--op", "nobody.knows"], "no operator is called nobody.knows"),
        (["explain", "nobody.knows"], "is there once the module that defines it is imported: --import MODULE)"),
        (["check", "--op", "exp+nothing"], "exp"),
        (["check", "--op", "exp@float33"], "has no attribute 'float33'"),
        (["check", "--op", "exp", "--subject", "nobody"], "no subject is called 'nobody'"),
        (["check", "--op", "exp", "--subject", "no_module:at_all"], "No module named 'no_module'"),
        (["check", "--op", "exp", "--subject", "op_registry.testing:ALL_LAWS"], "is ('P1'"),
        (["check", "--op", "exp", "--import", "no_module"], "no module is called no_module (--import)"),
        (["explain", "exp", "--import", "op_registry.no_module"], "no module is called op_registry.no_module"),
    ],
)
def test_what_there_is_not_is_said_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] == "check" and "--subject" not in arguments:
        arguments = [*arguments, "--subject", SUBJECT]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"python -m op_registry {arguments[0]}: ")
    assert err.count("\n") == 1
    assert message in err


def test_an_import_that_fails_inside_a_module_is_not_hidden(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "needs_another.py").write_text("import another_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="another_that_is_not_there"):
        main(["explain", "exp", "--import", "needs_another"])


def test_the_command_imports_a_users_module(
    tmp_path: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_rules.py").write_text(
        "import torch, op_registry\n"
        "torch.library.define('imported::twice', '(Tensor x) -> Tensor')\n"
        "op_registry.authoring.elementwise(torch.ops.imported.twice)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with registry.overlay():
        assert main(["explain", "imported.twice", "--import", "my_rules", "--no-samples"]) == 0
    assert "imported.twice (default): elementwise" in capsys.readouterr().out


def test_entries_are_known_without_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    from op_registry.report import explain as explaining

    def asked() -> None:
        raise AssertionError("torch's operator database was asked")

    monkeypatch.setattr(explaining, "database", asked)
    assert "exp" in rows(explain("aten.exp", samples=False))["samples"]
    assert aten.exp.default in coverage.known_calls()["exp"].ops
