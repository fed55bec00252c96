"""What this library replaces in torch, for the whole process.

torch calls a kernel of ours for each operator with a masked tensor; plain tensors never get there. Some of torch is no
operator: functions written in Python whose lines mean something else when each is masked by itself, methods of process
groups, and parts of the compiler. Of these, what TABLE lists is replaced, by `replace` and nowhere else. A call that
concerns no masked tensor goes to torch's own, with the same arguments. docs/replaced_in_torch.md shows the table.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from types import ClassMethodDescriptorType, TracebackType
from typing import Any, NamedTuple

from op_registry.errors import MaskedSemanticsError

# ------------------------- how a function, a method or an entry of a table of torch is replaced, and the switch for all

# Takes torch's own function, and the arguments of a call.
Serving = Callable[..., Any]
# From the arguments of a call: whether it is to be served here. Calls that are not go to torch's own.
Concerns = Callable[..., bool]

_on = True


def no_call(*args: Any, **kwargs: Any) -> bool:
    """The `concerns` of a replacement whose calls do not tell by their arguments: none raises while it is off."""
    return False


def replace(owner: Any, name: str, serving: Serving, concerns: Concerns, *, always: bool = False) -> Any:
    """Replace a function of a module, or a method of a class, by one that serves the calls that `concerns` tells.

    always  whether `serving` gets every call while the switch is on; `concerns` then tells which ones rely on it

    Returns the function that is there now. Raises LookupError for a name that TABLE does not list.
    """
    there = inspect.getattr_static(owner, name)
    called = serving_instead(f"{name_of(owner)}.{name}", _as_function(there), serving, concerns, always)
    if isinstance(there, (classmethod, ClassMethodDescriptorType)):
        setattr(owner, name, classmethod(called))
    else:
        setattr(owner, name, staticmethod(called) if isinstance(there, staticmethod) else called)
    return called


def _as_function(there: Any) -> Callable[..., Any]:
    """Return torch's attribute as a function. That of a class method takes the class first."""
    if isinstance(there, ClassMethodDescriptorType):  # written in C

        @functools.wraps(there)
        def call(cls: type, *args: Any, **kwargs: Any) -> Any:
            return there.__get__(None, cls)(*args, **kwargs)

        return call
    return there.__func__ if isinstance(there, (classmethod, staticmethod)) else there


def put(owner: Any, name: str, value: object) -> None:
    """Give a class of torch an attribute, which TABLE lists."""
    listed(f"{name_of(owner)}.{name}")
    setattr(owner, name, value)


def replace_entry(table: MutableMapping[Any, Any], key: Any, what: str, serving: Serving, concerns: Concerns) -> None:
    """The same of a function in a table of torch, which TABLE lists as `what`."""
    table[key] = serving_instead(what, table[key], serving, concerns)


def serving_instead(
    what: str, original: Callable[..., Any], serving: Serving, concerns: Concerns, always: bool = False
) -> Any:
    """The function in torch's place."""
    row = listed(what)

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if always and _on:
            return serving(original, *args, **kwargs)
        if not concerns(*args, **kwargs):
            return original(*args, **kwargs)
        if not _on:
            raise switched_off(what, row)
        return serving(original, *args, **kwargs)

    called.replaces = what  # type: ignore[attr-defined]
    return called


def is_replaced(owner: Any, name: str) -> bool:
    """Whether it has been replaced before."""
    return hasattr(getattr(owner, name), "replaces")


def name_of(owner: Any) -> str:
    """The full name of a module or class."""
    if not isinstance(owner, type):
        return str(owner.__name__)
    # Some classes in C++ have their module in both.
    return owner.__qualname__ if "." in owner.__qualname__ else f"{owner.__module__}.{owner.__qualname__}"


def switched_off(what: str, row: Replacement) -> MaskedSemanticsError:
    """The error of a call that needs a replacement while they are switched off."""
    return MaskedSemanticsError(
        f"{what} of masked tensors needs the replacement by masked_dispatch, which masked_dispatch.patches(False) "
        f"has switched off. Without it, {row.without}. Switch it on, masked_dispatch.patches(True), or call it with "
        "plain tensors: x.to_tensor(value)."
    )


class patches:
    """Switch the functions that this library replaces in torch off, or on again, for the whole process.

    While they are off, a call that needs a replacement raises :class:`MaskedSemanticsError`; every other call is
    torch's own, whatever its arguments. As with ``torch.set_grad_enabled``, a call switches at once, and a ``with``
    block switches back at its end. The page `What is replaced in torch` lists the replacements.

    on  whether the replacements serve masked calls
    """

    def __init__(self, on: bool) -> None:
        global _on
        if not isinstance(on, bool):
            raise TypeError(f"patches takes True or False, not {on!r} of type {type(on).__name__}")
        self.before, _on = _on, on

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        global _on
        _on = self.before


# ------------------------------------------------------------------------------------------------------------ the table

