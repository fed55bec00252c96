"""The table of what is replaced in torch: docs/replaced_in_torch.md lists it, and replacing.py takes no other names."""

from __future__ import annotations

import re
from itertools import groupby
from textwrap import fill
from typing import NamedTuple

IMPORT = "with the library"
GRAPH = "with the first masked tensor in a graph"
SCOPE = "with the first scope"


class Replacement(NamedTuple):
    """One or several functions that are replaced for one reason.

    owner    the module, class or table that they belong to
    names    their names there
    when     when they are replaced
    without  what a masked call would come to without the replacement
    since    the first tested torch that has them
    checked  the test file of what the replacement does, or the number of the assumption about torch that it rests on
    """

    owner: str
    names: tuple[str, ...]
    when: str
    without: str
    since: str
    checked: str | int

    @property
    def whole_names(self) -> list[str]:
        """The names with their owner's."""
        return [f"{self.owner}{name}" if name.startswith("[") else f"{self.owner}.{name}" for name in self.names]


_DISTRIBUTIONS = "tests/interop/test_distributions.py"
_LINE_BY_LINE = "torch's Python code would treat a partly valid row or matrix as valid"
_CHECKPOINTS = "tests/distributed/test_checkpoints.py"
_STYLES = "torch.distributed.tensor.parallel.style"

