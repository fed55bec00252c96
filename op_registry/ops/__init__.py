"""The rule book: one family of operators a folder, its law at the door. Importing this package registers every rule."""

from op_registry.ops import (
    attention,
    contractions,
    elementwise,
    factories,
    indexing,
    losses,
    movement,
    normalization,
    opaque,
    queries,
    random,
    recurrent,
    reductions,
    refused,
    scans,
    windows,
)

__all__ = [
    "attention",
    "contractions",
    "elementwise",
    "factories",
    "indexing",
    "losses",
    "movement",
    "normalization",
    "opaque",
    "queries",
    "random",
    "recurrent",
    "reductions",
    "refused",
    "scans",
    "windows",
]
