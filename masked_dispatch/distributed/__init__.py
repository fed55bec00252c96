"""Masked tensors in several processes, on torch.distributed.

torch.distributed's own functions accept masked tensors without any call to this module. Its `sum`, `mean`, `var` and
`count` reduce over the valid elements of all ranks, and `mean_loss` computes the loss for data-parallel training.

collectives.py     the semantics of each collective
calls.py           the agreement, the messages and the results of one collective
sparse_calls.py    the same for sparsely stored tensors
point_to_point.py  send and recv
agreement.py       the descriptions that ranks exchange before they send data
records.py         reductions and movements of dense records
operands.py        conversion of tensors to records, and of results to tensors
extents.py         extents: what ranks state of them, and the booleans that travel with masks
fields.py          validity packed into bit fields for messages
entries.py         sparse records packed into messages, and their union
transport.py       plain tensors sent between ranks
works.py           the Work that an asynchronous collective returns
statistics.py      sums, means, variances and counts over all ranks; the loss for data-parallel training
compression.py     a hook that sends only the largest gradients
checkpoints.py     torch.distributed.checkpoint: the saved entries, and the checks of a load
staging.py         copies for asynchronous checkpoints
sharded_parameters.py  masked parameters under FSDP2
distributed_tensors.py  masked tensors of distributed tensors (DTensor)
parallel_modules.py  tensor parallel modules
kernels.py         kernels of the `c10d` operators, which receive torch.distributed's calls
functional_operators.py  torch's functional collectives
sparse_functional.py  functional collectives of sparsely stored tensors
"""

import importlib as _importlib

from torch import distributed as _distributed

if _distributed.is_available():
    from masked_dispatch.distributed import functional_operators as _functional_operators
    from masked_dispatch.distributed import kernels as _kernels
    from masked_dispatch.distributed import parallel_modules as _parallel_modules
    from masked_dispatch.distributed import sharded_parameters as _sharded_parameters
    from masked_dispatch.distributed.compression import TopK, topk_hook
    from masked_dispatch.distributed.distributed_tensors import (
        distribute,
        from_local,
        full_tensor,
        redistribute,
        to_local,
    )
    from masked_dispatch.distributed.statistics import count, mean, mean_loss, sum, var
    from masked_dispatch.later_import import when_imported as _when_imported

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
        _kernels.install()
        _functional_operators.install()
        _sharded_parameters.install()
        _when_imported("torch.distributed.checkpoint", _install_checkpoints)
        _when_imported("torch.distributed.tensor", _parallel_modules.install_refusals)
        _when_imported("torch.distributed.tensor.parallel.style", _parallel_modules.install_styles)


def _install_checkpoints() -> None:
    # The import happens here because it loads torch.distributed.checkpoint, which takes almost as long as torch itself.
    _importlib.import_module("masked_dispatch.distributed.checkpoints").install()
