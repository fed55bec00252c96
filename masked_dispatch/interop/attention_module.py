"""Run F.multi_head_attention_forward, which nn.MultiheadAttention calls, as one operator on masked tensors.

torch implements the function in Python, so dispatch only sees its individual operators. This module therefore wraps the
function, and calls the operator of op_registry/ops/attention/modules.py for masked tensors in eager mode, if the
operator computes the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from masked_dispatch.replacements.replacing import replace
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.torch_internals import plain_eager
from op_registry.ops.attention.modules import OPERATOR

lines_of_torch = F.multi_head_attention_forward
_signature = inspect.signature(lines_of_torch)


def has_masked_operand(*args: Any, **kwargs: Any) -> bool:
    """Return whether a call in eager mode has a masked query, key or value."""
    return not torch.compiler.is_compiling() and any(isinstance(a, MaskedTensor) for a in args[:3]) and plain_eager()


def multi_head_attention_forward(lines_of_torch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace torch's function of this name."""
    bound = _signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if not is_one_operator(given):
        return lines_of_torch(*args, **kwargs)
    dropout_p = given["dropout_p"] if given["training"] else 0.0
    query, key, value, *others = (given[name] for name in _OPERANDS)
    keys, values = None if key is query else key, None if value is key else value
    return OPERATOR(query, keys, values, *others, dropout_p, given["is_causal"]), None


_PROJECTIONS = ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias")
_OPERANDS = ("query", "key", "value", "num_heads", *_PROJECTIONS)
_WITHOUT = ("bias_k", "bias_v", "key_padding_mask", "static_k", "static_v")
_NOT = ("add_zero_attn", "use_separate_proj_weight", "need_weights")


def is_one_operator(given: dict[str, Any]) -> bool:
    """Return whether the operator supports these arguments; False for wrong ones, so that torch raises the error."""
    query, key, value, width = (given[name] for name in ("query", "key", "value", "embed_dim_to_check"))
    # With `is_causal=True`, torch trusts the flag and ignores the mask's values.
    causal = given["attn_mask"] is not None
    if causal != given["is_causal"] or any(given[name] for name in _NOT) or any(given[n] is not None for n in _WITHOUT):
        return False
    return (
        query.ndim == key.ndim == 3
        and 0 not in query.shape
        and 0 not in key.shape
        and query.shape[1:] == key.shape[1:]
        and key.shape == value.shape
        and query.shape[-1] == width
        and width % given["num_heads"] == 0
        and given["in_proj_weight"].shape == (3 * width, width)
        and given["out_proj_weight"].shape == (width, width)
    )


def install() -> None:
    """The package calls this once, on import."""
    called = replace(F, lines_of_torch.__name__, multi_head_attention_forward, has_masked_operand)
    called.__prepare_scriptable__ = lambda: lines_of_torch  # TorchScript compiles torch's function
