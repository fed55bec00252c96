"""Data-parallel training that sends only the largest gradients, as sparse masked tensors, with error feedback.

Each rank keeps the elements that it does not send and adds them to its next gradient (Seide et al. 2014; Stich et al.
2018), so compression delays gradients but loses none.
"""

# Python evaluates the annotations of this module, because DistributedDataParallel checks those of a hook.
import math

import torch
from torch import Tensor, distributed
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]

from masked_dispatch.api.construct import mask_like
from masked_dispatch.api.sparsify import sparse_topk
from masked_dispatch.tensor.masked_tensor import MaskedTensor


class TopK:
    """The state of `topk_hook`: the gradients that one rank has not sent yet.

    share  the share of each bucket's elements that the rank sends, between 0 and 1
    group  the process group, by default torch's default group

    `state.sent` counts the gradient elements that this rank has sent, `state.elements` all that it has computed.
    """

    def __init__(self, share: float, group: ProcessGroup | None = None) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share has to be between 0 and 1, the part of the gradients to send; got {share}")
        self.share = share
        self.group = group
        self.sent = 0
        self.elements = 0
        # The key is the parameter, because DistributedDataParallel rebuilds its buckets after the first step.
        self._unsent: dict[Tensor, Tensor] = {}

    def largest(self, bucket: GradBucket) -> MaskedTensor:
        """Return the largest elements of the bucket plus its unsent remainder, shape (elements of the bucket,)."""
        whole, parameters, gradients = bucket.buffer(), bucket.parameters(), bucket.gradients()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter in self._unsent:
                gradient += self._unsent[parameter]
        sent = mask_like(whole, sparse_topk(whole.abs(), math.ceil(self.share * len(whole))))
        self.sent += sent.nnz
        self.elements += len(whole)
        whole.copy_(torch.zeros_like(sent))  # a masked update: writes 0 where the rank sends the element
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self._unsent[parameter] = gradient.clone()
        return sent


def topk_hook(state: TopK, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Compress gradients in DistributedDataParallel: ``model.register_comm_hook(TopK(0.01), topk_hook)``.

    Each rank sends its gradients of largest magnitude; the average over ranks counts unsent elements as 0.
    """
    sent = state.largest(bucket)
    distributed.all_reduce(sent, group=state.group)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(sent.to_tensor(0) / distributed.get_world_size(state.group))
    return done
