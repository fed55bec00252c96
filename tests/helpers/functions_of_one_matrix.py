"""Functions of a matrix: without the freedom of sign that eigenvectors have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

OF_ONE_MATRIX: dict[str, Callable[[Tensor], Tensor]] = {
    "inv": torch.linalg.inv,
    "logdet": torch.logdet,
    "cholesky": torch.linalg.cholesky,
    "cholesky_inverse": torch.cholesky_inverse,
    "qr": lambda a: torch.linalg.qr(a).R,
    "svdvals": torch.linalg.svdvals,
    "singular vectors": lambda a: torch.linalg.svd(a).U.abs(),
    "eig": lambda a: torch.linalg.eig(a).eigenvectors.abs(),
    "eigenvectors": lambda a: torch.linalg.eigh(a).eigenvectors.abs(),
    "lu": lambda a: torch.linalg.lu(a).U,
    "lu_unpack": lambda a: torch.lu_unpack(*torch.linalg.lu_factor(a)).L,
    "pinv of a tolerance": lambda a: torch.linalg.pinv(a, rtol=1e-3),
    "matrix_exp": torch.linalg.matrix_exp,
    "inverse power": lambda a: torch.linalg.matrix_power(a, -2),
    "cond": torch.linalg.cond,
    "nuclear norm": lambda a: torch.linalg.matrix_norm(a, "nuc"),
    "spectral norm": lambda a: torch.linalg.matrix_norm(a, 2),
}
