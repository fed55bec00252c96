"""Libraries that guess from the module of a tensor's type which library has functions for it: here torch has.

Nothing is imported for this: a library is told when it is imported, or now if it has been.
"""

from __future__ import annotations

import sys

from masked_dispatch.later_import import when_imported

_OURS = "masked_dispatch"


def tell_opt_einsum() -> None:
    """opt_einsum.contract, which goes by its first operand, and takes what it doesn't know to be NumPy's.

    Its table of backends has no door. A release without the table guesses as it does.
    """
    aliases = getattr(sys.modules["opt_einsum.backends.dispatch"], "_aliases", {})
    if "torch" in aliases:
        aliases.setdefault(_OURS, aliases["torch"])


def tell_autoray() -> None:
    """autoray.do and what is built on it; by the function that autoray has for this."""
    sys.modules["autoray.autoray"].register_backend_alias(_OURS, "torch")


def install() -> None:
    """Called once, when the package is imported."""
    when_imported("opt_einsum.backends.dispatch", tell_opt_einsum)
    when_imported("autoray.autoray", tell_autoray)
