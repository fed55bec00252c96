"""What is asked at import of a torch that nobody tried: the assumptions without which results would be wrong unnoticed.

The modules of these checks load nothing that is slow, and none of them calls a ``__torch_dispatch__``, at whose first
call torch loads torch.distributed.tensor.
"""

from __future__ import annotations

import sys
import warnings

import torch

from masked_dispatch.assumptions import dispatch, engine
from masked_dispatch.assumptions.checks import ASSUMPTIONS, broken_among
from masked_dispatch.versions import TESTED

DOCTOR = "python -m masked_dispatch doctor"
_MODULES = (dispatch.__name__, engine.__name__)


class UntestedTorchWarning(UserWarning):
    """The installed torch is newer, or older, than any that masked_dispatch was tested with."""


def broken() -> list[str]:
    """What no longer holds of the assumptions that fail silently."""
    return broken_among(check for check in ASSUMPTIONS if check.silent and check.run.__module__ in _MODULES)


def check_untested() -> None:
    """Warn of this torch, or raise ImportError where it breaks one of these assumptions.

    Neither for the command that examines it.
    """
    if _is_doctor():
        return
    tested = f"torch {TESTED[0]} to {TESTED[-1]}"
    problems = broken()
    if problems:
        lines = "".join(f"\n  {line}" for line in problems)
        raise ImportError(
            f"masked_dispatch does not work with torch {torch.__version__}: masks and gradients would be wrong "
            f"without an error. It was tested with {tested}. It relies on the following, which no longer "
            f"holds:{lines}\nInstall one of these releases of torch, or a newer masked_dispatch. `{DOCTOR}` examines "
            "the rest."
        )
    warnings.warn(
        f"masked_dispatch was tested with {tested}, and this is {torch.__version__}. `{DOCTOR}` tells within a minute "
        "whether they work together.",
        UntestedTorchWarning,
        stacklevel=3,
    )


def _is_doctor() -> bool:
    # While `python -m` imports the package of the module that it runs, argv begins with "-m".
    return sys.argv[:2] == ["-m", "doctor"] and "masked_dispatch" in sys.orig_argv
