"""Masked tensors for PyTorch: a tensor subclass that carries a mask (True = valid) through every operator.

>>> import torch, masked_dispatch as md
>>> x = md.from_nan(torch.tensor([[1.0, float("nan")], [3.0, 4.0]]))
>>> x.mean(0)
masked_tensor([2., 4.], valid=2/2, True=valid)

Make one     masked_tensor, as_masked_tensor, from_nan, from_lengths, pad_sequence, pad_stack; interop: from and to
             NumPy, pandas, Arrow, tokenizers and others
Use it       torch's own functions, methods, modules and losses; here are its reductions and scans with skipna and
             min_count (sum, mean, cumsum …), accumulate, and the modules missing, metrics, optim, functional
             (torch.func) and distributed
Padding      padded; first, last, align, positions: of each sample's own positions
Convert      x.to_tensor(fill), x.get_mask(), x.compressed(); export, to a program of plain operators
Look inside  trace: where did validity go; audit: what sums, means and loops around it do; explain: one call; plot
Decide       densify, updates, windows, patches: with-blocks that allow, refuse or redefine calls
Extend       op_registry.authoring: a rule for your own operator; registry holds the rules

Documentation: README.md and docs/ of the repository, which `make docs` builds as a site: a tour, recipes by task, what
each operator means (docs/semantics.md), every public name (docs/reference.md), and how the library is built
(docs/architecture.md, which also lists the modules of this package).
"""

import typing as _typing

import torch as _torch

from masked_dispatch import callers, distributed, functional, interop, metrics, missing, optim, plot, testing, torchax
from masked_dispatch import versions as _versions
from masked_dispatch.api import known_words as _known_words
from masked_dispatch.api import reductions as _reductions
from masked_dispatch.api.construct import (
    as_masked_tensor,
    from_lengths,
    from_nan,
    is_masked_tensor,
    mask_like,
    masked_tensor,
    pad_sequence,
    pad_stack,
)
from masked_dispatch.api.export import export
from masked_dispatch.api.padding import align, first, last, padded, positions, windows
from masked_dispatch.api.reductions import (
    all,
    amax,
    amin,
    aminmax,
    any,
    argmax,
    argmin,
    cummax,
    cummin,
    cumprod,
    cumsum,
    kthvalue,
    logcumsumexp,
    logsumexp,
    max,
    mean,
    median,
    min,
    mode,
    nanmean,
    nanmedian,
    nanquantile,
    nansum,
    prod,
    quantile,
    std,
    std_mean,
    sum,
    var,
    var_mean,
    vector_norm,
)
from masked_dispatch.api.sparsify import sparse_relu, sparse_threshold, sparse_topk, sparse_where
from masked_dispatch.api.sums import accumulate, average
from masked_dispatch.autograd import engine as _gradients
from masked_dispatch.callers import BatchEndWarning, EmptiedSampleWarning
from masked_dispatch.dispatch import assign as _assign
from masked_dispatch.dispatch import compile as _compile
from masked_dispatch.dispatch import ladder as _dispatch
from masked_dispatch.dispatch import library as _library
from masked_dispatch.interop import gradients_of_others as _gradients_of_others
from masked_dispatch.interop import outside_dispatch as _outside_dispatch
from masked_dispatch.interop import protocols as _protocols
from masked_dispatch.policies import DensificationWarning, MaskDroppedWarning, densify, updates
from masked_dispatch.replacements import patches
from masked_dispatch.seeing.audit import Audit, audit
from masked_dispatch.seeing.explain import explain
from masked_dispatch.seeing.trace import Trace, trace
from masked_dispatch.tensor import leaving, memory
from masked_dispatch.tensor import messages as _messages
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.versions import __version__ as __version__
from op_registry import InvalidValueError, MaskedSemanticsError, registry

if _versions.is_untested(_torch.__version__):
    from masked_dispatch.assumptions import at_import as _at_import

    _at_import.check_untested()

callers.install_warnings()
_library.install()
_dispatch.install()
_compile.install()
_assign.install()
_outside_dispatch.install()
_gradients.install()
_gradients_of_others.install()
_protocols.install()
_reductions.install()
_known_words.install()
memory.install_buffers()
leaving.install_refusals()
distributed.install()
testing.install()
callers.install_names()

__all__ = [
    "Audit",
    "BatchEndWarning",
    "EmptiedSampleWarning",
    "DensificationWarning",
    "InvalidValueError",
    "MaskDroppedWarning",
    "MaskedSemanticsError",
    "MaskedTensor",
    "Trace",
    "accumulate",
    "align",
    "all",
    "amax",
    "amin",
    "aminmax",
    "any",
    "argmax",
    "argmin",
    "as_masked_tensor",
    "audit",
    "average",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "densify",
    "distributed",
    "explain",
    "export",
    "first",
    "from_lengths",
    "from_nan",
    "functional",
    "interop",
    "is_masked_tensor",
    "kthvalue",
    "last",
    "logcumsumexp",
    "logsumexp",
    "mask_like",
    "masked_tensor",
    "max",
    "mean",
    "median",
    "metrics",
    "min",
    "missing",
    "mode",
    "nanmean",
    "nanmedian",
    "nanquantile",
    "nansum",
    "optim",
    "pad_sequence",
    "padded",
    "pad_stack",
    "patches",
    "plot",
    "positions",
    "prod",
    "quantile",
    "registry",
    "sparse_relu",
    "sparse_threshold",
    "sparse_topk",
    "sparse_where",
    "std",
    "std_mean",
    "sum",
    "testing",
    "torchax",
    "trace",
    "updates",
    "var",
    "var_mean",
    "vector_norm",
    "windows",
]


def __dir__() -> list[str]:
    return [*__all__]


if not _typing.TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> _typing.NoReturn:
        inside = (functional, optim, metrics, missing, interop)
        modules = {word: f"{module.__name__}.{word}" for module in inside for word in module.__all__}
        words = _known_words.WORDS | modules
        _messages.no_such_name(__name__, name, words, elsewhere=_known_words.function_elsewhere(name))
