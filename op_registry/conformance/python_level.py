"""The code that torch writes in Python around its operators (functions, modules, distributions), put to the laws."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributions
import torch.nn.utils
import torch.signal
from torch import Tensor

from op_registry.conformance.compare import BITS, Tolerance, bit_difference, first_difference
from op_registry.conformance.masks import refilled
from op_registry.conformance.plain_torch import one_line
from op_registry.conformance.sample import Sample, copied, start_random_numbers, tree_leaves
from op_registry.conformance.subject import Subject
from op_registry.errors import MaskedSemanticsError

NAMESPACES: tuple[ModuleType, ...] = (
    torch.nn.functional,
    torch.functional,
    torch.special,
    torch.linalg,
    torch.fft,
    torch.masked,
    torch.signal.windows,
    torch.nn.utils,
)

# The methods and properties of a distribution that compute something.
METHODS = (
    "log_prob", "cdf", "icdf", "entropy", "perplexity", "sample", "rsample", "mean", "mode", "variance", "stddev",
)  # fmt: skip

# Names in these namespaces that are no functions of tensors, each with the reason.
NO_FUNCTIONS = {
    "broadcast_shapes": "takes no tensor",
    "cond": "a higher-order operator, which refuses masked tensors",
    "get_rng_state": "the state of the random numbers",
    "set_rng_state": "the state of the random numbers",
    "is_tensor": "asks for the type",
    "set_default_tensor_type": "sets a default",
    "assert_int_or_pair": "checks Python numbers",
    "boolean_dispatch": "makes functions",
    "handle_torch_function": "torch's own machinery",
    "overload": "a mark for type checkers",
    "as_masked_tensor": "makes tensors of torch.masked",
    "is_masked_tensor": "asks for the type of torch.masked",
    "masked_tensor": "makes tensors of torch.masked",
    "skip_init": "makes modules",
    "convert_conv2d_weight_memory_format": "changes a module",
    "convert_conv3d_weight_memory_format": "changes a module",
    "remove_spectral_norm": "changes a module",
    "remove_weight_norm": "changes a module",
}


def functions() -> Iterator[str]:
    """``nn.functional.kl_div``: every function written in Python, by its name below torch."""
    for name in sorted(set(torch.__all__) - set(dir(torch.functional))):
        value = getattr(torch, name, None)
        if isinstance(value, FunctionType) and "Tensor" in str(value.__annotations__):
            yield f"torch.{name}"
    for namespace in NAMESPACES:
        for name in sorted(dir(namespace)):
            if not name.startswith("_") and _written_in_python(getattr(namespace, name)):
                yield f"{namespace.__name__.removeprefix('torch.')}.{name}"


def _written_in_python(value: object) -> bool:
    if isinstance(value, (ModuleType, type)) or not callable(value):
        return False
    function = inspect.unwrap(value)
    return isinstance(function, FunctionType) and function.__module__.startswith("torch.")


def modules() -> Iterator[str]:
    """``nn.Linear``: every module class of torch.nn."""
    for name in sorted(dir(torch.nn)):
        value = getattr(torch.nn, name)
        if isinstance(value, type) and issubclass(value, torch.nn.Module):
            yield f"nn.{name}"


def distributions() -> Iterator[str]:
    """``distributions.Normal.log_prob``: each method of each distribution, transform, and kl_divergence."""
    for name in sorted(torch.distributions.__all__):
        value = getattr(torch.distributions, name)
        if isinstance(value, type) and issubclass(value, torch.distributions.Distribution):
            for method in METHODS:
                yield f"distributions.{name}.{method}"
        elif isinstance(value, type) and issubclass(value, torch.distributions.Transform):
            for method in ("forward", "inverse", "log_abs_det_jacobian"):
                yield f"distributions.{name}.{method}"
        else:
            yield f"distributions.{name}"


def all_names() -> list[str]:
    """Every name."""
    return [*functions(), *modules(), *distributions()]


# ----------------------------------------------------------------------------------------------------------------------
# Test the laws on a function written in Python, as a black box: the laws of operators hold for code that calls them.

# P1  with every element valid: plain torch's results
# P2  with one sample of the batch invalid: plain torch's results for the batch without that sample
# P3  with other data in invalid elements (a sample, or elements at random): the same bits, masks and errors
#
# The oracle of P2 doesn't know the function. It removes the sample from every tensor whose first dimension has the
# batch's size (from the first tensor alone, if torch refuses that), and from every dimension of the results that then
# shrinks. We don't test P2 if results are random or torch refuses both calls; the outcome says so.

LEFT_OUT = 1  # the sample of the batch that is invalid
GARBAGE = ("nan", "max")
TOLERANCE = 1e-4
SEEDS = 6  # a result that is the same with all of these seeds counts as not random


@dataclass
class Outcome:
    """The outcome of one callable's samples: laws that held, refusals by their text, and failures by law."""

    held: set[str] = field(default_factory=set)
    refusals: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    ran: bool = False

    @property
    def state(self) -> str:
        """right, refused, not applicable or wrong."""
        if self.failures:
            return "wrong"
        if not self.ran:
            return "not applicable"
        return "right" if self.held & {"P2", "P3"} else "refused"


