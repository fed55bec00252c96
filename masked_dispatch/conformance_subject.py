"""MaskedTensor as the subject of op_registry's conformance: eager, compiled, and compiled to kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from masked_dispatch import is_masked_tensor, masked_tensor
from masked_dispatch.densification import on_densify
from masked_dispatch.tensor.masked_tensor import with_extent
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.tensor.storage import StoredPieces
from masked_dispatch.torchax import enable
from op_registry.conformance.subject import Subject
from op_registry.extents.found import padded
from op_registry.records.dense import Dense
from op_registry.records.fill import known_zero, remember_zero
from op_registry.sparse.layout import COO, Layout, layout_called

# COO with one sparse dimension, the others dense.
HYBRID = "hybrid"
# A packed batch (B, T, …) seen with time first: the sparse dimensions are in another order than those of its storage.
TIME_FIRST = "time_first_packed"


class Eager(Subject):
    """MaskedTensor, called eagerly."""

    name = "eager"
    laws = None
    padded_storages = ("coo", "csr", "packed")
    padded_modes = ("aot_eager",)

    def prepare(self, device: torch.device) -> None:
        if device.type == "jax":
            enable()

    def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Any:
        return masked_tensor(data, mask, requires_grad=requires_grad)

    def sharing(self, value: Any, owner: Any) -> Any:
        if isinstance(value, SparseMaskedTensor):
            values, _, _ = value._kept.now
            value._kept = StoredPieces(values, *owner._kept.now[1:])
        else:
            value._validity = owner._validity
        return value

    def padded(
        self,
        data: Tensor,
        mask: Tensor | None,
        there: Tensor,
        samples: int,
        positions: int | list[int],
        requires_grad: bool = False,
    ) -> Any:
        full = there.expand(data.shape)
        value = masked_tensor(data, full if mask is None else mask, requires_grad=requires_grad)
        record = Dense(value._data, value._validity)
        return with_extent(
            value,
            padded(
                record,
                None if mask is None else full,
                [positions] if isinstance(positions, int) else positions,
                samples,
            ).extent,
        )

    def extent(self, value: Any) -> Tensor | None:
        return value.extent if is_masked_tensor(value) else None

    def observe(self, value: Any) -> tuple[Tensor, Tensor | None]:
        if not is_masked_tensor(value):
            return value, None
        dense = value.to_dense() if isinstance(value, SparseMaskedTensor) else value
        return dense.get_data(), dense.get_mask()

    def remember_zero(self, value: Any) -> None:
        if value._validity is not None:
            remember_zero(value._data, value._validity)

    def check_remembered(self, value: Any) -> None:
        if is_masked_tensor(value) and not isinstance(value, SparseMaskedTensor):
            known_zero(value._data, value._validity)  # inside zeros_verified, it raises

    storages = ("coo", "csr", "csc", "bsr", "bsc", HYBRID, "packed")
    own_calls = (
        ("{0}.to_sparse()", "{0}.clone()"),
        ("{0}.to_sparse(1)", "{0}.clone()"),
        ("{0}.to_sparse_csr()", "{0}.clone()"),
        ("{0}.to_sparse_csc()", "{0}.clone()"),
        ("{0}.to_sparse_bsr((1, 2))", "{0}.clone()"),
        ("{0}.to_packed().without_extent()", "{0}.clone()"),
        ("{0}.to_dense()", "{0}.clone()"),
        ("{0}.mask_like({1})", "{0}.expand_as({1}).clone()"),
        ("{0}.mask_with({1} > 0)", "torch.where({1} > 0, {0}, {0})"),
        ("{0}.mask_with({0}.get_mask())", "{0}.clone()"),
        ("{0}.to_tensor(2)", "{0}.clone()"),
    )

    def can_store(self, storage: str) -> bool:
        return storage in (HYBRID, TIME_FIRST) or layout_called(storage) is not None

    def __init__(self) -> None:
        self._densified: list[str] = []
        self._modes: dict[str, Subject] = {}
        on_densify.append(lambda event: self._densified.append(f"{event.op}: {event.why}"))

    def stored(self, value: Any, storage: str, requires_grad: bool, explicit_invalid: bool = False) -> Any:
        if storage == TIME_FIRST:
            if not is_masked_tensor(value) or value.ndim < 2:
                return value
            with torch.no_grad():
                packed = self.stored(value.transpose(0, 1), "packed", False, explicit_invalid)
                return packed.transpose(0, 1).clone().requires_grad_(requires_grad)
        layout = COO if storage == HYBRID else layout_called(storage)
        if layout is None or not is_masked_tensor(value) or value.ndim < (2 if storage == HYBRID else layout.min_dims):
            return value
        knows_padding = value._extent is not None
        with torch.no_grad():
            mask = value.to_dense().get_mask()
            if explicit_invalid:
                # Every other element is stored whether it is valid or not, and then declared to be what it is.
                every_other = torch.arange(mask.numel(), device=mask.device).reshape(mask.shape) % 2 == 0
                value = masked_tensor(value.to_dense().get_data(), mask | every_other)
            stored = value.to_layout(layout.public, **_options(storage, layout, value.shape))
            if explicit_invalid:
                stored = stored.mask_with(mask)
            if not knows_padding:  # packing says that its rows are there, and storage alone is compared
                stored = stored.without_extent()
        return stored.requires_grad_(requires_grad)

    def densified(self) -> list[str]:
        densified, self._densified = self._densified, []
        return densified

    def modes(self) -> dict[str, Subject]:
        # Made once: each follows the log of what is stored densely for as long as the process lives.
        if not self._modes:
            self._modes = {
                f"{backend}_dynamic" if dynamic else backend: Compiled(backend, dynamic)
                for backend in ("aot_eager", "inductor")
                for dynamic in (None, True)
            }
        return self._modes


def _options(storage: str, layout: Layout, shape: torch.Size) -> dict[str, Any]:
    """Options of to_layout: blocks as small as divide the shape, one sparse dimension in hybrid."""
    if storage == HYBRID:
        return {"sparse_dim": 1}
    if not layout.blocks:
        return {}
    return {"blocksize": tuple(next((d for d in (2, 3, 5) if n % d == 0), 1) for n in shape[-2:])}


class Compiled(Eager):
    """The same through torch.compile(fullgraph=True), for the sizes at hand or (`dynamic`) for any."""

    def __init__(self, backend: str, dynamic: bool | None = None) -> None:
        super().__init__()
        self.name = backend
        self.backend, self.dynamic = backend, dynamic

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._compiled(fn)(*args, **kwargs)

    def call_twice(
        self, fn: Callable[..., Any], first: tuple[Any, Any], second: tuple[Any, Any], before: Callable[[], None]
    ) -> Any:
        compiled = self._compiled(fn)
        before()
        compiled(*first[0], **first[1])
        before()
        with torch.compiler.set_stance("fail_on_recompile"):
            return compiled(*second[0], **second[1])

    def _compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        torch.compiler.reset()

        def function(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        return torch.compile(function, backend=self.backend, fullgraph=True, dynamic=self.dynamic)

    def modes(self) -> dict[str, Subject]:
        return {}


eager = Eager()
aot_eager = Compiled("aot_eager")
inductor = Compiled("inductor")
