"""Masked tensors in several processes, on torch.distributed.

torch.distributed's own functions accept masked tensors without any call to this module. Its `sum`, `mean`, `var` and
`count` reduce over the valid elements of all ranks, and `mean_loss` computes the loss for data-parallel training.

collectives.py     the semantics of each collective, and the kernels that receive torch.distributed's calls
calls.py           the operands, the agreement, the messages and the results of one collective
sparse_calls.py    what differs for sparsely stored tensors: their entries in a message, and their union
point_to_point.py  send and recv
agreement.py       the descriptions that ranks exchange before they send data
records.py         reductions of dense records, and their masks in a message
extents.py         extents: what ranks state of them, and the booleans that travel with masks
messages.py        plain tensors sent between ranks; validity packed into bit fields
training.py        sums, means, variances, counts and a loss over all ranks; a hook that sends the largest gradients
checkpoints.py     torch.distributed.checkpoint: the saved entries, the checks of a load, copies for async_save
distributed_tensors.py  masked tensors of distributed tensors (DTensor), tensor parallel modules, FSDP2
functional_operators.py  torch's functional collectives: the same collectives, which return new tensors
"""

import importlib as _importlib

from torch import distributed as _distributed

if _distributed.is_available():
    from masked_dispatch.distributed import collectives, distributed_tensors
    from masked_dispatch.distributed import functional_operators as _functional_operators
    from masked_dispatch.distributed.distributed_tensors import (
        distribute,
        from_local,
        full_tensor,
        redistribute,
        to_local,
    )
    from masked_dispatch.distributed.training import TopK, count, mean, mean_loss, sum, topk_hook, var
    from masked_dispatch.process import when_imported as _when_imported

    __all__ = [
        "TopK",
        "count",
        "distribute",
        "from_local",
        "full_tensor",
        "mean",
        "mean_loss",
        "redistribute",
        "sum",
        "to_local",
        "topk_hook",
        "var",
    ]
else:
    __all__ = []


def __dir__() -> list[str]:
    return [*__all__]


def install() -> None:
    """The package calls this once, on import. Some builds of torch lack torch.distributed."""
    if _distributed.is_available():
        collectives.install()
        _functional_operators.install()
        distributed_tensors.install_sharded_parameters()
        _when_imported("torch.distributed.checkpoint", _install_checkpoints)
        _when_imported("torch.distributed.tensor", distributed_tensors.install_refusals)
        _when_imported("torch.distributed.tensor.parallel.style", distributed_tensors.install_styles)


def _install_checkpoints() -> None:
    # The import happens here because it loads torch.distributed.checkpoint, which takes almost as long as torch itself.
    _importlib.import_module("masked_dispatch.distributed.checkpoints").install()
