"""Densities below which a sparse form is quicker, by family and size: written by `python -m benchmarks.choice --write`.

Measured: torch 2.13.0+cpu, AVX512, one thread, float32.
"""

CROSSOVERS: dict[str, dict[int, float]] = {
    "arithmetic": {64: 0.0, 512: 0.0, 2048: 0.9},
    "arithmetic, by row": {64: 0.0, 512: 0.0, 2048: 0.9},
    "transcendental": {64: 0.0, 512: 0.8, 2048: 0.9},
    "transcendental, by row": {64: 0.0, 512: 0.8, 2048: 0.9},
    "reduction": {64: 0.0, 512: 0.0, 2048: 0.015},
    "reduction, by row": {64: 0.0, 512: 0.5, 2048: 0.9},
    "slices": {64: 0.0, 512: 0.001, 2048: 0.035},
    "slices, by row": {64: 0.0, 512: 0.5, 2048: 0.9},
    "product": {64: 0.0, 512: 0.0, 2048: 0.0},
    "product, by row": {64: 0.0, 512: 0.0, 2048: 0.0},
}
