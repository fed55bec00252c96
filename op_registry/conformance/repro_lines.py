"""What a trial is called, and the command line that runs it again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torch._ops import OpOverload

from op_registry.conformance.own_operators import RegisteredOperator
from op_registry.conformance.sample import Operator, Sample

if TYPE_CHECKING:
    from op_registry.conformance.trials import Settings

# A command-line option that selects one check of a law: its name and value.
Option = tuple[str, str]


def describe(sample: Sample, kind: str) -> str:
    """A short description of a trial; gaps select trials by its words."""
    overload = f" {sample.fn}" if isinstance(sample.fn, OpOverload) else ""
    return f"{str(sample.dtype).removeprefix('torch.')} sample {sample.number} {kind}{overload}"


def repro(operator: Operator, law: str, description: str, settings: Settings, option: Option | None = None) -> str:
    """The command line that runs one trial."""
    dtype, _, number, kind = description.split()[:4]
    drawn = "" if law == "P9" else f" --mask {kind} --dtype {dtype}"
    name = settings.subject or os.environ.get("OP_REGISTRY_SUBJECT")
    subject = f" --subject {name}" if name else ""
    chosen_check = f" {option[0]} {option[1]}" if option else ""
    device = f" --device {settings.device}" if settings.device else ""
    return (
        f"python -m op_registry check{imports(operator, settings)} --op {operator.name} --law {law} "
        f"--sample {number}{drawn} --seed {settings.seed}{chosen_check}{subject}{device}"
        f"{remark(operator)}"
    )


def imports(operator: Operator, settings: Settings) -> str:
    """The --import options that register the operator's rule."""
    rule_module = operator.module if isinstance(operator, RegisteredOperator) else None
    needed = [rule_module] if rule_module is not None and not _built_in(rule_module) else []
    return "".join(f" --import {module}" for module in dict.fromkeys([*settings.modules, *needed]))


def _built_in(module: str) -> bool:
    return module.partition(".")[0] == "op_registry"


def remark(operator: Operator) -> str:
    """A shell comment that says why the command line does not work as it is; "" if it does."""
    if not isinstance(operator, RegisteredOperator) or operator.module is not None:
        return ""
    where = operator.rule.where if operator.rule is not None else "an overlay"
    return f"  # the rule is registered in __main__ ({where}): move it to a module, and add --import MODULE"