IMPORT = "with the library"
GRAPH = "with the first masked tensor in a graph"
SCOPE = "with the first scope"
CHECKPOINTS = "with torch.distributed.checkpoint"
TENSORS = "with torch.distributed.tensor"
_STYLES = "torch.distributed.tensor.parallel.style"
OLDEST = "2.11"


class Replacement(NamedTuple):
    """Functions that are replaced for one reason.

    places   their names, separated by spaces, by the module, class or table that they belong to
    without  what a masked call would come to without the replacement
    checked  the test file of what the replacement does, or the number of the assumption about torch that it rests on
    when     when they are replaced
    since    the first tested torch that has them
    until    the first tested torch that serves such calls itself; None if none does
    """

    places: Mapping[str, str]
    without: str
    checked: str | int
    when: str = IMPORT
    since: str = OLDEST
    until: str | None = None

    @property
    def whole_names(self) -> list[str]:
        """The names with their owner's."""
        pairs = [(owner, name) for owner, names in self.places.items() for name in names.split()]
        return [f"{owner}{name}" if name.startswith("[") else f"{owner}.{name}" for owner, name in pairs]


TABLE = (
    Replacement(
        {"torch.nn.functional": "multi_head_attention_forward"},
        "each operator of the function runs its own rule: the result is the same, but slower",
        "tests/interop/test_attention_module.py",
    ),
    Replacement(
        {"torch.masked": "sum prod mean amax amin logsumexp argmax argmin var std median norm"},
        "torch's Python code would ignore the mask of a masked tensor, and divide by sizes",
        "tests/interop/test_torch_masked.py",
    ),
    Replacement(
        dict.fromkeys(("torch.nn.utils.convert_parameters", "torch.nn.utils"), "vector_to_parameters"),
        "a plain parameter would get the data of a masked vector, and reading it would crash the process",
        "tests/interop/test_parameter_vectors.py",
    ),
    Replacement(
        {
            "torch.distributions.multivariate_normal.MultivariateNormal": "__init__",
            "torch.distributions.lowrank_multivariate_normal.LowRankMultivariateNormal": "__init__ log_prob",
            "torch.distributions.wishart.Wishart": "__init__",
            "torch.distributions.lkj_cholesky.LKJCholesky": "log_prob",
            "torch.distributions.transforms.CorrCholeskyTransform": "_call _inverse log_abs_det_jacobian",
            "torch.distributions.transforms.StickBreakingTransform": "_call _inverse log_abs_det_jacobian",
            "torch.distributions.transforms.PositiveDefiniteTransform": "_call",
        },
        "torch's Python code would treat a partly valid row or matrix as valid",
        "tests/interop/test_distributions.py",
    ),
    Replacement(
        dict.fromkeys(("torch._lobpcg", "torch._lowrank"), "has_torch_function handle_torch_function"),
        "torch's Python code would count the invalid elements of a matrix as zeros",
        "tests/interop/test_low_rank.py",
    ),
    Replacement(
        dict.fromkeys(("torch.jit.ScriptFunction", "torch.ScriptMethod"), "__call__"),
        "the backward of TorchScript would divide by sizes instead of numbers of valid elements",
        30,
    ),
    Replacement(
        {"torch.nn.modules.module.Module": "_load_from_state_dict"},
        "a padded parameter or buffer that loads a state would keep only the positions that it had before",
        "tests/extents/test_restored.py",
    ),
    Replacement(
        {"torch.utils.data._utils.collate.default_collate_fn_map": "[torch.Tensor]"},
        "a worker process would stack masked examples into plain memory",
        18,
    ),
    Replacement(
        dict.fromkeys(("torch", "torch.utils.dlpack"), "to_dlpack"),
        "the error message says only that the tensor has no memory",
        "tests/tensor/test_texts_of_refusals.py",
    ),
    Replacement(
        {"torch.storage.UntypedStorage": "__repr__"},
        "printing the storage of a masked tensor raises an error",
        "tests/tensor/test_texts_of_refusals.py",
    ),
    Replacement(
        {"torch.testing._comparison.TensorLikePair": "compare"},
        "`torch.testing.assert_close` ignores masks and invalid elements",
        26,
    ),
    Replacement(
        {"torch.autograd.function.Function": "apply"},
        "the backward of an autograd function could lose gradients: if one summand of a gradient is absent, the sum "
        "would be absent too",
        "tests/autograd/test_functions_of_others.py",
    ),
    Replacement(
        {"torch._vmap_internals": "_unwrap_batched"},
        "`jacobian(vectorize=True)` and `is_grads_batched=True` cannot return masked gradients",
        35,
    ),
    Replacement(
        {"torch.distributed.distributed_c10d.ProcessGroup": "allgather gather scatter reduce_scatter"},
        "collectives do not see masked tensors in lists of lists of tensors",
        "tests/slow/distributed/test_collectives.py",
    ),
    *(
        Replacement(
            {f"torch.distributed.checkpoint.{owner}": names for owner, names in places.items()},
            without,
            "tests/distributed/test_checkpoints.py",
            CHECKPOINTS,
        )
        for places, without in (
            (
                {"default_planner.DefaultLoadPlanner": "create_local_plan"},
                "entries of a checkpoint with the wrong kind, dtype, shape or storage are loaded",
            ),
            (
                {"default_planner.DefaultLoadPlanner": "resolve_tensor commit_tensor"},
                "the extent of a padded batch is not loaded from a checkpoint",
            ),
            (
                {"default_planner.DefaultSavePlanner": "create_global_plan"},
                "a plain and a masked tensor could be saved under the same name",
            ),
            (
                {"filesystem.FileSystemReader": "prepare_local_plan"},
                "truncated files of a checkpoint are read without an error",
            ),
            (
                {"staging.DefaultStager": "stage", "staging.BlockingAsyncStager": "stage"},
                "masks are not copied before an asynchronous save, so training changes them",
            ),
        )
    ),
    Replacement(
        {"torch.distributed.tensor.DTensor": "from_local", "torch.distributed.tensor": "distribute_tensor"},
        "a DTensor could be made from a masked tensor, and would lose the mask",
        42,
        TENSORS,
    ),
    Replacement(
        {"torch.distributed.tensor._api": "distribute_tensor"},
        "`distribute_module` would distribute data without its mask",
        41,
        TENSORS,
    ),
    *(
        Replacement(places, without, 41, f"with {_STYLES}")
        for places, without in (
            ({_STYLES: "distribute_tensor"}, "a parallel style would distribute data without its mask"),
            ({_STYLES: "distribute_module"}, "the hooks of a parallel style would distribute data without its mask"),
            (
                {
                    f"{_STYLES}.PrepareModuleInput": "_prepare_input_arg",
                    f"{_STYLES}.PrepareModuleOutput": "_prepare_out_fn",
                },
                "inputs and outputs of a module would be distributed without their mask",
            ),
        )
    ),
    Replacement(
        {"torch._dynamo.variables.higher_order_ops.AutogradFunctionApplyVariable": "prepare_fn_vt"},
        "the backward of an autograd function is traced with masked gradients",
        "tests/thorough/autograd/test_functions_of_others_in_graphs.py",
        GRAPH,
    ),
    Replacement(
        {"torch._dynamo.trace_rules": "is_torch_inline_allowed"},
        "a graph breaks at each function of this library",
        49,
        GRAPH,
        until="2.12",
    ),
    Replacement(
        {"torch._dynamo.utils": "run_node"},
        "a refusal is reported as an internal error of Dynamo",
        38,
        GRAPH,
    ),
    Replacement(
        {"torch._dynamo.variables.higher_order_ops": "get_tensor_storages"},
        "`while_loop` looks for the storage of a masked tensor, which has none",
        12,
        GRAPH,
    ),
    Replacement(
        {"torch._higher_order_ops.utils": "_collect_fake_inputs"},
        "`cond` in a graph takes a masked operand for an error of Dynamo",
        12,
        GRAPH,
        until="2.13",
    ),
    Replacement(
        {"torch._dynamo.variables.tensor.TensorVariable": "method_new_tensor"},
        "a graph records the result of `x.new_tensor(data)` as a plain tensor",
        27,
        GRAPH,
        since="2.12",
    ),
    Replacement(
        {"torch._dynamo.variables.tensor.TensorVariable": "method___setitem__"},
        "a graph records a write to sparse storage without the new sizes",
        27,
        GRAPH,
    ),
    Replacement(
        {"torch._dynamo.variables.tensor.TensorVariable": "mp_ass_subscript_impl"},
        "a graph records a write to sparse storage without the new sizes",
        27,
        GRAPH,
        since="2.14",
    ),
    Replacement(
        {"torch._functorch._aot_autograd.runtime_wrappers.AOTDispatchAutograd": "process_runtime_tangent"},
        "backward raises for an output that the loss does not depend on",
        11,
        GRAPH,
    ),
    Replacement(
        {"torch._functorch._aot_autograd.runtime_wrappers": "gen_alias_from_base"},
        "a view that a graph returns begins at the wrong element",
        40,
        GRAPH,
    ),
    Replacement(
        {"torch._functorch._aot_autograd.subclass_parametrization": "unwrap_tensor_subclass_parameters"},
        "`run_decompositions` makes masks require grad",
        36,
        GRAPH,
    ),
    Replacement(
        {"torch.autograd.function.BackwardCFunction": "__init__ apply apply_boxed"},
        "the backward of a call inside a scope, such as `densify`, runs outside of the scope",
        29,
        SCOPE,
    ),
    Replacement(
        {"torch.utils.checkpoint._CheckpointFrame": "recompute_fn"},
        "activation checkpointing inside a scope computes activations again outside of the scope",
        29,
        SCOPE,
    ),
)

_BY_NAME = {name: row for row in TABLE for name in row.whole_names}


def listed(what: str) -> Replacement:
    """The row of a full name; raises LookupError if there is none."""
    if what not in _BY_NAME:
        raise LookupError(f"{what} may not be replaced: {__name__} does not list it")
    return _BY_NAME[what]
