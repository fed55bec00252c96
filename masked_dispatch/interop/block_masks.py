"""Convert from and to FlexAttention's BlockMask, which lists the keys that each query attends to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from masked_dispatch.interop.crossing import as_masked, mask_of, takes
from masked_dispatch.interop.sequences import positions_of
from masked_dispatch.tensor.masked_tensor import MaskedTensor


@takes(scores=Tensor, block_mask=BlockMask)
def from_block_mask(scores: Tensor, block_mask: BlockMask) -> MaskedTensor:
    """Mask attention scores of shape (B, H, Q, K): valid where the block mask lets a query attend; differentiable.

    Elements outside of all listed blocks are invalid, elements in full blocks are valid. The mask has as many elements
    as the scores.

    Raises ValueError for a block mask of another shape; B = 1 or H = 1 broadcasts.
    """
    batch, heads, queries, keys = block_mask.shape
    wanted = tuple(scores.shape)
    if scores.ndim != 4 or batch not in (1, wanted[0]) or heads not in (1, wanted[1]) or wanted[2:] != (queries, keys):
        raise ValueError(f"a block mask of shape {tuple(block_mask.shape)} does not fit scores of shape {wanted}")
    device = str(scores.device)
    inside = create_mask(block_mask.mask_mod, batch, heads, queries, keys, device=device)
    mask = inside & elements(block_mask, block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        mask = mask | elements(block_mask, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return as_masked(scores, mask)


def elements(block_mask: BlockMask, counts: Tensor, indices: Tensor) -> Tensor:
    """Return which elements lie in the listed blocks: each row of blocks lists the first `counts` of its `indices`."""
    columns = indices.shape[-1]
    listed = torch.arange(columns, device=indices.device) < counts[..., None]
    blocks = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    blocks = blocks.scatter(-1, torch.where(listed, indices, columns).to(torch.int64), True)[..., :columns]
    of_queries, of_keys = block_mask.BLOCK_SIZE
    _, _, queries, keys = block_mask.shape
    by_row = blocks.repeat_interleave(of_queries, -2)[..., :queries, :]
    return by_row.repeat_interleave(of_keys, -1)[..., :keys]


@takes(scores=Tensor)
def to_block_mask(scores: Tensor, block_size: int | tuple[int, int] = 128) -> BlockMask:
    """Build a BlockMask that lets queries attend where scores of shape (B, H, Q, K) are valid.

    Raises ValueError for other dimensions.
    """
    if scores.ndim != 4:
        raise ValueError(
            f"scores of attention have shape (B, H, Q, K), not {tuple(scores.shape)}; for the padding of a batch "
            "(B, T, ...) use to_key_block_mask"
        )
    mask = mask_of(scores)
    batch, heads, queries, keys = scores.shape
    return create_block_mask(
        lambda b, h, q, k: mask[b, h, q, k],
        *(batch, heads, queries, keys),
        device=scores.device,
        BLOCK_SIZE=block_size,
    )


@takes(x=Tensor)
def to_key_block_mask(x: Tensor, queries: int | None = None, block_size: int | tuple[int, int] = 128) -> BlockMask:
    """Build a BlockMask that hides the padding of a batch (B, T, …) of keys from `queries` queries (by default T).

    Raises ValueError for a partly valid position.
    """
    valid = positions_of(x, "a BlockMask")
    batch, keys = valid.shape
    return create_block_mask(
        lambda b, h, q, k: valid[b, k],
        *(batch, None, keys if queries is None else queries, keys),
        device=x.device,
        BLOCK_SIZE=block_size,
    )
