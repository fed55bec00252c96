"""A rule: what one aten operator means on masked tensors, as a value that prints as a sentence.

More can be attached to a rule after it is created: lowerings to other storage records, an oracle, samples, and gaps
(exact exceptions to a law, which conformance runs as strict expected failures). They belong to the rule, not to the
operator: a rule that replaces it starts without them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from torch._ops import OpOverload, OpOverloadPacket

from op_registry.digests import digest_of_code
from op_registry.dimensions.labels import Dimensions
from op_registry.dimensions.slices import Slices
from op_registry.errors import MaskedSemanticsError
from op_registry.schema import misfit
from op_registry.traits import NO_TRAITS, Traits

Run = Callable[..., Any]
# Whatever can run a rule on another storage record (see op_registry.sparse.lowering).
Lowering = TypeVar("Lowering")


@dataclass(frozen=True)
class Category:
    """A law that many operators share.

    name       its name in coverage and error messages
    law        the law in a sentence, as on the semantics page
    run        the generic dense run, called as ``run(op, *args, **kwargs)`` with records for tensors; None if each
               operator has its own
    dims       which dimensions its operators work on, if they have that in common
    lowerings  how its rules run on other storage records, by the record's type (see :mod:`op_registry.sparse.lowering`)
    closed     whether its law holds for its own rules only: a function that replaces one of them follows no law
    plainly    whether its rules return plain tensors; in other categories a plain result would have lost its mask
    why_dense  why its rules need dense storage if they have no lowering
    traits     which traits its run reads
    needs      which of them a registration has to state
    by_rows    whether its operators may run on invalid rows, whose numbers neither raise nor reach another row
    may_write  whether its rules may belong to operators that write to their arguments
    """

    name: str
    law: str
    run: Run | None = None
    dims: Dimensions | None = None
    by_rows: bool = False
    lowerings: Mapping[type, Any] = field(default_factory=dict, compare=False, repr=False)
    closed: bool = False
    plainly: bool = False
    why_dense: str = "no lowering is written for it"
    traits: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    may_write: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.law}"


OVERRIDE = Category("override", "as its own documentation says")


@dataclass(frozen=True)
class Gap:
    """A named exception to a law, with its reason; `law` and `where` identify the check that must fail."""

    law: str
    why: str
    where: str = ""

    def __str__(self) -> str:
        return f"gap in {self.law}{f' ({self.where})' if self.where else ''}: {self.why}"


@dataclass(eq=False)
class Rule:
    """What `ops` mean on masked tensors.

    ops        the aten overloads that the rule serves, all functional or all views
    category   the law it follows
    run        called with the operator's own arguments, records in place of tensors
    takes_op   whether `run` takes the overload as its first argument (category runs do)
    traits     what its category or a lowering needs to know about the operator: identity=…, derivative=…, slices=…
    where      file and line of its definition
    lowerings  how it runs on other storage records, in place of its category's lowerings, by the record's type
    """

    ops: tuple[OpOverload, ...]
    category: Category
    run: Run
    takes_op: bool
    where: str
    traits: Traits = NO_TRAITS
    lowerings: dict[type, Any] = field(default_factory=dict)
    oracles: list[Run] = field(default_factory=list)
    sample_makers: list[Run] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    # Called when what the rule does changes after it was registered.
    listeners: list[Callable[[Rule], None]] = field(default_factory=list, repr=False)

    @property
    def name(self) -> str:
        return packet_name(self.ops[0])

    def __str__(self) -> str:
        overloads = ", ".join(op._overloadname for op in self.ops)
        return f"{self.name} ({overloads}) is {self.category} [{self.where}]"

    def bind(self, op: OpOverload) -> Run:
        """`run` for one overload, called with that overload's arguments."""
        function = self._bound(op)
        return function if self.is_built_in else naming_its_rule(self, op, function)

    @property
    def is_built_in(self) -> bool:
        """Whether it is one of op_registry's own; errors in these are torch's or the user's, and don't name a rule."""
        return self.where.startswith("op_registry/")

    def _bound(self, op: OpOverload) -> Run:
        if not self.takes_op:
            return self.run
        reads_traits = self.run is self.category.run and self.category.traits
        return functools.partial(self.run, op, **({"_traits": self.traits} if reads_traits else {}))

    def fingerprint(self) -> str:
        """A digest of what the rule does, the same in every process if its code can be hashed (see digests.py)."""
        return digest_of_code(str(self), self.run, self.traits, self.lowerings)

    @property
    def dims(self) -> Dimensions | None:
        """Which dimensions the operator works on; None if its rule does not state it."""
        stated, shared = self.traits.dims, self.category.dims
        # Slices that a category states hold for its own run, whose arguments it reads; a function may have others.
        own = self.run is self.category.run or not isinstance(shared, Slices)
        return shared if stated is None and own else stated

    @property
    def slices(self) -> Slices | None:
        """How the operator works slice by slice; None if it does not, or its rule does not state how."""
        dims = self.dims
        return dims if isinstance(dims, Slices) else None

    @property
    def positions(self) -> tuple[int, ...] | None:
        """The indices of results that are positions in a slice; None if the rule does not say whether there are any."""
        stated = None if self.slices is None else self.slices.positions
        return () if stated is None and self.is_built_in else stated

    def is_plain(self, result: int) -> bool:
        """Whether this result is meant to be a plain tensor, by the category or by the rule's trait ``plain=(…)``."""
        return self.category.plainly or result in self.traits.plain

    def lowering(self, record: type) -> Callable[[Lowering], Lowering]:
        """Decorator: how the operator runs on another storage record, in place of its category's lowering.

        The function is called as ``(op, *args, **kwargs)``, with the overload first, and raises NotLowered for a call
        that it does not handle. List alternatives in the order in which to try them::

            rule.lowering(Sparse)(first_of(by_rows, by_elements))
        """

        def add(run: Lowering) -> Lowering:
            if record in self.lowerings:
                raise ValueError(
                    f"{self.name} already has a lowering to {record.__name__}. List alternatives in one place, in the "
                    "order in which to try them: first_of(a, b), or give the operator a rule of its own by "
                    "registry.replace(...)."
                )
            for way in () if self.is_built_in else getattr(run, "alternatives", (run,)):
                self._check_lowering(way)
            self.lowerings[record] = run
            for listener in self.listeners:
                listener(self)
            return run

        return add

    def _check_lowering(self, way: Any) -> None:
        """TypeError for a lowering that names an argument which no overload has, or that cannot be called with them."""
        names = [a.name for op in self.ops for a in op._schema.arguments]
        unknown = [name for name in getattr(way, "names", ()) if name not in names]
        if unknown:
            raise TypeError(
                f"on_call names {unknown[0]}, and the arguments of {self.ops[0]} are {', '.join(dict.fromkeys(names))}"
            )
        if isinstance(way, FunctionType):
            for op in self.ops:
                required = [a for a in op._schema.arguments if not a.has_default_value()]
                wrong = misfit(way, ["the overload"], required)
                if wrong is not None:
                    raise TypeError(
                        f"{wrong} cannot be called with what a lowering of {op} gets: the overload, "
                        f"{', '.join(a.name for a in op._schema.arguments)}. With @on_call, it gets the call as its "
                        "one argument"
                    )

    def oracle(self, function: Run) -> Run:
        """Decorator: a slow, obviously correct implementation to compare with, in place of the category's."""
        self.oracles.append(function)
        return function

    def samples(self, maker: Run) -> Run:
        """Decorator: sample arguments, for operators without an OpInfo."""
        self.sample_makers.append(maker)
        return maker

    def gap(self, law: str, *, why: str, where: str = "") -> Rule:
        """Declare an exception: conformance expects exactly this failure, and fails once it is fixed."""
        self.gaps.append(Gap(law, why, where))
        return self