TABLE = (
    Replacement(
        "torch.nn.functional",
        ("multi_head_attention_forward",),
        IMPORT,
        "each operator of the function runs its own rule: the result is the same, but slower",
        "2.13",
        "tests/interop/test_attention_module.py",
    ),
    Replacement(
        "torch.masked",
        ("sum", "prod", "mean", "amax", "amin", "logsumexp", "argmax", "argmin", "var", "std", "median", "norm"),
        IMPORT,
        "torch's Python code would ignore the mask of a masked tensor, and divide by sizes",
        "2.13",
        "tests/interop/test_torch_masked.py",
    ),
    *(
        Replacement(
            owner,
            ("vector_to_parameters",),
            IMPORT,
            "a plain parameter would get the data of a masked vector, and reading it would crash the process",
            "2.13",
            "tests/interop/test_parameter_vectors.py",
        )
        for owner in ("torch.nn.utils.convert_parameters", "torch.nn.utils")
    ),
    *(
        Replacement(f"torch.distributions.{owner}", names, IMPORT, _LINE_BY_LINE, "2.13", _DISTRIBUTIONS)
        for owner, names in (
            ("multivariate_normal.MultivariateNormal", ("__init__",)),
            ("lowrank_multivariate_normal.LowRankMultivariateNormal", ("__init__", "log_prob")),
            ("wishart.Wishart", ("__init__",)),
            ("lkj_cholesky.LKJCholesky", ("log_prob",)),
            ("transforms.CorrCholeskyTransform", ("_call", "_inverse", "log_abs_det_jacobian")),
            ("transforms.StickBreakingTransform", ("_call", "_inverse", "log_abs_det_jacobian")),
            ("transforms.PositiveDefiniteTransform", ("_call",)),
        )
    ),
    *(
        Replacement(
            owner,
            ("has_torch_function", "handle_torch_function"),
            IMPORT,
            "torch's Python code would count the invalid elements of a matrix as zeros",
            "2.13",
            "tests/interop/test_low_rank.py",
        )
        for owner in ("torch._lobpcg", "torch._lowrank")
    ),
    *(
        Replacement(
            owner,
            ("__call__",),
            IMPORT,
            "the backward of TorchScript would divide by sizes instead of numbers of valid elements",
            "2.13",
            30,
        )
        for owner in ("torch.jit.ScriptFunction", "torch.ScriptMethod")
    ),
    Replacement(
        "torch.utils.data._utils.collate.default_collate_fn_map",
        ("[torch.Tensor]",),
        IMPORT,
        "a worker process would stack masked examples into plain memory",
        "2.13",
        18,
    ),
    *(
        Replacement(
            owner,
            ("to_dlpack",),
            IMPORT,
            "the error message says only that the tensor has no memory",
            "2.13",
            "tests/tensor/test_texts_of_refusals.py",
        )
        for owner in ("torch", "torch.utils.dlpack")
    ),
    Replacement(
        "torch.storage.UntypedStorage",
        ("__repr__",),
        IMPORT,
        "printing the storage of a masked tensor raises an error",
        "2.13",
        "tests/tensor/test_texts_of_refusals.py",
    ),
    Replacement(
        "torch.testing._comparison.TensorLikePair",
        ("compare",),
        IMPORT,
        "`torch.testing.assert_close` ignores masks and invalid elements",
        "2.13",
        26,
    ),
    Replacement(
        "torch.autograd.function.Function",
        ("apply",),
        IMPORT,
        "the backward of an autograd function could lose gradients: if one summand of a gradient is absent, the sum "
        "would be absent too",
        "2.13",
        "tests/autograd/test_functions_of_others.py",
    ),
    Replacement(
        "torch._vmap_internals",
        ("_unwrap_batched",),
        IMPORT,
        "`jacobian(vectorize=True)` and `is_grads_batched=True` cannot return masked gradients",
        "2.13",
        35,
    ),
    Replacement(
        "torch.distributed.distributed_c10d.ProcessGroup",
        ("allgather", "gather", "scatter", "reduce_scatter"),
        IMPORT,
        "collectives do not see masked tensors in lists of lists of tensors",
        "2.13",
        "tests/slow/distributed/test_collectives.py",
    ),
    *(
        Replacement(owner, tuple(names.split()), "with torch.distributed.checkpoint", without, "2.13", _CHECKPOINTS)
        for owner, names, without in (
            (
                "default_planner.DefaultLoadPlanner",
                "create_local_plan",
                "entries of a checkpoint with the wrong kind, dtype, shape or storage are loaded",
            ),
            (
                "default_planner.DefaultLoadPlanner",
                "resolve_tensor commit_tensor",
                "the extent of a padded batch is not loaded from a checkpoint",
            ),
            (
                "default_planner.DefaultSavePlanner",
                "create_global_plan",
                "a plain and a masked tensor could be saved under the same name",
            ),
            (
                "filesystem.FileSystemReader",
                "prepare_local_plan",
                "truncated files of a checkpoint are read without an error",
            ),
            (
                "staging.DefaultStager",
                "stage",
                "masks are not copied before an asynchronous save, so training changes them",
            ),
            (
                "staging.BlockingAsyncStager",
                "stage",
                "masks are not copied before an asynchronous save, so training changes them",
            ),
        )
        for owner in (f"torch.distributed.checkpoint.{owner}",)
    ),
    *(
        Replacement(owner, (name,), f"with {module}", without, "2.13", checked)
        for module, owner, name, without, checked in (
            (
                "torch.distributed.tensor",
                "torch.distributed.tensor.DTensor",
                "from_local",
                "a DTensor could be made from a masked tensor, and would lose the mask",
                42,
            ),
            (
                "torch.distributed.tensor",
                "torch.distributed.tensor",
                "distribute_tensor",
                "a DTensor could be made from a masked tensor, and would lose the mask",
                42,
            ),
            (
                "torch.distributed.tensor",
                "torch.distributed.tensor._api",
                "distribute_tensor",
                "`distribute_module` would distribute data without its mask",
                41,
            ),
            (_STYLES, _STYLES, "distribute_tensor", "a parallel style would distribute data without its mask", 41),
            (
                _STYLES,
                _STYLES,
                "distribute_module",
                "the hooks of a parallel style would distribute data without its mask",
                41,
            ),
            (
                _STYLES,
                f"{_STYLES}.PrepareModuleInput",
                "_prepare_input_arg",
                "inputs and outputs of a module would be distributed without their mask",
                41,
            ),
            (
                _STYLES,
                f"{_STYLES}.PrepareModuleOutput",
                "_prepare_out_fn",
                "inputs and outputs of a module would be distributed without their mask",
                41,
            ),
        )
    ),
    *(
        Replacement(owner, (name,), GRAPH, without, since, checked)
        for owner, name, without, since, checked in (
            (
                "torch._dynamo.variables.higher_order_ops.AutogradFunctionApplyVariable",
                "prepare_fn_vt",
                "the backward of an autograd function is traced with masked gradients",
                "2.13",
                "tests/thorough/autograd/test_functions_of_others_in_graphs.py",
            ),
            ("torch._dynamo.utils", "run_node", "a refusal is reported as an internal error of Dynamo", "2.13", 38),
            (
                "torch._dynamo.variables.higher_order_ops",
                "get_tensor_storages",
                "`while_loop` looks for the storage of a masked tensor, which has none",
                "2.13",
                12,
            ),
            (
                "torch._dynamo.variables.tensor.TensorVariable",
                "method_new_tensor",
                "a graph records the result of `x.new_tensor(data)` as a plain tensor",
                "2.13",
                27,
            ),
            (
                "torch._dynamo.variables.tensor.TensorVariable",
                "method___setitem__",
                "a graph records a write to sparse storage without the new sizes",
                "2.13",
                27,
            ),
            (
                "torch._dynamo.variables.tensor.TensorVariable",
                "mp_ass_subscript_impl",
                "a graph records a write to sparse storage without the new sizes",
                "2.14",
                27,
            ),
            (
                "torch._functorch._aot_autograd.runtime_wrappers.AOTDispatchAutograd",
                "process_runtime_tangent",
                "backward raises for an output that the loss does not depend on",
                "2.13",
                11,
            ),
            (
                "torch._functorch._aot_autograd.runtime_wrappers",
                "gen_alias_from_base",
                "a view that a graph returns begins at the wrong element",
                "2.13",
                40,
            ),
            (
                "torch._functorch._aot_autograd.subclass_parametrization",
                "unwrap_tensor_subclass_parameters",
                "`run_decompositions` makes masks require grad",
                "2.13",
                36,
            ),
        )
    ),
    Replacement(
        "torch.autograd.function.BackwardCFunction",
        ("__init__", "apply", "apply_boxed"),
        SCOPE,
        "the backward of a call inside a scope, such as `densify`, runs outside of the scope",
        "2.13",
        29,
    ),
    Replacement(
        "torch.utils.checkpoint._CheckpointFrame",
        ("recompute_fn",),
        SCOPE,
        "activation checkpointing inside a scope computes activations again outside of the scope",
        "2.13",
        29,
    ),
)

_BY_NAME = {name: row for row in TABLE for name in row.whole_names}


def listed(what: str) -> Replacement:
    """The row of a full name; raises LookupError if there is none."""
    if what not in _BY_NAME:
        raise LookupError(f"{what} may not be replaced: {__name__} does not list it")
    return _BY_NAME[what]


def as_markdown() -> str:
    """The lists of docs/replaced_in_torch.md: one for each occasion, an item for each reason."""
    oldest = TABLE[0].since
    parts = []
    for when, rows in groupby(TABLE, lambda row: row.when):
        title = re.sub(r"torch[.\w]+", r"`\g<0>`", when.capitalize())
        parts.append(f"## {title}\n")
        for (without, since, checked), same in groupby(rows, lambda row: (row.without, row.since, row.checked)):
            owners = [f"`{row.owner}`: {', '.join(f'`{name}`' for name in row.names)}" for row in same]
            by = f"assumption {checked}" if isinstance(checked, int) else f"`{checked}`"
            later = "" if since == oldest else f" Torch has had this function since {since}."
            item = f"* {'; '.join(owners)}. Without the replacement, {without}. Test: {by}.{later}"
            parts.append(fill(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
        parts.append("")
    return "\n".join(parts)
