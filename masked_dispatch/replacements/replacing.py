"""How a function, a method or an entry of a table of torch is replaced, and the switch for all of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, MutableMapping
from types import ClassMethodDescriptorType, TracebackType
from typing import Any

from masked_dispatch.replacements.table import Replacement, listed
from op_registry.errors import MaskedSemanticsError

# Takes torch's own function, and the arguments of a call.
Serving = Callable[..., Any]
# From the arguments of a call: whether it is to be served here. Calls that are not go to torch's own.
Concerns = Callable[..., bool]

_on = True


def no_call(*args: Any, **kwargs: Any) -> bool:
    """The `concerns` of a replacement whose calls do not tell by their arguments: none raises while it is off."""
    return False


def replace(owner: Any, name: str, serving: Serving, concerns: Concerns, *, always: bool = False) -> Any:
    """Replace a function of a module, or a method of a class, by one that serves the calls that `concerns` tells.

    always  whether `serving` gets every call while the switch is on; `concerns` then tells which ones rely on it

    Returns the function that is there now. Raises LookupError for a name that table.py does not list.
    """
    there = inspect.getattr_static(owner, name)
    called = serving_instead(f"{name_of(owner)}.{name}", _as_function(there), serving, concerns, always)
    if isinstance(there, (classmethod, ClassMethodDescriptorType)):
        setattr(owner, name, classmethod(called))
    else:
        setattr(owner, name, staticmethod(called) if isinstance(there, staticmethod) else called)
    return called


def _as_function(there: Any) -> Callable[..., Any]:
    """Return torch's attribute as a function. That of a class method takes the class first."""
    if isinstance(there, ClassMethodDescriptorType):  # written in C

        @functools.wraps(there)
        def call(cls: type, *args: Any, **kwargs: Any) -> Any:
            return there.__get__(None, cls)(*args, **kwargs)

        return call
    return there.__func__ if isinstance(there, (classmethod, staticmethod)) else there


def put(owner: Any, name: str, value: object) -> None:
    """Give a class of torch an attribute, which table.py lists."""
    listed(f"{name_of(owner)}.{name}")
    setattr(owner, name, value)


def replace_entry(table: MutableMapping[Any, Any], key: Any, what: str, serving: Serving, concerns: Concerns) -> None:
    """The same of a function in a table of torch, which table.py lists as `what`."""
    table[key] = serving_instead(what, table[key], serving, concerns)


def serving_instead(
    what: str, original: Callable[..., Any], serving: Serving, concerns: Concerns, always: bool = False
) -> Any:
    """The function in torch's place."""
    row = listed(what)

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if always and _on:
            return serving(original, *args, **kwargs)
        if not concerns(*args, **kwargs):
            return original(*args, **kwargs)
        if not _on:
            raise switched_off(what, row)
        return serving(original, *args, **kwargs)

    called.replaces = what  # type: ignore[attr-defined]
    return called


def is_replaced(owner: Any, name: str) -> bool:
    """Whether it has been replaced before."""
    return hasattr(getattr(owner, name), "replaces")


def name_of(owner: Any) -> str:
    """The full name of a module or class."""
    if not isinstance(owner, type):
        return str(owner.__name__)
    # Some classes in C++ have their module in both.
    return owner.__qualname__ if "." in owner.__qualname__ else f"{owner.__module__}.{owner.__qualname__}"


def switched_off(what: str, row: Replacement) -> MaskedSemanticsError:
    """The error of a call that needs a replacement while they are switched off."""
    return MaskedSemanticsError(
        f"{what} of masked tensors needs the replacement by masked_dispatch, which masked_dispatch.patches(False) "
        f"has switched off. Without it, {row.without}. Switch it on, masked_dispatch.patches(True), or call it with "
        "plain tensors: x.to_tensor(value)."
    )


class patches:
    """Switch the functions that this library replaces in torch off, or on again, for the whole process.

    While they are off, a call that needs a replacement raises :class:`MaskedSemanticsError`; every other call is
    torch's own, whatever its arguments. As with ``torch.set_grad_enabled``, a call switches at once, and a ``with``
    block switches back at its end. The page `What is replaced in torch` lists the replacements.

    on  whether the replacements serve masked calls
    """

    def __init__(self, on: bool) -> None:
        global _on
        if not isinstance(on, bool):
            raise TypeError(f"patches takes True or False, not {on!r} of type {type(on).__name__}")
        self.before, _on = _on, on

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        global _on
        _on = self.before
