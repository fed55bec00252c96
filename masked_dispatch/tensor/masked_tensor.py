"""MaskedTensor: construction, accessors and protocol hooks. op_registry defines the semantics of operators."""

from __future__ import annotations

import contextlib
import copy
import copyreg
from typing import Any, NoReturn, SupportsIndex, TypeVar

import torch
from torch import Tensor

from masked_dispatch.compiler_internals import never_compiled, prepare_for_tracing
from masked_dispatch.policies import Mode, updating
from masked_dispatch.tensor.arguments import checked_fill
from masked_dispatch.tensor.assignment import as_source, put
from masked_dispatch.tensor.extents import NAMES, ExtentPieces, pieces_of, take_extent_from_graph
from masked_dispatch.tensor.file_format import (
    builder,
    check_extent,
    check_saved,
    own,
    parts_of_extent,
    problem_of_dense,
    problem_of_family,
    problem_of_member,
    saved_as,
    saved_extent,
)
from masked_dispatch.tensor.leaving import ReadWhereAllValid, WithoutMemory
from masked_dispatch.tensor.mask_sharing import (
    GraphWrites,
    GuardedInput,
    ViewFamily,
    family_of,
    found_family_in_graph,
    join_family_from_graph,
    laid_out_as_data,
)
from masked_dispatch.tensor.messages import extent_not_carried, tangent_stored_otherwise, with_copied_mask
from masked_dispatch.tensor.printing import html_of, printed
from masked_dispatch.tensor.storage import Conversions, NamedPieces
from masked_dispatch.tensor.traced import CODE_VERSION, geometry, keep_functions_whole, wrappers
from masked_dispatch.torch_internals import (
    PRE_DISPATCH,
    make_data_pointer_raise,
    make_wrapper_subclass,
    no_torch_function,
    share_storage,
)
from op_registry import MaskedSemanticsError, registry
from op_registry.digests import digest_of
from op_registry.extents.pieces import Known, serves
from op_registry.records.arguments import Number
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent
from op_registry.records.fill import fill_where_invalid, memory_exposed
from op_registry.records.tracing import being_traced
from op_registry.sparse.layout import Layout
from op_registry.sparse.permuted import AnyRecord

# Compiled graphs guard on these: how writes outside the graph change validity (never: it is no part of a base's), the
# registry's version, the mode of `updates`, what is known of the extent, and a handle through which a guard can give
# the tensor its own validity (all handles compare equal).
Context = tuple[str, str, Mode, Known | None, GuardedInput | None]

M = TypeVar("M", bound="MaskedTensor")


