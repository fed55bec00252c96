"""Attention of sequences of different lengths by torch's kernels on a GPU, which read the bounds there.

A kernel takes the rows of all sequences, (n, heads, features), the first row of each sequence with the end of the last
one, and a number that no length exceeds. The length of the padded batch is such a number, and the host knows it. So the
host waits for nothing, and a graph holds one call for batches of any lengths. Autograd and the compiler know the
kernels. These are the demands of torch 2.11 to 2.15:

    flash      float16 or bfloat16; features a multiple of 8, at most 256; compute capability 8.0
    efficient  these dtypes or float32; features a multiple of 16 bytes
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten

# The devices with these kernels.
DEVICES = ["cuda"]


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a kernel takes such rows, of one dtype and one number of features."""
    if query.device.type not in DEVICES or len({(x.shape[-1], x.dtype) for x in (query, key, value)}) > 1:
        return False
    return takes_flash(query) or _takes_efficient(query)


def takes_flash(rows: Tensor) -> bool:
    features = rows.shape[-1]
    fits = rows.dtype in (torch.float16, torch.bfloat16) and features % 8 == 0 and features <= 256
    return fits and torch.backends.cuda.is_flash_attention_available() and _capability(rows.device) >= (8, 0)


def _takes_efficient(rows: Tensor) -> bool:
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    return rows.dtype in dtypes and rows.shape[-1] * rows.element_size() % 16 == 0


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    most_queries: int,
    most_keys: int,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """The outputs (n, H, E). Bounds are int32; queries without keys have 0.

    Keys and values may have fewer heads, of which each serves as many successive heads of the queries.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (key, value))
    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)]
    sequences = query_bounds, key_bounds, most_queries, most_keys
    if takes_flash(query):
        output: Tensor = aten._flash_attention_forward(*rows, *sequences, 0.0, is_causal, False, scale=scale)[0]
        return output
    batches = [x.unsqueeze(0) for x in rows]
    # (The kernel's number for causality: a query sees keys up to its own index.)
    outputs: Tensor = aten._efficient_attention_forward(
        *batches, None, *sequences, 0.0, int(is_causal), True, scale=scale
    )[0]
    return outputs.squeeze(0)
