"""Masked tensors in several processes, on torch.distributed.

torch.distributed's own functions take masked tensors; nothing has to be called here for that. `sum`, `mean`, `var` and
`count` are over the valid elements of all ranks, and `mean_loss` is the loss of data-parallel training.

collectives.py     what each collective means, and who sends what
sparse_collectives.py  the same of sparsely stored tensors
point_to_point.py  send and recv
agreement.py       what the ranks tell each other first
records.py         reductions and movements of dense records
operands.py        tensors as records, and results written to tensors
fields.py          validity on the wire
entries.py         sparse records on the wire, and their union
transport.py       plain tensors between ranks
works.py           what an asynchronous collective returns
statistics.py      sums, means, variances and counts over all ranks; the loss of data-parallel training
compression.py     sending the largest gradients only
checkpoints.py     torch.distributed.checkpoint: what is written, and what is refused
staging.py         copies for asynchronous checkpoints
sharded_parameters.py  masked parameters under FSDP2
distributed_tensors.py  masked tensors of distributed tensors (DTensor)
parallel_modules.py  tensor parallel modules
kernels.py         where torch.distributed's calls arrive
functional_operators.py  torch's functional collectives
sparse_functional.py  the same of sparsely stored tensors
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
    """Called once, when the package is imported; torch may have been built without torch.distributed."""
    if _distributed.is_available():
        _kernels.install()
        _functional_operators.install()
        _sharded_parameters.install()
        _when_imported("torch.distributed.checkpoint", _install_checkpoints)
        _when_imported("torch.distributed.tensor", _parallel_modules.install_refusals)
        _when_imported("torch.distributed.tensor.parallel.style", _parallel_modules.install_styles)


def _install_checkpoints() -> None:
    # Imported now, because it imports torch.distributed.checkpoint, which takes almost as long as torch.
    _importlib.import_module("masked_dispatch.distributed.checkpoints").install()