class MaskedTensor(Conversions, NamedPieces, ExtentPieces, ReadWhereAllValid, WithoutMemory, torch.Tensor):
    """A tensor and a mask of the same shape, True where an element is valid.

    :func:`masked_tensor` (copies) and :func:`as_masked_tensor` (shares memory, differentiable) make one.
    Functions, modules, optimizers, autograd and torch.compile take it like any tensor.
    """

    # The values; meaningless where invalid. Never requires grad: the wrapper carries autograd.
    _data: Tensor
    # int8, 1 where valid, broadcastable to the data; None if every element is valid. Code reads it through `_validity`.
    _stored_validity: Tensor | None
    # Which positions of a padded batch are there; None if all are. Code reads it through `_extent`.
    _stored_extent: Extent | None = None
    # The tensors (views and their base) that share this validity; None while there is only this one.
    _family: ViewFamily | None = None
    # Whether this is a view whose mask is no view of its base's, so that writes are refused: a view of another dtype,
    # whose elements share mask elements, or one that leaves out positions at each sample's end.
    _mask_is_a_copy: bool = False
    # The family's memory, to notice its replacement, and the part of it that is this tensor's validity.
    _part_of_memory: tuple[Tensor, Tensor] | None = None
    # The family's extent, and the part of it that is this tensor's.
    _part_of_extent: tuple[Extent, Extent | None] | None = None
    # A copy of a validity that others may write to, with the version that it copies.
    _snapshot: tuple[int, Tensor] | None = None
    # The validity, and the alias of it that compiled graphs receive.
    _validity_alias: tuple[Tensor, Tensor] | None = None
    # Whether compiled graphs write to this tensor's validity.
    _graph_writes: GraphWrites | None = None
    # Whether this is the copy that a view operator of a sparsely stored tensor returned.
    _stands_for_a_view = False
    # Of a gradient: what it reached (autograd/reached.py), in which run of the engine, and in which state.
    _reached: tuple[int, tuple[int, int], Tensor] | None = None
    # Whether the inner tensors carry a functorch transform.
    _carries_transform = False

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "MaskedTensor is not called directly: masked_dispatch.masked_tensor(data, mask) copies into a new leaf, "
            "masked_dispatch.as_masked_tensor(data, mask) shares memory and is differentiable"
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def _validity(self) -> Tensor | None:
        family = self._family
        return self._stored_validity if family is None or family.memory is None else family.validity_of(self)

    @_validity.setter
    def _validity(self, validity: Tensor | None) -> None:
        self._stored_validity = validity

    @property
    def _extent(self) -> Extent | None:
        family = self._family
        return self._stored_extent if family is None or not family.extent_written else family.extent_of(self)

    @_extent.setter
    def _extent(self, extent: Extent | None) -> None:
        self._stored_extent = extent

    def _replace_extent(self, extent: Extent | None) -> None:
        # After a write; what shares the memory learns of it.
        self._extent = extent

    @property
    def _graph_validity(self) -> Tensor | None:
        # The inner tensor of a graph input: an alias that no other tensor holds. Otherwise the graph would guard on
        # two masks being the same object, and recompile whenever that changes.
        validity = self._validity
        if validity is None or self._carries_transform or being_traced(validity):
            return validity
        validity = laid_out_as_data(self, validity)
        if self._family is not None:
            self._family.share()  # results of the graph may share it
        if self._validity_alias is None or self._validity_alias[0] is not validity:
            self._validity_alias = (validity, validity.detach())
        return self._validity_alias[1]

    # ------------------------------------------------------------------------------------------------- accessors

    def get_data(self) -> Tensor:
        """The stored values, a differentiable view of shape `self.shape`; meaningless where the mask is False."""
        return torch.ops.masked_dispatch.get_data(self)

    def get_mask(self) -> Tensor:
        """bool tensor of shape `self.shape`, True where valid; a copy, so writing to it changes nothing."""
        return torch.ops.masked_dispatch.get_mask(self)

    def to_tensor(self, fill: Number | Tensor = None) -> Tensor:  # type: ignore[assignment]
        """A plain tensor with `fill` where invalid, a copy; differentiable.

        fill  a number that the dtype can represent (a float may be rounded), or a plain tensor that broadcasts to the
              shape

        Raises ValueError for a number out of kind or range, or a tensor that does not broadcast, TypeError for others,
        and without `fill`: there is no default, each use chooses.
        """
        fill = checked_fill(self, fill)
        if isinstance(fill, Tensor):
            return torch.ops.masked_dispatch.to_tensor.Tensor(self, fill)
        return torch.ops.masked_dispatch.to_tensor.Scalar(self, fill)

    def compressed(self) -> Tensor:
        """The valid elements in order, without the others: a plain tensor of one dimension, a copy; differentiable."""
        return torch.ops.masked_dispatch.compressed(self)

    def count(self, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
        """Number of valid elements over `dim` (all dimensions by default): a plain int64 tensor."""
        dims = [dim] if isinstance(dim, int) else dim
        return torch.ops.masked_dispatch.count(self, dims, keepdim)

    def mask_with(self, mask: Tensor) -> MaskedTensor:
        """A copy, valid where this tensor is valid and `mask` (bool, broadcastable) is True; differentiable."""
        return torch.ops.masked_dispatch.mask_with(self, mask)

    def mask_like(self, other: MaskedTensor) -> MaskedTensor:
        """A copy, valid where this tensor and `other` (of broadcastable shape) are valid; differentiable.

        If `other` is sparse and has the same shape, the copy has its layout. :func:`masked_dispatch.mask_like` also
        takes plain tensors.
        """
        return torch.ops.masked_dispatch.mask_like(self, other)

    @property
    def extent(self) -> Tensor | None:
        """Which positions are there: a plain bool tensor of shape `self.shape`; None for a tensor without padding.

        A position that is there and invalid is missing; see :func:`masked_dispatch.padded`.
        """
        return None if self._extent is None or not self._extent.factors else torch.ops.masked_dispatch.extent(self)

    def without_extent(self) -> MaskedTensor:
        """The same elements under the same mask, in which padding counts as missing; shares memory, differentiable."""
        return torch.ops.masked_dispatch.without_extent(self)

    def _check_no_extent(self, how: str) -> None:
        if self._extent is not None and self._extent.factors:
            raise MaskedSemanticsError(extent_not_carried(self, how))

    # -------------------------------------------------------------------------------------------------- storage

    @property
    def storage_layout(self) -> torch.layout | Layout:
        """The storage layout of the data, whatever `layout` says: torch's name for it, if torch has one."""
        return torch.strided

    @property
    def nnz(self) -> int:
        """Number of stored elements."""
        return self.numel()

    @property
    def _stored_tensors(self) -> list[Tensor]:
        return [t for t in (self._data, self._validity) if t is not None]

    @never_compiled
    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return printed(self, self._printed_record)

    @never_compiled
    def _repr_html_(self) -> str:
        """The mask as a small picture, and the text of `repr`, for notebooks."""
        return html_of(self, self._printed_record)

    @property
    def _printed_record(self) -> AnyRecord:
        return Dense(self._data, self._validity, self._extent)

    def __format__(self, spec: str) -> str:
        """A single number as a plain tensor formats it, or ``--`` if it is invalid."""
        if not spec or self.dim():
            return super().__format__(spec)
        return format(self.item(), spec) if bool(self.get_mask()) else "--"

    # ------------------------------------------------------------------------------- protocol: flatten, copy, pickle

    @never_compiled
    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        # No sizes: the graph would guard on each. The registry's version makes a replaced rule recompile.
        keep_functions_whole(registry.version)
        memory_exposed()  # a compiled graph may write to the data without raising its version
        names, known, written, guarded = ["_data"], None, "none", None
        if self._validity is not None:
            if self._graph_writes is None:
                self._graph_writes = GraphWrites()
            names.append("_graph_validity")
            written = "in place" if self._family is not None and self._family.in_place else "copied first"
            if self._mask_is_a_copy and self._extent is not None:
                written = "never"
            guarded = self._graph_writes.guarded(self)
        if self._extent is not None:
            _, known, pieces = pieces_of(self)
            names += NAMES[: len(pieces)]
        return names, (written, registry.version, updating(), known, guarded)

    @staticmethod
    @never_compiled
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Context, outer_size: torch.Size, outer_stride: tuple[int, ...]
    ) -> MaskedTensor:
        written, *_, known, guarded = context
        wrapper = wrap(inner["_data"], inner.get("_graph_validity"))
        if known is not None:
            take_extent_from_graph(wrapper, known, inner)
            wrapper._mask_is_a_copy = written == "never"
        if being_traced(wrapper._data):
            prepare_for_tracing()
            found_family_in_graph(wrapper, written == "in place", guarded)
        elif written != "never":
            join_family_from_graph(wrapper, guarded)
        return wrapper

    @classmethod
    def __metadata_guard__(cls, expected: Context, actual: Context) -> bool:
        memory_exposed()
        *known, extent, writes = expected
        *known_now, extent_now, writes_now = actual
        if known != known_now or not serves(extent, extent_now):
            return False
        if writes is not None and writes_now is not None and writes.graph_writes.seen:
            writes_now.unshare()
        return True

    def __coerce_tangent_metadata__(self) -> MaskedTensor:
        # AOTAutograd traces tangents without a mask: invalid elements are zero, and nobody has to guess a mask.
        return wrap(self._data, None)

    def __coerce_same_metadata_as_tangent__(self, expected_meta: object, expected_type: type | None = None) -> Tensor:
        if expected_type is not None and issubclass(expected_type, MaskedTensor) and expected_type is not MaskedTensor:
            raise MaskedSemanticsError(tangent_stored_otherwise(self))
        zero_filled = fill_where_invalid(self._data, self._validity, 0)
        return zero_filled if expected_type not in (None, MaskedTensor) else wrap(zero_filled, None)

    def _stable_hash_for_caching(self) -> str:
        # The key of compiled graphs cached on disk: the rules, and the geometry of the inner tensors and the wrapper.
        names, context = self.__tensor_flatten__()
        pieces = [(name, *geometry(getattr(self, name))) for name in names]
        return digest_of(CODE_VERSION, repr((context, str(tuple(self.shape)), self.requires_grad, pieces)))

    @never_compiled
    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        family, data, extent = self._family, self._data, self._extent
        if self._mask_is_a_copy:  # save it as an independent tensor: the file format cannot express such a view
            family, data = None, data.clone()
        state = (data, self._validity, self.requires_grad, getattr(self, "_is_param", False))
        if extent is not None:
            return saved_as("dense", *state, family, *parts_of_extent(extent))
        return saved_as("dense", *state) if family is None else saved_as("dense", *state, family)

    @never_compiled
    def __deepcopy__(self, memo: dict[int, Any]) -> MaskedTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                f"moment; this one is the result of {type(self.grad_fn).__name__}. Copy x.detach() instead."
            )
        copied = memo[id(self)] = self._copied(memo)
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    @never_compiled
    def __setitem__(self, index: Any, value: Any) -> None:
        source = as_source(value, self)
        if not isinstance(source, Tensor) or not put(self, index, source, wrap, views=True):
            super().__setitem__(index, source)

    def _stored_densely(self) -> MaskedTensor:
        # Overridden by sparse storage.
        return self

    @never_compiled
    def __copy__(self) -> MaskedTensor:
        with inference_mode_of(self):
            copied = wrap_leaf(self._data, self._stored_validity, self.requires_grad, getattr(self, "_is_param", False))
        share_storage(copied, self)
        copied._extent, copied._family = self._extent, family_of(self)
        copied._mask_is_a_copy = self._mask_is_a_copy
        return copied

    def _copied(self, memo: dict[int, Any]) -> MaskedTensor:
        is_parameter = getattr(self, "_is_param", False)
        stored = self._stored_validity if self._family is not None else self._validity
        stored = None if stored is None else stored.clone()
        if self._mask_is_a_copy or self._carries_transform or being_traced(self._data):
            copied = wrap_leaf(self._data.clone(), stored, self.requires_grad, is_parameter)
            return with_extent(copied, self._extent)
        # As in torch, copies share memory, and validity, if the originals do.
        copied = wrap_leaf(copy.deepcopy(self._data, memo), stored, self.requires_grad, is_parameter)
        copied._family, copied._extent = copy.deepcopy(self._family, memo), self._extent
        return copied

    # ------------------------------------------------------------------------------------- methods that need memory

    def share_memory_(self) -> MaskedTensor:
        """Move data and mask to shared memory, in place: other processes then see each process's writes.

        The tensor and its views get their own full mask, even if every element is valid. Results of operations on it
        get a copy of the mask, which later writes do not change.
        """
        if self._mask_is_a_copy:
            raise MaskedSemanticsError(
                f"share_memory_() of {with_copied_mask(self)}: what other processes write to its base would not show "
                "here. Share the base, or a clone."
            )
        memory_exposed()
        family_of(self).share_with_processes()
        self._data.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the data lies in shared memory."""
        return self._data.is_shared()


def with_extent(tensor: M, extent: Extent | None) -> M:
    """The same masked tensor, which nobody else has yet, with an extent."""
    if extent is not None:
        tensor._extent = extent
        if (extent.has_parts or extent.says or extent.states) and being_traced(tensor._stored_tensors[0]):
            pieces_of(tensor)  # recorded here: a graph's results are flattened after it
    return tensor


def wrap(data: Tensor, validity: Tensor | None, requires_grad: bool = False) -> MaskedTensor:
    """A masked tensor around `data` and `validity` (this checks, copies and differentiates nothing)."""
    if type(data) is Tensor and data.is_contiguous() and not data.storage_offset() and not requires_grad:
        # Fewer arguments save 0.5 of 2 µs. (In a graph, contiguity may depend on data.)
        wrapper: MaskedTensor = make_wrapper_subclass(
            MaskedTensor, data.shape, dtype=data.dtype, device=data.device, _extra_dispatch_keys=PRE_DISPATCH
        )
    else:
        kind, device = wrappers.get(type(data)) or (MaskedTensor, data.device)
        wrapper = make_wrapper_subclass(
            kind,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=device,
            requires_grad=requires_grad,
            _extra_dispatch_keys=PRE_DISPATCH,
        )
    make_data_pointer_raise(wrapper)
    wrapper._data = data
    wrapper._stored_validity = validity
    return wrapper


def inference_mode_of(base: MaskedTensor) -> contextlib.AbstractContextManager[Any]:
    """The context in which to make a view: even in inference mode, a view of a normal tensor is normal, as in torch."""
    if torch.is_inference_mode_enabled() and not base.is_inference():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


def wrap_leaf(data: Tensor, validity: Tensor | None, requires_grad: bool, is_parameter: bool) -> MaskedTensor:
    """A masked tensor around these tensors with the flags of a leaf (this checks nothing)."""
    wrapper = wrap(data, validity, requires_grad)
    if is_parameter:
        wrapper._is_param = True  # type: ignore[attr-defined]
    return wrapper


@builder("dense")
@never_compiled
def rebuild(
    data: Tensor,
    validity: Tensor | None,
    requires_grad: bool,
    is_parameter: bool = False,
    family: ViewFamily | None = None,
    extent: tuple[Any, ...] | None = None,
) -> MaskedTensor:
    """Rebuild a dense tensor from a file; files of version 1 have no `family`, those before version 4 no `extent`.

    The tensor joins the family if its data lies in the family's memory. A pickle that copies the data of each tensor
    separates them: then only tensors with the same data object, as `copy.copy` makes them, form a family.
    Raises ValueError if the arguments do not form a masked tensor.
    """
    check_saved(problem_of_dense(data, validity, requires_grad, is_parameter, MaskedTensor))
    validity = own(validity)
    tensor = wrap_leaf(data, validity, requires_grad, is_parameter)
    tensor._extent = saved_extent(data, extent, MaskedTensor)
    if family is not None:
        check_saved(problem_of_member(data, family))
        tensor._family = family if family.has_memory_of(data) else family.apart(data, validity, tensor._extent)
    check_extent(Dense(data, tensor._validity, tensor._extent))
    return tensor


@builder("family")
@never_compiled
def rebuild_family(
    data: Tensor, validity: Tensor | None, memory: Tensor | None, extent: tuple[Any, ...] | None = None
) -> ViewFamily:
    """Rebuild the family of a tensor and its views. Raises ValueError as `rebuild` does."""
    family = family_around(data, validity, memory, extent)
    family.validity, family.memory = own(validity), own(memory)
    return family


def family_around(
    data: Tensor, validity: Tensor | None, memory: Tensor | None, extent: tuple[Any, ...] | None = None
) -> ViewFamily:
    """The same, without copying these tensors."""
    check_saved(problem_of_family(data, validity, memory, MaskedTensor))
    family = ViewFamily(data, validity)
    family.memory, family.extent = memory, saved_extent(data, extent, MaskedTensor)
    check_extent(Dense(data, family.base_validity(), family.extent))
    return family


@never_compiled
def _reduce_family(family: ViewFamily) -> Any:
    return saved_as("family", *family.contents(), *parts_of_extent(family.extent))


copyreg.pickle(ViewFamily, _reduce_family)
