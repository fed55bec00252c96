"""Bound calls: the arguments of an operator's call by name, for functions that run it on other storage.

A lowering reads ``c.weight`` and ``c.dim``, and changes arguments by ``c.with_(input=rows).run()``: it need not
repeat the operator's signature. Dense rules keep it, except where they pass most of many arguments on
(``masked_rule(..., takes_call=True)``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

from torch._ops import OpOverload

from op_registry.dimensions.labels import Labels, tensors_in
from op_registry.records.dense import map_tensors
from op_registry.rule import Rule


class Bound:
    """A call of `op`, which `rule` serves. Every argument is an attribute, by its name in the schema: ``c.weight``;
    those that are not given have their defaults. Arguments called as an attribute here are items: ``c["tensors"]``.

    op     the overload
    rule   its rule; None in a dense rule's own function, which asks for neither labels nor the rule's run
    named  all arguments by name
    form   what plans may depend on, once it has been asked for (sparse/lowering.py)
    """

    rule: Rule
    form: Hashable = None

    # (functools.cached_property takes a lock in Python 3.11.)
    _labels: Labels | Literal[False] | None = False
    _given: tuple[Sequence[Any], Mapping[str, Any]] | None = None

    def __init__(self, rule: Rule | None, op: OpOverload, named: Mapping[str, Any]) -> None:
        self.__dict__.update(named)
        for name in _OWN.intersection(named):
            del self.__dict__[name]
        self.rule, self.op, self.named = rule, op, named  # type: ignore[assignment]

    @classmethod
    def of(cls, rule: Rule | None, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound:
        """The call ``op(*args, **kwargs)``."""
        call = cls(rule, op, bind_by_name(op, args, kwargs))
        call._given = args, kwargs
        return call

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the arguments of {self.op} are {', '.join(self.named)}; none is {name}")

    def __getitem__(self, name: str) -> Any:
        return self.named[name]

    def __contains__(self, name: str) -> bool:
        return name in self.named

    @property
    def first(self) -> Any:
        """The first argument, whatever its name."""
        return next(iter(self.named.values()))

    @property
    def tensors(self) -> dict[str, Any]:
        """The tensor arguments in the order of the schema, without optional ones that are not given."""
        return tensors_in(self.op, self.named)

    @property
    def labels(self) -> Labels | None:
        """The labels of all dimensions; None if the rule states none, or what it states does not fit this call."""
        if self._labels is False:
            dims = self.rule.dims
            self._labels = None if dims is None else dims.labels(self.op, self.named)
        return self._labels

    def with_(self, /, **changed: Any) -> Bound:
        """The same call with other values of some arguments. Raises KeyError if no argument has a name."""
        unknown = [name for name in changed if name not in self.named]
        if unknown:
            raise KeyError(f"the arguments of {self.op} are {', '.join(self.named)}; none is {', '.join(unknown)}")
        return Bound(self.rule, self.op, {**self.named, **changed})

    def with_tensors(self, changed: Mapping[str, Any]) -> Bound:
        """The same call with other tensors, by the names of `tensors`; one may be in a list: ``tensors[1]``."""
        arguments: dict[str, Any] = {}
        for name, value in changed.items():
            argument, _, number = name.partition("[")
            if number:
                arguments.setdefault(argument, [*self.named[argument]])[int(number[:-1])] = value
            else:
                arguments[argument] = value
        return self.with_(**arguments)

    def map(self, function: Callable[[Any], Any], kind: type | tuple[type, ...]) -> Bound:
        """The same call with `function` of each argument of `kind`, in lists as well."""
        return Bound(self.rule, self.op, {name: map_tensors(function, v, kind) for name, v in self.named.items()})

    @property
    def given(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The positional and the keyword arguments; of changed calls, without last ones that equal their defaults."""
        if self._given is None:
            positional, defaults, required, _ = _schema(self.op)
            given = {name for name, value in self.named.items() if name in required or value is not defaults[name]}
            args = [self.named[name] for name in positional]
            while args and positional[len(args) - 1] not in given:
                args.pop()
            by_keyword = given.difference(positional)
            self._given = args, {name: value for name, value in self.named.items() if name in by_keyword}
        return self._given

    def run_with(self, changed: Mapping[str, Any]) -> Any:
        """The dense run of the rule with other values of some arguments."""
        given, by_keyword = self.given
        args, places = list(given), _schema(self.op)[3]
        try:
            for name, value in changed.items():
                args[places[name]] = value
        except (KeyError, IndexError):  # of an argument that is given by keyword, or not at all
            return self.with_(**changed).run()
        return self.rule.bind(self.op)(*args, **by_keyword)

    def run(self, rule: Rule | None = None) -> Any:
        """The dense run of the rule, or of another rule with the same arguments."""
        return self.applied((rule or self.rule).bind(self.op))

    def applied(self, function: Callable[..., Any]) -> Any:
        """`function` of the arguments as torch passes them."""
        args, kwargs = self.given
        return function(*args, **kwargs)


# What a call is asked for itself: arguments of these names are items.
_OWN = frozenset(vars(Bound))


def of_call(function: Callable[[Bound], Any]) -> Callable[..., Any]:
    """A dense rule's run, called with the overload and its arguments, from a function of the bound call."""

    @functools.wraps(function)
    def run(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        return function(Bound.of(None, op, args, kwargs))

    return run


def bind_by_name(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the schema, defaults included."""
    positional, defaults, *_ = _schema(op)
    return {**defaults, **dict(zip(positional, args, strict=False)), **kwargs}


def argument(op: OpOverload, name: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The value of the argument `name` in a call, or its default; None if the operator has no such argument."""
    if name is not None and name in kwargs:
        return kwargs[name]
    _, defaults, _, places = _schema(op)
    place = places.get(name, -1)  # type: ignore[arg-type]
    return args[place] if 0 <= place < len(args) else defaults.get(name)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def _schema(op: OpOverload) -> tuple[tuple[str, ...], Mapping[str, Any], frozenset[str], Mapping[str, int]]:
    """The names of positional arguments, the defaults of all (None where there is none), and the required ones; and the
    places of the positional ones.
    """
    arguments = op._schema.arguments
    required = frozenset(a.name for a in arguments if not a.has_default_value())
    positional = tuple(a.name for a in arguments if not a.kwarg_only)
    places = {name: place for place, name in enumerate(positional)}
    return positional, {a.name: a.default_value for a in arguments}, required, places
