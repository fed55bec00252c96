"""The registered layouts, found by name: the six built-in ones, and those of other packages."""

from __future__ import annotations

import inspect

import torch

from op_registry.digests import digest_of_code, source_digest
from op_registry.sparse.compressed import BSC, BSR, CSC, CSR, PACKED
from op_registry.sparse.layout import COO, DENSE, Layout

BUILT_IN = (COO, CSR, CSC, BSR, BSC, PACKED)

_by_name: dict[str, Layout] = {layout.name: layout for layout in BUILT_IN}
_of_torch: dict[torch.layout, Layout] = {
    getattr(torch, name.removeprefix("torch.")): _by_name[name] for name in _by_name
}
_versions: dict[str, str] = {}


def register_layout(layout: Layout) -> Layout:
    """Make a layout known by its name to files, compiled graphs and tests; returns it.

    Raises ValueError if another layout has the name, or if a tensor cannot hold its number of pieces.
    """
    if _by_name.get(layout.name, layout) != layout or layout.name == DENSE:
        raise ValueError(f"there is another storage called {layout.name}")
    if len(layout.piece_dims) not in (1, 2):
        raise ValueError(f"{layout.name} has {len(layout.piece_dims)} index tensors, and a tensor holds one or two")
    _by_name[layout.name] = layout
    _versions[layout.name] = _digest_of_sources(type(layout))
    return layout


def _digest_of_sources(kind: type[Layout]) -> str:
    """A digest of the file that defines a layout; a unique one for a layout defined in a notebook or at a prompt."""
    try:
        return source_digest(inspect.getsourcefile(kind) or "")
    except (OSError, TypeError):  # OSError: typed at a prompt
        return digest_of_code(object())


def layout_named(name: str) -> Layout:
    """The layout of that name; KeyError without one."""
    return _by_name[name]


def layout_called(short: str) -> Layout | None:
    """The layout with that short name, as used in tables and on command lines; None without one."""
    return next((layout for layout in _by_name.values() if layout.short == short), None)


def layout_of(layout: object) -> Layout | None:
    """The layout for a torch.layout, or a registered layout itself; None for anything else."""
    if isinstance(layout, torch.layout):
        return _of_torch.get(layout)
    return layout if isinstance(layout, Layout) and _by_name.get(layout.name) == layout else None


def layout_names() -> tuple[str, ...]:
    """The names of all registered layouts."""
    return tuple(_by_name)


def version_of(layout: Layout) -> str:
    """A digest of the sources of a layout from another package, for compiled graphs on disk; "" for built-in layouts,
    whose sources the registry's version covers.
    """
    return _versions.get(layout.name, "")
