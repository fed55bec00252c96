"""How a check of an assumption about torch is registered, and what it says where torch is another one.

No assert statements: `python -O` drops them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree

# The namespace of operators that checks define, each for as long as it runs and by a name of its own.
NAMESPACE = "masked_dispatch_assumptions"

Check: TypeAlias = Callable[[], None]


@dataclass(frozen=True)
class Assumption:
    """A check of one thing that is assumed of torch.

    number  where torch_internals.py lists it
    silent  where torch is no longer so, results would be wrong without any error
    """

    number: int
    title: str
    run: Check
    silent: bool


# All that have been defined, in that order.
ASSUMPTIONS: list[Assumption] = []


def assumption(number: int, what: str = "", *, silent: bool = False) -> Callable[[Check], Check]:
    """Decorator: register a check, whose name is what it is called in reports.

    what  what torch no longer does where the check raises; left out where blocks of the check say it, by `assumed`
    """

    def register(check: Check) -> Check:
        title = check.__name__.replace("_", " ")
        if any(title == other.title for other in ASSUMPTIONS):
            raise ValueError(f"there is a check called {title!r} already")
        run = assumed(what)(check) if what else check
        ASSUMPTIONS.append(Assumption(number, title, run, silent))
        return run

    return register


def assumption_about_graphs(number: int, what: str = "") -> Callable[[Check], Check]:
    """Decorator: register a check that compiles."""
    return lambda check: assumption(number, what)(compiling()(check))


def broken_among(checks: Iterable[Assumption]) -> list[str]:
    """A line for each of these checks that this torch does not pass."""
    lines = []
    for check in checks:
        problem = _problem_of(check)
        if problem is not None:
            lines.append(f"{check.number}. {check.title}: {problem}")
    return lines


def _problem_of(check: Assumption) -> Exception | None:
    try:
        check.run()
    except Exception as error:
        return error
    return None


@contextlib.contextmanager
def assumed(what: str) -> Iterator[None]:
    """For a block, or decorating a check: say which torch it is that no longer does `what`."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"torch {torch.__version__} no longer holds that {what}: {error}") from error


def expect(condition: object, actual: object = None) -> None:
    """Raise, with what was found, unless the condition holds."""
    if not condition:
        raise AssertionError("it is not so" if actual is None else f"found {actual!r}")


def expect_equal(actual: object, expected: object) -> None:
    """Raise, with both, unless they are equal."""
    if actual != expected:
        raise AssertionError(f"found {actual!r}, expected {expected!r}")


@dataclass
class Raised:
    """What a block has raised, once it has ended."""

    error: Any = None


@contextlib.contextmanager
def raises(kind: type[Exception], match: str = "") -> Iterator[Raised]:
    """Raise unless the block raises `kind` with such a text."""
    raised = Raised()
    try:
        yield raised
    except kind as error:
        raised.error = error
        expect(re.search(match, str(error)), error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def replaced(owner: object, name: str, value: object) -> contextlib.AbstractContextManager[Any]:
    """Inside, the attribute has this value; afterwards its own again, also where the block has set another."""
    return mock.patch.object(owner, name, value)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """For a check that compiles: the compiler remembers nothing before it and nothing after it."""
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def wrapper_class(notify: Callable[[Any], None], **options: Any) -> Any:
    """A bare wrapper of one tensor, made by `of`, which tells of every operator that is called on it."""

    class Wrapper(Tensor):
        held: Tensor

        @staticmethod
        def of(inner: Tensor, requires_grad: bool = False) -> Wrapper:
            wrapper: Wrapper = Tensor._make_wrapper_subclass(
                Wrapper, inner.shape, dtype=inner.dtype, requires_grad=requires_grad, **options
            )
            wrapper.held = inner
            return wrapper

        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            notify(func)
            raw = _pytree.tree_map_only(Wrapper, lambda t: t.held, (args, kwargs or {}))
            return _pytree.tree_map_only(Tensor, Wrapper.of, func(*raw[0], **raw[1]))

    return Wrapper
