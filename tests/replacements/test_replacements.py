"""What is replaced in torch: all of it is listed, plain calls are torch's own, and the switch switches."""

from __future__ import annotations

import ast
import inspect
import re
import types
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

import masked_dispatch as md
from masked_dispatch import replacements
from masked_dispatch.replacements import OLDEST, TABLE, patches, replace
from replaced_in_torch import found
from repository import ROOT


def as_markdown() -> str:
    """The lists of docs/replaced_in_torch.md: one for each occasion, an item for each reason."""
    parts = []
    for when, rows in groupby(TABLE, lambda row: row.when):
        title = re.sub(r"torch[.\w]+", r"`\g<0>`", when.capitalize())
        parts.append(f"## {title}\n")
        for row in rows:
            owners = [
                f"`{owner}`: {', '.join(f'`{name}`' for name in names.split())}" for owner, names in row.places.items()
            ]
            by = f"assumption {row.checked}" if isinstance(row.checked, int) else f"`{row.checked}`"
            later = "" if row.since == OLDEST else f" Torch has had this function since {row.since}."
            needless = "" if row.until is None else f" Torch {row.until} and later need no replacement."
            item = f"* {'; '.join(owners)}. Without the replacement, {row.without}. Test: {by}.{later}{needless}"
            parts.append(fill(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
        parts.append("")
    return "\n".join(parts)


# From masked or plain tensors to a call that goes through each of the functions that are replaced at import.
Make = Callable[..., Any]
EYE = torch.eye(3, dtype=torch.float64) * 2
ROWS = torch.arange(12.0, dtype=torch.float64).view(4, 3) / 8


def tensor(make: Make, data: Tensor) -> Any:
    return make(data.clone())


def attention(make: Make) -> Any:
    torch.manual_seed(0)
    x = tensor(make, ROWS[:, None].repeat(1, 2, 1))
    return nn.MultiheadAttention(3, 1, dtype=torch.float64)(x, x, x, need_weights=False)[0]


@torch.jit.script
def doubled(x: Tensor) -> Tensor:
    return x * 2


def scripted_method(make: Make) -> Any:
    module = torch.jit.script(nn.Linear(3, 3, dtype=torch.float64))
    with torch.no_grad():
        module.weight.fill_(0.5), module.bias.fill_(0.25)
    return module.forward(tensor(make, ROWS))


def given_parts(function: Any) -> Callable[[Make], Any]:
    def call(make: Make) -> Any:
        parameter = nn.Parameter(tensor(make, ROWS) * 0)
        function(tensor(make, ROWS).reshape(-1), [parameter])
        return parameter.detach()

    return call


def state_loaded(make: Make) -> Any:
    module, x = nn.Module(), tensor(make, ROWS)
    module.x = nn.Buffer(md.padded(x) if md.is_masked_tensor(x) else x)
    module.load_state_dict({"x": ROWS + 1})
    return module.x


def compared(make: Make) -> None:
    torch.testing.assert_close(tensor(make, ROWS), tensor(make, ROWS))


def lists_of_lists(name: str) -> Callable[[Make], Any]:
    """A method of a process group, of which the arguments alone are looked at before there is a group."""

    def call(make: Make) -> Any:
        x = tensor(make, ROWS)
        outputs, inputs = ([[x]], [x.clone()] if not md.is_masked_tensor(x) else [ROWS])
        group: Any = None
        return getattr(torch.distributed.ProcessGroup, name)(group, outputs, inputs, None)

    return call


class Cumulative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.flip(0).cumsum(0).flip(0)


GIVEN = {
    "torch.autograd.function.Function.apply": lambda make: Cumulative.apply(tensor(make, ROWS)),
    "torch.nn.functional.multi_head_attention_forward": attention,
    **{
        f"torch.masked.{name}": lambda make, name=name, options=options: getattr(torch.masked, name)(
            tensor(make, ROWS), *options
        )
        for name, options in {
            **dict.fromkeys(("sum", "prod", "mean", "amax", "amin", "std", "var"), ()),
            **dict.fromkeys(("logsumexp", "argmax", "argmin", "median"), (1,)),
            "norm": (2.0,),
        }.items()
    },
    "torch.distributions.multivariate_normal.MultivariateNormal.__init__": lambda make: (
        D.MultivariateNormal(tensor(make, ROWS[0]), EYE).mean
    ),
    "torch.distributions.lowrank_multivariate_normal.LowRankMultivariateNormal.__init__": (
        lambda make: D.LowRankMultivariateNormal(tensor(make, ROWS[0]), EYE, EYE[0] + 1).mean
    ),
    "torch.distributions.lowrank_multivariate_normal.LowRankMultivariateNormal.log_prob": (
        lambda make: D.LowRankMultivariateNormal(ROWS[0], EYE, EYE[0] + 1).log_prob(tensor(make, ROWS))
    ),
    "torch.distributions.wishart.Wishart.__init__": lambda make: (
        D.Wishart(torch.tensor(5.0, dtype=torch.float64), covariance_matrix=tensor(make, EYE)).mean
    ),
    "torch.distributions.lkj_cholesky.LKJCholesky.log_prob": lambda make: D.LKJCholesky(3).log_prob(
        tensor(make, EYE / 2)
    ),
    **{
        f"torch.distributions.transforms.{kind.__name__}.{method}": (
            lambda make, kind=kind, method=method, given=given: getattr(kind(), method)(
                *(tensor(make, data) for data in given)
            )
        )
        for kind, method, given in (
            (D.CorrCholeskyTransform, "_call", [ROWS[0]]),
            (D.CorrCholeskyTransform, "_inverse", [EYE / 2]),
            (D.CorrCholeskyTransform, "log_abs_det_jacobian", [ROWS[0], EYE / 2]),
            (D.StickBreakingTransform, "_call", [ROWS[0]]),
            (D.StickBreakingTransform, "_inverse", [ROWS[1] / 2]),
            (D.StickBreakingTransform, "log_abs_det_jacobian", [ROWS[0], torch.full((4,), 0.25, dtype=torch.float64)]),
            (D.PositiveDefiniteTransform, "_call", [EYE]),
        )
    },
    "torch.nn.utils.vector_to_parameters": given_parts(lambda *args: nn.utils.vector_to_parameters(*args)),
    "torch.nn.utils.convert_parameters.vector_to_parameters": given_parts(
        lambda *args: nn.utils.convert_parameters.vector_to_parameters(*args)
    ),
    "torch._lobpcg.has_torch_function": lambda make: torch.lobpcg(tensor(make, EYE), X=ROWS[:3, :1], niter=2)[0],
    "torch._lobpcg.handle_torch_function": lambda make: torch.lobpcg(tensor(make, EYE), X=ROWS[:3, :1], niter=2)[0],
    "torch._lowrank.has_torch_function": lambda make: torch.svd_lowrank(tensor(make, EYE), q=2)[1],
    "torch._lowrank.handle_torch_function": lambda make: torch.svd_lowrank(tensor(make, EYE), q=2)[1],
    "torch.jit.ScriptFunction.__call__": lambda make: doubled(tensor(make, ROWS)),
    "torch.ScriptMethod.__call__": scripted_method,
    "torch.utils.data._utils.collate.default_collate_fn_map[torch.Tensor]": lambda make: default_collate(
        [tensor(make, ROWS)] * 2
    ),
    "torch.nn.modules.module.Module._load_from_state_dict": state_loaded,
    "torch.to_dlpack": lambda make: torch.from_dlpack(torch.to_dlpack(tensor(make, ROWS))),
    "torch.utils.dlpack.to_dlpack": lambda make: torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor(make, ROWS))),
    "torch.storage.UntypedStorage.__repr__": lambda make: repr(tensor(make, ROWS).untyped_storage()),
    "torch.testing._comparison.TensorLikePair.compare": compared,
    "torch._vmap_internals._unwrap_batched": lambda make: torch.autograd.functional.jacobian(
        lambda x: x * 2, tensor(make, ROWS[0]), vectorize=True
    ),
    **{
        f"torch.distributed.distributed_c10d.ProcessGroup.{name}": lists_of_lists(name)
        for name in ("allgather", "gather", "scatter", "reduce_scatter")
    },
}
AT_IMPORT = {name: row for row in replacements.TABLE if row.when == replacements.IMPORT for name in row.whole_names}
# A hook that torch offers, beside the lists (docs/replaced_in_torch.md).
HOOK = "torch.optim.optimizer._global_optimizer_pre_hooks"