@dataclass(frozen=True)
class Result:
    """The leaves of a call's result, data and mask each; or the error that it raised."""

    leaves: tuple[tuple[Tensor, Tensor | None], ...] = ()
    error: Exception | None = None

    def as_plain(self) -> Result:
        """The same values without masks."""
        return Result(tuple((data, None) for data, _ in self.leaves), self.error)

    @property
    def refused(self) -> bool:
        return isinstance(self.error, MaskedSemanticsError)


def run(subject: Subject, call: Callable[[], Any], seed: int = 0) -> Result:
    """Make a call with the same random numbers each time."""
    start_random_numbers(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = call()
            leaves = [leaf for leaf in tree_leaves(found) if subject.is_value(leaf)]
            observed = tuple(subject.observe(leaf) for leaf in leaves)
    except Exception as error:
        return Result(error=error)
    return Result(tuple((data.detach().clone(), mask) for data, mask in observed))


def call_with(sample: Sample, replace: Callable[[Tensor], Any]) -> Callable[[], Any]:
    """The call with each tensor argument replaced, on a copy of the function, which may be a module with state."""
    args, kwargs = sample.with_tensors(replace)
    fn = copy.deepcopy(sample.fn) if isinstance(sample.fn, torch.nn.Module) else sample.fn
    return lambda: fn(*args, **kwargs)


def put_to_the_laws(
    subject: Subject, sample: Sample, outcome: Outcome, least_ndim: int = 1, own_values: bool = False
) -> None:
    """Run P1, P2 and P3 on a sample, and add the result to `outcome`.

    least_ndim  how many dimensions the first tensor must have for us to test P2
    own_values  whether results may be valid or plain where the sample is invalid
    """
    plain = run(subject, call_with(sample, copied))
    if plain.error is not None or not sample.tensors:
        return
    outcome.ran = True
    everything = {id(t): torch.ones_like(t, dtype=torch.bool) for t in sample.tensors}
    stored_mask = run(subject, call_with(sample, _hiding(subject, everything, GARBAGE[0])))
    _compare("P1", stored_mask, plain, outcome)
    _at_random(subject, sample, outcome)
    start = [t for t in sample.tensors if t.ndim and t.shape[0] > LEFT_OUT]
    if not start or start[0].ndim < least_ndim:
        return
    size = start[0].shape[0]
    for batched in ([t for t in start if t.shape[0] == size], start[:1]):
        if _leave_out(subject, sample, batched, size, outcome, own_values):
            break


def _leave_out(
    subject: Subject, sample: Sample, batched: list[Tensor], size: int, outcome: Outcome, own_values: bool
) -> bool:
    """P2 and P3 with one sample of the batch invalid; False if plain torch refuses the batch without it."""
    rows = torch.tensor([n for n in range(size) if n != LEFT_OUT])
    without = run(subject, call_with(sample, lambda t: t[rows].clone() if _among(t, batched) else copied(t)))
    if without.error is not None:
        return False
    masks = {id(t): _all_but_one(t) for t in batched}
    found = [run(subject, call_with(sample, _hiding(subject, masks, garbage))) for garbage in GARBAGE]
    if found[0].refused:
        outcome.refusals.append(str(found[0].error))
        return True
    if found[0].error is not None:
        _compare("P2", found[0], without, outcome)
    elif not _same_shapes(found[0], without, size):
        return False
    else:
        if not own_values:
            _left_out_is_invalid(found[0], without, size, outcome)
        random = _is_random(subject, sample)
        here = _without(found[0], without, size, rows)
        _compare("mask" if random else "P2", here, here.as_plain() if random else without, outcome)
    _same_bits(found, outcome)
    return True


def _left_out_is_invalid(found: Result, without: Result, size: int, outcome: Outcome) -> None:
    """Test that every result with a place for the invalid sample is invalid there."""
    for (data, mask), (want, _) in zip(found.leaves, without.leaves, strict=True):
        for dim in _shrunk(data, want, size):
            if mask is None:
                outcome.failures.append("P8: a plain result")
            elif bool(mask.select(dim, LEFT_OUT).any()):
                outcome.failures.append("P2: the result of an invalid sample is valid")


def _at_random(subject: Subject, sample: Sample, outcome: Outcome) -> None:
    """P3 with half of the elements of every tensor of numbers invalid."""
    generator = torch.Generator().manual_seed(1)
    masks = {id(t): torch.rand(t.shape, generator=generator) < 0.5 for t in sample.tensors if t.is_floating_point()}
    found = [run(subject, call_with(sample, _hiding(subject, masks, garbage))) for garbage in GARBAGE]
    if found[0].refused:
        outcome.refusals.append(str(found[0].error))
    elif isinstance(found[0].error, ValueError) and str(found[0].error) == str(found[1].error):
        return  # the valid elements violate a condition of the call: a row of probabilities no longer adds up to 1
    _same_bits(found, outcome)


def _same_bits(found: list[Result], outcome: Outcome) -> None:
    first, second = found
    if first.error is not None or second.error is not None:
        if type(first.error) is not type(second.error):
            outcome.failures.append(f"P3: {_told(first)} and, with other garbage, {_told(second)}")
        elif not first.refused:
            outcome.failures.append(f"P3: {_told(first)}")
        return
    wrong = first_difference("result", first.leaves, second.leaves, BITS)
    if wrong:
        outcome.failures.append(f"P3: with other garbage, {wrong}")
    else:
        outcome.held.add("P3")


def _compare(law: str, found: Result, wanted: Result, outcome: Outcome) -> None:
    """Test that all values are valid, and equal plain torch's."""
    if found.refused:
        outcome.refusals.append(str(found.error))
        return
    if found.error is not None or len(found.leaves) != len(wanted.leaves):
        outcome.failures.append(f"{law}: {_told(found)}")
        return
    for _, mask in found.leaves:
        if mask is not None and not bool(mask.all()):
            outcome.failures.append(f"{law}: {int((~mask).sum())} of {mask.numel()} elements are invalid, and exist")
            return
    why = first_difference("result", found.as_plain().leaves, wanted.as_plain().leaves, Tolerance(relative=TOLERANCE))
    if why:
        outcome.failures.append(f"{law}: {why}")
    else:
        outcome.held.add(law)


def _told(result: Result) -> str:
    return f"{len(result.leaves)} results" if result.error is None else one_line(result.error)


def _without(found: Result, wanted: Result, size: int, rows: Tensor) -> Result:
    """The results with the sample left out of every dimension that shrinks with the batch."""
    if found.error is not None:
        return found
    leaves = []
    for (data, mask), (want, _) in zip(found.leaves, wanted.leaves, strict=True):
        for dim in _shrunk(data, want, size):
            data = data.index_select(dim, rows)
            mask = None if mask is None else mask.index_select(dim, rows)
        leaves.append((data, mask))
    return Result(tuple(leaves))


def _shrunk(data: Tensor, want: Tensor, size: int) -> list[int]:
    return [d for d in range(data.ndim) if data.shape[d] == size and want.shape[d] == size - 1]


def _same_shapes(found: Result, wanted: Result, size: int) -> bool:
    """Whether the results, without the sample, have the shapes of the smaller batch's results."""
    return len(found.leaves) == len(wanted.leaves) and all(
        data.ndim == want.ndim
        and all(a == b or (a == size and b == size - 1) for a, b in zip(data.shape, want.shape, strict=True))
        for (data, _), (want, _) in zip(found.leaves, wanted.leaves, strict=True)
    )


def _is_random(subject: Subject, sample: Sample) -> bool:
    """Whether plain torch's results depend on the random numbers."""
    first, *others = (run(subject, call_with(sample, copied), seed) for seed in range(SEEDS))
    return any(
        a.shape != b.shape or bit_difference(a, b) is not None
        for other in others
        for (a, _), (b, _) in zip(first.leaves, other.leaves, strict=True)
    )


def _among(tensor: Tensor, tensors: Iterable[Tensor]) -> bool:
    return any(tensor is t for t in tensors)


def _all_but_one(tensor: Tensor) -> Tensor:
    mask = torch.ones_like(tensor, dtype=torch.bool)
    mask[LEFT_OUT] = False
    return mask


def _hiding(subject: Subject, masks: dict[int, Tensor], garbage: str) -> Callable[[Tensor], Any]:
    """A function that puts garbage into a tensor's invalid elements; a tensor without a mask stays plain."""

    def hide(tensor: Tensor) -> Any:
        mask = masks.get(id(tensor))
        return copied(tensor) if mask is None else subject.wrap(refilled(tensor, mask, garbage), mask)

    return hide