class InsideRule(Rule):
    """The rule of one operator inside of `function`, a Python function or a module of them (see laws/inside.py).

    when  values that local variables of the function must have for the rule to hold: ``{"reduction": "batchmean"}``
    usual  gives the rule of an operator elsewhere, which works on the same dimensions
    """

    def __init__(
        self,
        function: Callable[..., Any] | ModuleType,
        op: OpOverload,
        category: Category,
        run: Run,
        when: Mapping[str, object],
        where: str,
        usual: Callable[[OpOverload], Rule | None],
    ) -> None:
        super().__init__((op,), category, run, takes_op=False, where=where)
        self._usual = usual
        self.function = function
        self.when = dict(when)

    @property
    def dims(self) -> Dimensions | None:
        elsewhere = self._usual(self.ops[0])
        return None if elsewhere is None else elsewhere.dims

    @property
    def function_name(self) -> str:
        """``torch.nn.functional.kl_div``; the name of the module for a module."""
        if isinstance(self.function, ModuleType):
            return self.function.__name__
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def __str__(self) -> str:
        conditions = ", ".join(f"{name}={value!r}" for name, value in self.when.items())
        named = f"{self.function_name}({conditions})" if conditions else self.function_name
        return f"inside {named}: {super().__str__()}"

    def fingerprint(self) -> str:
        return digest_of_code(str(self), self.run, self.lowerings)

    def holds(self, variables: Mapping[str, object]) -> bool:
        """Whether the function's local variables have the values that the rule asks for."""
        return all(variables.get(name) == value for name, value in self.when.items())