def masked(data: Tensor) -> md.MaskedTensor:
    mask = torch.ones(data.shape, dtype=torch.bool)
    mask.view(-1)[-1] = False
    return md.masked_tensor(data, mask)


def outcome(call: Callable[[Make], Any], make: Make) -> Any:
    """What a call gives, or what it raises, in words."""
    torch.manual_seed(0)
    try:
        return call(make)
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


# ----------------------------------------------------------------------------------------------------------- the table


def test_the_page_has_the_lists() -> None:
    page = (ROOT / "docs/replaced_in_torch.md").read_text(encoding="utf-8")
    assert as_markdown() in page, "write as_markdown() of this file into it"


def test_all_that_is_replaced_is_listed() -> None:
    unlisted = {name for name in found() if not name.startswith(HOOK)} - set(replacements._BY_NAME)
    assert unlisted == set(), "replace it by masked_dispatch.replacements, and list it in its TABLE"
    assert set(AT_IMPORT) <= set(found())


def test_what_is_noted_on_a_function_of_torch_replaces_nothing() -> None:
    """The class derived from an autograd function, which its first masked call keeps on it."""
    function = torch.nn.modules._functions.BackwardHookFunction
    function.apply(masked(ROWS).requires_grad_())
    assert "_masked_dispatch_counterpart" in vars(function)
    assert not [name for name in found() if function.__name__ in name]


