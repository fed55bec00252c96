"""A random program as a value: the tensors that it starts from, and its steps, each a line of Python."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A tensor that a program starts from.

    name           its variable
    shape, dtype   of the tensor; `dtype` is an attribute of torch
    seed           of its data and of its mask
    mask           the kind of mask (:data:`op_registry.fuzz.sources.MASKS`)
    under          the source whose mask tensor it is given, instead of one of its own
    storage        "dense", or a storage of the subject
    requires_grad  whether it is a leaf that requires grad
    axes           of a padded batch (P9): what its dimensions are (:mod:`op_registry.fuzz.ragged`)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    seed: int
    mask: str
    under: str | None = None
    storage: str = "dense"
    requires_grad: bool = False
    axes: tuple[str | int, ...] = ()


@dataclass(frozen=True)
class Step:
    """A line of a program.

    name      the variable that it assigns; a step that only writes gets a name, for messages, but assigns nothing
    code      a Python expression or statement, with {0}, {1} … for its operands
    plain     the code for plain tensors if it differs (a conversion to another storage)
    operands  the variables that it reads
    writes    whether it writes to its first operand and assigns no variable
    view      whether its value shares memory with its first operand in plain torch
    random    whether it draws random numbers
    kind      the line of a table that it was drawn from (P9)
    """

    name: str
    code: str
    operands: tuple[str, ...]
    plain: str | None = None
    writes: bool = False
    view: bool = False
    random: bool = False
    kind: str = ""

    def line(self, plain: bool = False) -> str:
        """The line of Python."""
        code = self.expression(plain)
        return code if self.writes else f"{self.name} = {code}"

    def expression(self, plain: bool = False) -> str:
        """Its code with the variables in place of {0}, {1} …"""
        code = self.plain if plain and self.plain is not None else self.code
        return re.sub(r"\{(\d)\}", lambda found: self.operands[int(found[1])], code)


@dataclass(frozen=True)
class Program:
    """Sources and steps; `seed` generated the program, and seeds the random numbers of each step."""

    seed: int
    sources: tuple[Source, ...]
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        lines = [
            f"{s.name}: {s.dtype}{list(s.shape)}, mask {s.mask}{f' of {s.under}' if s.under else ''}, {s.storage}"
            f"{', requires grad' if s.requires_grad else ''}"
            for s in self.sources
        ]
        return "\n".join([*lines, *(step.line() for step in self.steps)])