def naming_its_rule(rule: Rule, op: OpOverload, function: Run) -> Run:
    """`function`, what another library's rule does: an error in it says which rule, and so does a mask that misfits."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            for record in result if isinstance(result, (tuple, list)) else (result,):
                _check_mask(record)
            return result
        except MaskedSemanticsError:
            raise  # the rule's own words for its users
        except Exception as error:
            name_rule(error, rule, op)
            raise

    return named


def name_rule(error: Exception, rule: Rule, op: OpOverload) -> None:
    """Add to an error's text which rule raised it.

    Python 3.10 prints no notes (BaseException.add_note), so that the line is part of the message.
    """
    if rule.is_built_in or IN_A_RULE in str(error) or not error.args or str(error) != error.args[0]:
        return  # a rule that this one calls has been named; or the text is no plain message
    run = getattr(rule.run, "__name__", type(rule.run).__name__)
    error.args = (f"{error.args[0]}{IN_A_RULE}{op}: {run}, {rule.category.name}, at {rule.where}", *error.args[1:])


IN_A_RULE = "\n  in the rule of "


def _check_mask(record: Any) -> None:
    """ValueError if a record's validity does not broadcast to its data. Symbolic sizes are not compared."""
    validity = getattr(record, "validity", None)
    if validity is None or not hasattr(record, "data"):
        return
    mask, data = tuple(validity.shape), tuple(record.data.shape)
    sizes = zip(reversed(mask), reversed(data), strict=False)
    if len(mask) > len(data) or any(type(m) is type(d) is int and m not in (1, d) for m, d in sizes):
        raise ValueError(f"a result of shape {data} cannot have a mask of shape {mask}, which does not broadcast to it")


def packet_name(op: OpOverload | OpOverloadPacket) -> str:
    """`aten::add.Tensor` → `add`; names in other namespaces are qualified: `mylib::gelu_fast`."""
    qualified = op._schema.name if isinstance(op, OpOverload) else op._qualified_op_name
    return qualified.removeprefix("aten::")


def is_functional(op: OpOverload) -> bool:
    """Whether the overload writes to none of its arguments."""
    return not op._schema.is_mutable


def in_dispatcher(op: OpOverload) -> bool:
    """Whether the overload can be dispatched at all: some, like eq.Tensor_list, exist in TorchScript only."""
    try:
        op._can_decompose()
    except RuntimeError:
        return False
    return True


def takes_tensor(op: OpOverload) -> bool:
    """Whether any argument is a tensor, an optional tensor or a list of them."""
    return any("Tensor" in str(a.type) for a in op._schema.arguments)


def written_at(depth: int) -> str:
    """file:line of the caller `depth` frames up, where a rule is defined."""
    frame = sys._getframe(depth)
    return f"{path_in_package(frame.f_code.co_filename, frame.f_globals.get('__name__', ''))}:{frame.f_lineno}"


def path_in_package(file: str, module: str) -> str:
    """The path of a module's file, starting at its top-level package; for a script, its last three parts."""
    path = file.replace("\\", "/")
    root = path.rfind(f"/{module.partition('.')[0]}/")
    return path[root + 1 :] if root >= 0 else "/".join(path.split("/")[-3:])
