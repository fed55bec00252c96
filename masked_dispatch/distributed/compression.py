"""Data-parallel training that sends the largest gradients only, as sparse masked tensors, with error feedback.

The elements that are not sent are remembered and added to the next gradient (Seide et al. 2014; Stich et al. 2018), so
that nothing is lost, only delayed.
"""

# Annotations are evaluated here: DistributedDataParallel compares those of a hook.
import math

import torch
from torch import Tensor, distributed
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]

from masked_dispatch.api.construct import mask_like
from masked_dispatch.api.sparsify import sparse_topk
from masked_dispatch.tensor.masked_tensor import MaskedTensor


class TopK:
    """The state of `topk_hook`: what one rank has not sent yet.

    share  the share of each bucket's elements that is sent, between 0 and 1
    group  the process group; the default one, if not given

    `state.sent` and `state.elements` count the gradients that this rank has sent, of so many that it had.
    """

    def __init__(self, share: float, group: ProcessGroup | None = None) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share is the share of the gradients that is sent, between 0 and 1; got {share}")
        self.share = share
        self.group = group
        self.sent = 0
        self.elements = 0
        # By parameter: DistributedDataParallel arranges its buckets anew after the first step.
        self._unsent: dict[Tensor, Tensor] = {}

    def largest(self, bucket: GradBucket) -> MaskedTensor:
        """The largest elements of a bucket and of what is left of earlier ones, shape (elements of the bucket,)."""
        whole, parameters, gradients = bucket.buffer(), bucket.parameters(), bucket.gradients()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter in self._unsent:
                gradient += self._unsent[parameter]
        sent = mask_like(whole, sparse_topk(whole.abs(), math.ceil(self.share * len(whole))))
        self.sent += sent.nnz
        self.elements += len(whole)
        whole.copy_(torch.zeros_like(sent))  # an update: 0 where it is sent
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self._unsent[parameter] = gradient.clone()
        return sent


def topk_hook(state: TopK, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook for DistributedDataParallel: ``model.register_comm_hook(TopK(0.01), topk_hook)``.

    Each rank sends its largest gradients by magnitude; the average over ranks counts what a rank did not send as 0.
    """
    sent = state.largest(bucket)
    distributed.all_reduce(sent, group=state.group)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(sent.to_tensor(0) / distributed.get_world_size(state.group))
    return done
