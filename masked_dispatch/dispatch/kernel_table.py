"""The kernel that is registered for each overload; while somebody watches, a kernel around it is registered instead.

So watching costs nothing while nobody does: there is no question to ask in a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torch._ops import OpOverload
from torch.library import Library

from masked_dispatch.torch_internals import register_kernel

Kernel = Callable[..., Any]
# Takes an overload, its kernel, and the number of arguments that the kernel takes before the operator's own; gives the
# kernel that is called in its place, with the same arguments.
Watch = Callable[[OpOverload, Kernel, int], Kernel]


class Registered(NamedTuple):
    """A kernel, and whether it takes the keyset as its first argument."""

    kernel: Kernel
    with_keyset: bool


class KernelTable:
    """One kernel for each overload, registered at PreDispatch."""

    def __init__(self) -> None:
        self._registered: dict[OpOverload, Registered] = {}
        self._libraries: dict[str, Library] = {}
        # Those of a watch, or, after it, of the kernels registered again.
        self._over: dict[str, Library] = {}
        self._watch: Watch | None = None
        self._lock = threading.RLock()

    def put(self, op: OpOverload, kernel: Kernel) -> None:
        """Register `kernel(keyset, *args, **kwargs)` for `op`, replacing an earlier one."""
        with self._lock:
            self._register(self._libraries, op, Registered(kernel, True))
            self.note(op, kernel, with_keyset=True)
            if self._watch is not None:
                self._register(self._over, op, Registered(self._watch(op, kernel, 1), True))

    def note(self, op: OpOverload, kernel: Kernel, *, with_keyset: bool) -> None:
        """Remember a kernel that is registered elsewhere, so that it can be watched."""
        self._registered[op] = Registered(kernel, with_keyset)

    def watch(self, watch: Watch) -> None:
        """From now on call what `watch` gives in place of each kernel, until `unwatch`."""
        with self._lock:
            assert self._watch is None
            self._watch = watch
            self._replace(
                lambda op, known: Registered(watch(op, known.kernel, int(known.with_keyset)), known.with_keyset)
            )

    def unwatch(self) -> None:
        """Register the kernels themselves again."""
        with self._lock:
            self._watch = None
            self._replace(lambda op, known: known)

    def _replace(self, kernel_of: Callable[[OpOverload, Registered], Registered]) -> None:
        # Destroying a library does not bring back what it had replaced (torch_internals.py, 33): the kernels are
        # registered again, in a library that the next replacement destroys.
        earlier, self._over = self._over, {}
        for op, known in self._registered.items():
            self._register(self._over, op, kernel_of(op, known))
        del earlier

    def _register(self, libraries: dict[str, Library], op: OpOverload, registered: Registered) -> None:
        if op.namespace not in libraries:
            libraries[op.namespace] = Library(op.namespace, "IMPL")
        register_kernel(libraries[op.namespace], op, *registered)


kernel_table = KernelTable()
