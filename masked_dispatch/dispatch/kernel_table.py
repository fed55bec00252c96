"""The kernel of each overload, made when a masked tensor first reaches the overload.

Importing the library would otherwise create thousands of kernels and OpOverload objects, and a program uses a few
dozen. We register a *place* for a kernel with torch, a callable that calls its present kernel. So we can also replace a
kernel at any time, in one step, while other threads call it: when a rule changes, or to wrap every kernel while
somebody watches. This costs nothing while nobody watches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch._ops import OpOverload
from torch.library import Library

from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.engine_internals import delegating
from masked_dispatch.process import Lock
from masked_dispatch.torch_internals import exchange_function, overload_named, register_kernel

Kernel = Callable[..., Any]
# A function of an overload, its kernel, and the number of arguments that the kernel takes before the operator's own. It
# returns the kernel to call in its place, with the same arguments.
Watch = Callable[[OpOverload, Kernel, int], Kernel]


class Known(NamedTuple):
    """A kernel, and whether it takes the keyset as its first argument."""

    kernel: Kernel
    with_keyset: bool


class KernelTable:
    """One kernel for each overload, called at PreDispatch."""

    def __init__(self) -> None:
        # By the overload's qualified name. A partial without arguments adds 0.05 µs and no Python frame to a call.
        self._places: dict[str, functools.partial[Any]] = {}
        self._known: dict[OpOverload, Known] = {}
        self._libraries: dict[str, Library] = {}
        self._watch: Watch | None = None
        self._lock = Lock()

    def serve(self, names: Iterable[str], make: Callable[[OpOverload], Kernel]) -> None:
        """Serve the overloads with these qualified names; `make` makes a kernel at the overload's first call."""
        with self._lock.here:
            for name in names:
                self._serve(name, self._made_on_call(name, make), with_keyset=True)

    def put(self, op: OpOverload, kernel: Kernel, *, with_keyset: bool = True) -> None:
        """Serve `op` by ``kernel(keyset, *args, **kwargs)``, which replaces an earlier kernel."""
        with self._lock.here:
            self._known[op] = Known(never_compiled(kernel), with_keyset)
            self._put_in_force(op)

    def __contains__(self, op: OpOverload) -> bool:
        """Whether this table serves the overload, even if it has not made the kernel yet."""
        return op.name() in self._places

    @property
    def made(self) -> list[OpOverload]:
        """The overloads whose kernels exist."""
        with self._lock.here:  # a kernel under construction may use a rule that has just been replaced
            return list(self._known)

    def watch(self, watch: Watch) -> None:
        """Until `unwatch`, call the kernel that `watch` returns in place of each kernel."""
        with self._lock.here:
            assert self._watch is None
            self._watch = watch
            for op in self._known:
                self._put_in_force(op)

    def unwatch(self) -> None:
        """Call the kernels themselves again."""
        with self._lock.here:
            self._watch = None
            for op in self._known:
                self._put_in_force(op)

    def _put_in_force(self, op: OpOverload) -> None:
        kernel, with_keyset = self._known[op]
        if self._watch is not None:
            kernel = never_compiled(self._watch(op, kernel, int(with_keyset)))
        place = self._places.get(op.name())
        if place is None:
            self._serve(op.name(), kernel, with_keyset)
        else:
            exchange_function(place, kernel)

    def _made_on_call(self, name: str, make: Callable[[OpOverload], Kernel]) -> Kernel:
        def first_call(*args: Any, **kwargs: Any) -> Any:
            op = overload_named(name)
            with self._lock.here:
                if op in self._known:  # another thread made it, or an exception came before it took effect
                    self._put_in_force(op)
                else:
                    self.put(op, make(op))
                place = self._places[name]
            return place(*args, **kwargs)

        return delegating(never_compiled(first_call))

    def _serve(self, name: str, kernel: Kernel, with_keyset: bool) -> None:
        self._places[name] = place = functools.partial(kernel)
        namespace = name.partition("::")[0]
        if namespace not in self._libraries:
            self._libraries[namespace] = Library(namespace, "IMPL")
        register_kernel(self._libraries[namespace], name, place, with_keyset)


kernel_table = KernelTable()