def test_what_checks_it_exists() -> None:
    from masked_dispatch import assumptions

    numbers = {int(n) for n in re.findall(r"^ ?(\d+)\. ", inspect.getsource(md.torch_internals), re.MULTILINE)}
    for row in replacements.TABLE:
        if isinstance(row.checked, int):
            assert row.checked in numbers
        else:
            assert (ROOT / row.checked).exists(), row.checked
    assert assumptions


def assigned_in_torch(source: str) -> list[str]:
    """The assignments to attributes of what is imported from torch, and of its classes, in a module's source."""
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and (getattr(node, "module", None) or node.names[0].name).partition(".")[0] == "torch"
        for alias in node.names
    }

    def of_torch(node: ast.expr) -> bool:
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        return isinstance(node, ast.Name) and node.id in imported

    written = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        written += [t for t in targets if isinstance(t, (ast.Attribute, ast.Subscript)) and of_torch(t.value)]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and of_torch(node.args[0]):
            written.append(node)
    return [ast.unparse(node) for node in written]


def test_assignments_are_recognised() -> None:
    source = """
import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup
F.relu = relu
torch.masked.sum, other = mine, 1
torch.Tensor.name = 1
ProcessGroup.gather = gather
setattr(torch.optim.SGD, name, step)
mine.relu = F.relu
"""
    assert assigned_in_torch(source) == [
        "F.relu", "torch.Tensor.name", "ProcessGroup.gather", "setattr(torch.optim.SGD, name, step)"
    ]  # fmt: skip


def test_nothing_is_assigned_in_torch_elsewhere() -> None:
    def module(path: Path) -> str:
        return path.relative_to(ROOT).as_posix()

    written = {
        module(path): assigned_in_torch(path.read_text(encoding="utf-8"))
        for package in ("masked_dispatch", "op_registry")
        for path in (ROOT / package).rglob("*.py")
        if not module(path).startswith(("masked_dispatch/replacements.py", "op_registry/conformance/"))
    }
    assert {path: names for path, names in written.items() if names} == {}


