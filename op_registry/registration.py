"""Registrations, refused where they are written if they cannot work.

An error begins with the word that registers and the line of its call, and names the argument that is wrong:
``reduction at mylib/rules.py:12: the arguments of mylib::total are x, d; none is called dim …``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.dimensions.labels import Dimensions, tensor_arguments
from op_registry.dimensions.slices import Slices
from op_registry.rule import Category, Run, in_dispatcher, is_functional, packet_name, takes_tensor, written_at
from op_registry.schema import functional_form, is_inplace, misfit, written_arguments
from op_registry.traits import Traits

TRAITS = tuple(field.name for field in fields(Traits))
# The types of arguments that may be dimensions.
INTEGERS = ("int", "SymInt", "List[int]", "List[SymInt]")


def spelled(op: OpOverload) -> str:
    """An operator as authors write it: ``torch.ops.mylib.f``, with the overload unless it is the default."""
    return "torch.ops." + str(op).removesuffix(".default")


@dataclass(frozen=True)
class Registration:
    """One call of a word that registers a rule: the word, and the file and line where it is written."""

    word: str
    where: str

    @classmethod
    def of_caller(cls, word: str, depth: int = 1) -> Registration:
        """That of the function that calls the function that calls this, or `depth` frames further up."""
        return cls(word, written_at(depth + 2))

    def error(self, said: str, kind: type[Exception] = TypeError) -> Exception:
        """The error of this registration."""
        return kind(f"{self.word} at {self.where}: {said}")

    # ------------------------------------------------------------------------------------------------------ operators

    def overloads(self, operators: Iterable[Any], category: Category) -> tuple[OpOverload, ...]:
        """The overloads that a rule of `category` gives a meaning: those passed, and of packets the functional ones.

        Raises TypeError for a value that is not an operator, and for an operator that writes to its arguments if rules
        of the category must not; ValueError for an operator that takes no tensor.
        """
        found = [overload for operator in operators for overload in self._overloads_of(operator, category)]
        if not found:
            raise self.error("it needs an operator: torch.ops.mylib.f for an operator mylib::f")
        return tuple(found)

    def _overloads_of(self, operator: Any, category: Category) -> list[OpOverload]:
        if isinstance(operator, OpOverloadPacket):
            given = [o for o in (getattr(operator, name) for name in operator.overloads()) if in_dispatcher(o)]
            given = [o for o in given if is_functional(o)] or given
        elif isinstance(operator, OpOverload):
            given = [operator]
        else:
            raise self.error(no_operator(operator))
        with_tensors = [o for o in given if takes_tensor(o)]
        if not with_tensors:
            raise self.error(f"{operator} has no functional overload that takes a tensor", ValueError)
        for op in with_tensors:
            if not is_functional(op) and not category.may_write:
                raise self.error(writes(op))
        return with_tensors

    # --------------------------------------------------------------------------------------------------------- traits

    def category(self, value: Any, known: Collection[str]) -> Category:
        """`value` if it is a category; TypeError with the nearest of the `known` names if it is not."""
        if isinstance(value, Category):
            return value
        said = f"category={value!r} is no category"
        if isinstance(value, str):
            near = _nearest(value.upper().replace(" ", "_"), known)
            said += f": pass the value op_registry.authoring.{near}" if near else f"; there are {', '.join(known)}"
        raise self.error(said)

    def traits(self, given: Mapping[str, Any], known: Sequence[str], needs: Sequence[str] = ()) -> Traits:
        """The traits of a rule. TypeError for one that does not exist, that nothing here reads, or that is missing."""
        for name in given:
            if name not in known:
                near = _nearest(name, known)
                hint = f"; did you mean {near}?" if near else "."
                exists = f"reads no trait {name}" if name in TRAITS else f"has no trait {name}"
                raise self.error(f"{self.word} {exists}{hint} It takes {', '.join(known)}")
        missing = [name for name in needs if name not in given]
        if missing:
            raise self.error(f"it needs {', '.join(f'{name}=...' for name in missing)}")
        try:
            return Traits(**given)
        except TypeError as error:
            raise self.error(str(error)) from None

    # ----------------------------------------------------------------------------------------- the operators' arguments

    def dimensions(self, ops: Sequence[OpOverload], dims: Dimensions | None, is_stated: bool) -> None:
        """TypeError unless calls of each overload can have the dimensions that a rule or its category states."""
        if isinstance(dims, Slices):
            self._arguments_of_slices(ops, dims, is_stated)
        elif dims is not None:
            for op in ops:
                wrong = dims.misfit(op)
                if wrong is not None:
                    raise self.error(f"dims={wrong} ({spelled(op)})")

    def _arguments_of_slices(self, ops: Sequence[OpOverload], slices: Slices, is_stated: bool) -> None:
        """TypeError unless each overload has the arguments that `slices` names, or has none to take for dimensions."""
        gives = "" if slices.gives == Slices().gives else f"{slices.gives!r}, "
        for op in ops:
            names = [a.name for a in op._schema.arguments]
            described = f"the arguments of {spelled(op)} are {', '.join(names)}"
            for trait in ("dim", "number") if is_stated else ():
                value = getattr(slices, trait)
                if value is not None and value not in names and value != getattr(Slices(), trait):
                    raise self.error(f"{described}; none is what dims=Slices({trait}={value!r}) names")
            others = [a.name for a in op._schema.arguments if _may_be_dimensions(a)]
            if slices.dim is not None and slices.dim not in names and others:
                raise self.error(
                    f"{described}; none is called {slices.dim}, which {self.word} reads for the dimensions of a slice. "
                    f"If {others[0]} says which they are, add dims=Slices({gives}dim={others[0]!r}); if the whole "
                    f"tensor is one slice, dims=Slices({gives}dim=None)"
                )
            keeps = [name for name in names if name.startswith("keep")]
            if slices.gives == "one" and keeps and slices.keepdim not in keeps:
                dim = f"dim={slices.dim!r}, " if is_stated else ""
                raise self.error(
                    f"{described}; none is called {slices.keepdim}, which {self.word} reads for whether reduced "
                    f"dimensions are kept. If {keeps[0]} says so, add dims=Slices({dim}keepdim={keeps[0]!r})"
                )

    def function(self, function: Run, ops: Sequence[OpOverload], takes_op: bool, unchanged: Run | None = None) -> None:
        """TypeError unless the function can be called with what each overload requires; and the trait, if stated."""
        for op in ops:
            self._callable(function, op, ["the overload"] * takes_op, op._schema.arguments, "the arguments of ")
            if unchanged is not None:
                self._callable(unchanged, op, [], op._schema.arguments[1:], "what stands behind the first argument of ")

    def _callable(
        self, function: Run, op: OpOverload, first: list[str], arguments: Sequence[torch.Argument], whose: str
    ) -> None:
        if not callable(function):
            raise self.error(f"{function!r} is no function, which a rule has to be")
        wrong = misfit(function, first, [a for a in arguments if not a.has_default_value()])
        if wrong is not None:
            names = ", ".join([*first, *(a.name for a in arguments)])
            raise self.error(f"{wrong} cannot be called with {whose}{spelled(op)}: {names}")

    def body(self, function: Run, ops: Sequence[OpOverload], dims: Dimensions) -> None:
        """TypeError unless a function of slices can be called with what each overload requires besides dimensions."""
        read = {getattr(dims, name, None) for name in ("dim", "keepdim", "count")}
        for op in ops:
            required = [a.name for a in op._schema.arguments[1:] if not a.has_default_value()]
            if isinstance(dims, Slices) and (others := [name for name in tensor_arguments(op) if name in required]):
                raise self.error(
                    f"dims=Slices(...) states the dimensions of the first tensor alone, and {spelled(op)} also takes "
                    f"the {'tensors' if len(others) > 1 else 'tensor'} {', '.join(others)}. If {others[0]} is a "
                    "parameter for the last dimensions, as a norm's weight, state dims=LastDims(...); if it goes with "
                    f"the first tensor element by element, write the rule with operators: @masked_rule({spelled(op)}, "
                    "category=COMPOSITE)"
                )
            arguments = [a for a in op._schema.arguments if a.name not in read]
            self._callable(function, op, ["the overload", "the slices"], arguments, "what a body gets for ")

    def function_inside(self, function: Run, op: OpOverload) -> None:
        """The same of a function that gets what one caller passes: the required arguments or more."""
        given = list(op._schema.arguments)
        while misfit(function, [], given) is not None:
            if not given or not given.pop().has_default_value():
                self.function(function, (op,), takes_op=False)
                return


def _may_be_dimensions(argument: torch.Argument) -> bool:
    kind = str(argument.real_type if hasattr(argument, "real_type") else argument.type)
    return re.sub(r"^Optional\[(.*)\]$", r"\1", kind) in INTEGERS


def _nearest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(known), 1)), None)


def no_operator(value: object) -> str:
    """Why `value`, passed in place of an operator, is not an operator, and what to pass instead."""
    named = re.search(r"(\w+)::(\w+)", repr(value))  # what torch.library.custom_op returns prints its name
    if isinstance(value, str):
        named = re.fullmatch(r"(?:torch\.ops\.)?(\w+)(?:\.|::)(\w+)(?:\.\w+)?", value)
        if named is None or not hasattr(getattr(torch.ops, named[1]), named[2]):
            return f"{value!r} is a string, and torch.ops has no operator of this name: pass the operator itself"
    own_name = getattr(value, "__name__", "")
    if named is None and not isinstance(value, type(torch.ops.aten)) and callable(value):
        named = re.match(r"(aten)::(\w+)", f"aten::{own_name}") if hasattr(torch.ops.aten, own_name) else None
    way_out = f"torch.ops.{named[1]}.{named[2]}" if named else "torch.ops.mylib.f for an operator mylib::f"
    return f"{value!r} is no operator of torch's dispatcher, which rules belong to: pass {way_out}"


def writes(op: OpOverload) -> str:
    """Why an operator that writes to its arguments cannot follow a law, and what to write instead."""
    name, function = spelled(op), op._schema.name.partition("::")[2]
    arguments = ", ".join(a.name for a in op._schema.arguments)
    said = (
        f"{name} writes to {' and '.join(written_arguments(op))}, and a law says what a result is, not what is "
        "written. A rule of the category COMPOSITE gets the tensors of the call in place of records, and writes "
        f"by other operators:\n    @masked_rule({name}, category=COMPOSITE)\n    def {function}({arguments}): ..."
    )
    base = functional_form(op)
    if base is not None:
        return f"{said}\n  Or register {spelled(base)}, by whose rule {name} is written back"
    if not is_inplace(op):
        return said
    without = packet_name(op).removesuffix("_") if packet_name(op).endswith("_") else f"{packet_name(op)}_functional"
    return f"{said}\n  Or define an operator {without} that returns a new tensor, and register that: {name} follows it"
