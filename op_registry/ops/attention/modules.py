"""F.multi_head_attention_forward, by which nn.MultiheadAttention and the Transformer layers attend, as one operator.

Law: the laws of the operators that it calls. torch's function calls two dozen operators, and most of them only
rearrange heads; dispatching each of them on masked tensors costs several times its own work. We make the function one
operator, ``torch.ops.torch_nn_functional.multi_head_attention``, whose rule applies the same rules to the same records.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library

from op_registry.authoring import (
    ATTENTION,
    AnyRecord,
    ByArgument,
    Dense,
    Equation,
    Permuted,
    Sparse,
    call,
    masked_rule,
)
from op_registry.ops.attention.layers import Call, in_heads, merged_heads, on_dense, projections

aten = torch.ops.aten

_SCHEMA = (
    "multi_head_attention(Tensor query, Tensor? key, Tensor? value, int num_heads, Tensor in_proj_weight, "
    "Tensor? in_proj_bias, Tensor out_proj_weight, Tensor? out_proj_bias, float dropout_p=0.0, bool is_causal=False) "
    "-> Tensor"
)


def _attend(
    run: Call,
    query: Any,
    key: Any,
    value: Any,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    out_proj_weight: Any,
    out_proj_bias: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Any:
    """Queries (L, N, E), keys and values (S, N, E), None where they are the queries or the keys; gives (L, N, E)."""
    queries = run(aten.transpose.int, query, 0, 1)
    keys = queries if key is None else run(aten.transpose.int, key, 0, 1)
    values = keys if value is None else run(aten.transpose.int, value, 0, 1)
    projected = projections(run, (queries, keys, values), in_proj_weight, in_proj_bias)
    q, k, v = (in_heads(run, x, num_heads) for x in projected)
    mixed = run(aten.scaled_dot_product_attention.default, q, k, v, None, dropout_p, is_causal)
    result = run(aten.linear.default, merged_heads(run, mixed), out_proj_weight, out_proj_bias)
    return run(aten.transpose.int, result, 0, 1)


def _plain(*arguments: Any) -> Tensor:
    return _attend(lambda op, *args, **kwargs: op(*args, **kwargs), *arguments)


_library = Library("torch_nn_functional", "DEF")
_library.define(_SCHEMA)
_library.impl("multi_head_attention", _plain, "CompositeImplicitAutograd")
OPERATOR: OpOverload = torch.ops.torch_nn_functional.multi_head_attention.default


@masked_rule(
    OPERATOR,
    category=ATTENTION,
    dims=ByArgument("key", Equation("qne,knf,kng,?,?,?,?->qnO"), Equation("Qne,Qne,Qne,?,?,?,?->QnO")),
)
def multi_head_attention(query: Dense, key: Dense | None, value: Dense | None, num_heads: int, *rest: Any) -> Dense:
    return _attend(on_dense, query, key, value, num_heads, *rest)


@multi_head_attention.lowering(Sparse)
@multi_head_attention.lowering(Permuted)
def packed_multi_head_attention(op: OpOverload, *arguments: Any) -> AnyRecord:
    """Run each operator by its own lowering."""
    return _attend(call, *arguments)