def test_a_name_that_is_not_listed_may_not_be_replaced() -> None:
    with pytest.raises(
        LookupError, match=r"torch\.nn\.functional\.relu may not be replaced: .*replacements does not list it"
    ):
        replace(F, "relu", F.gelu, replacements.no_call)


# --------------------------------------------------------------------------------------------------------- each of them


def test_there_is_a_call_for_each() -> None:
    assert GIVEN.keys() == AT_IMPORT.keys()


@pytest.mark.parametrize("name", GIVEN)
def test_a_plain_call_is_torchs_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = outcome(GIVEN[name], lambda data: data)
    with patches(False):
        off = outcome(GIVEN[name], lambda data: data)
    owner, _, attribute = name.rpartition(".")
    if attribute.endswith("]"):
        registered = torch.utils.data._utils.collate.default_collate_fn_map
        monkeypatch.setitem(registered, Tensor, inspect.unwrap(registered[Tensor]))
    else:
        holder = eval(owner.replace("torch.ScriptMethod", "torch._C.ScriptMethod"), {"torch": torch})
        there = inspect.getattr_static(holder, attribute)
        method = isinstance(there, classmethod)
        own = inspect.unwrap(there.__func__ if method else there)
        monkeypatch.setattr(holder, attribute, classmethod(own) if method else own)
    theirs = outcome(GIVEN[name], lambda data: data)
    for result in (mine, off):
        assert type(result) is type(theirs)
        assert torch.equal(result, theirs) if isinstance(theirs, Tensor) else result == theirs


@pytest.mark.parametrize("name", [name for name in GIVEN if name != "torch.storage.UntypedStorage.__repr__"])
def test_a_masked_call_that_relies_on_one_raises_while_it_is_off(name: str) -> None:
    with patches(False), pytest.raises(RuntimeError) as error:
        GIVEN[name](masked)
    raised = error.value.__cause__ or error.value  # assert_close shows where it happened
    assert isinstance(raised, md.MaskedSemanticsError)
    said = str(raised)
    asked = name.replace("handle_torch_function", "has_torch_function")  # which torch calls first
    assert f"{asked} of masked tensors needs the replacement by masked_dispatch, which" in said
    assert said.endswith(
        "Switch it on, masked_dispatch.patches(True), or call it with plain tensors: x.to_tensor(value)."
    )
    assert not str(outcome(GIVEN[name], masked)).startswith(asked)


def test_what_no_argument_tells_is_torchs_own_while_it_is_off() -> None:
    storage = masked(ROWS).untyped_storage()
    assert "device=cpu" in repr(storage)
    with patches(False), pytest.raises(RuntimeError, match="its data is not allocated yet"):
        repr(storage)


# ---------------------------------------------------------------------------------------------------------- the switch


def test_a_call_switches_and_a_block_switches_back() -> None:
    with patches(False):
        assert not replacements._on
        with patches(True):
            assert replacements._on
        assert not replacements._on
        patches(True)
        assert replacements._on
    assert replacements._on


def test_the_switch_takes_a_bool() -> None:
    with pytest.raises(TypeError, match=r"^patches takes True or False, not 'off' of type str$"):
        patches("off")  # type: ignore[arg-type]


def test_arguments_are_passed_on_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def original(*args: Any, **kwargs: Any) -> str:
        seen.append((args, kwargs))
        return "torch's"

    owner = types.ModuleType("torch.masked")
    owner.sum = original  # type: ignore[attr-defined]
    replace(owner, "sum", lambda theirs, *args, **kwargs: ("ours", theirs), lambda first, **kwargs: first == "masked")
    one = object()
    assert owner.sum(one, key=one) == "torch's"  # type: ignore[attr-defined]
    assert seen == [((one,), {"key": one})]
    assert owner.sum("masked") == ("ours", original)  # type: ignore[attr-defined]
    assert replacements.is_replaced(owner, "sum")
