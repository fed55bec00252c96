"""Tell libraries that guess a tensor's backend from the module of its type to use torch for masked tensors.

This imports no library: it registers with each one after the program imports it, or now if it is already imported.
"""

from __future__ import annotations

import sys

from masked_dispatch.later_import import when_imported

_OURS = "masked_dispatch"


def tell_opt_einsum() -> None:
    """Register with opt_einsum.contract, which checks its first operand, and takes unknown types for NumPy arrays.

    Its table of backends is private. For a release without the table, this does nothing.
    """
    aliases = getattr(sys.modules["opt_einsum.backends.dispatch"], "_aliases", {})
    if "torch" in aliases:
        aliases.setdefault(_OURS, aliases["torch"])


def tell_autoray() -> None:
    """Register with autoray.do and the libraries built on it, through autoray's public function."""
    sys.modules["autoray.autoray"].register_backend_alias(_OURS, "torch")


def install() -> None:
    """The package calls this once, on import."""
    when_imported("opt_einsum.backends.dispatch", tell_opt_einsum)
    when_imported("autoray.autoray", tell_autoray)
