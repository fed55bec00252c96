"""A program as Python code that runs by itself and shows how it breaks a law."""

from __future__ import annotations

from torch import Tensor

from op_registry.conformance.subject import Subject
from op_registry.fuzz.programs import Program, Source
from op_registry.fuzz.sources import data_of, mask_under, with_garbage

# Tensors of more elements are made from their seed.
MOST_WRITTEN_OUT = 64

HEAD = """import torch
import torch.nn.functional as F
from torch import inf, nan
from op_registry.conformance.subjects import find_subject
from op_registry.fuzz import idioms, ragged, sources
from op_registry.fuzz.programs import Source

subject = find_subject({subject})
"""


def snippet(
    program: Program, subject: str | None, garbage: int | None, own: bool = False, compiled: bool = False
) -> str:
    """Python code that makes the tensors, garbage included, runs the steps and prints every value.

    subject   the name by which to find it
    garbage   None: the data under the masks stays as drawn
    own       whether the extents of padded batches are tensors of their own
    compiled  whether a program on padded batches is run in a graph
    """
    if any(source.axes for source in program.sources):
        return _of_samples(program, subject, own, compiled)
    lines = [HEAD.format(subject=repr(subject) if subject else "")]
    masks: dict[str, Tensor | None] = {}
    for source in program.sources:
        masks[source.name] = mask_under(source, masks)
        lines += _source_lines(source, masks[source.name], garbage)
    for step in program.steps:
        if step.random:
            lines.append(f"torch.manual_seed({program.seed})")
        lines.append(step.line())
    names = [s.name for s in program.sources] + [s.name for s in program.steps if not s.writes]
    lines += [f"print({name!r}, {name}, sep='\\n')" for name in names]
    return "\n".join(lines) + "\n"


def _of_samples(program: Program, subject: str | None, own: bool, compiled: bool) -> str:
    """The program as a function; it prints the values of the batch, with their extents, and those of each sample."""
    names = [source.name for source in program.sources]
    values = [step.name for step in program.steps]
    lines = [HEAD.format(subject=repr(subject) if subject else "")]
    lines += [f"{source.name} = {source!r}" for source in program.sources]
    lines += [f"given = [{', '.join(names)}]", "", "", f"def program({', '.join(names)}):"]
    lines += [f"    {step.line()}" for step in program.steps]
    lines += [f"    return {{{', '.join(f'{name!r}: {name}' for name in values)}}}", "", ""]
    function = 'torch.compile(program, fullgraph=True, backend="aot_eager")' if compiled else "program"
    lines += [
        f"batch = {function}(*(ragged.batch(s, {program.seed}, subject, own={own}) for s in given))",
        "for name, value in batch.items():",
        "    print(name, value, 'there:', subject.extent(value), sep='\\n')",
        f"for row in range({next(s.shape[0] for s in program.sources if s.axes)}):",
        "    try:",
        f"        print('sample', row, program(*(ragged.sample(s, row, {program.seed}, subject) for s in given)))",
        "    except (RuntimeError, IndexError, ValueError) as error:",
        "        print('sample', row, 'raises', error)",
    ]
    return "\n".join(lines) + "\n"


def _source_lines(source: Source, mask: Tensor | None, garbage: int | None) -> list[str]:
    name, data = source.name, data_of(source)
    if garbage is not None and source.mask != "plain":
        data = with_garbage(data, mask, source.seed + garbage)
    if data.numel() > MOST_WRITTEN_OUT:
        made = f"sources.data_of(sources.{source!r})"
        if garbage is not None and mask is not None:
            made = f"sources.with_garbage({made}, {name}_mask, {source.seed + garbage})"
    else:
        made = f"torch.tensor({data.tolist()}, dtype={data.dtype}).reshape({source.shape})"
    if source.mask == "plain":
        return [f"{name} = {made}.requires_grad_({source.requires_grad})"]
    lines = [f"{name}_mask = {_mask_code(source, mask)}"]
    lines.append(f"{name} = subject.wrap({made}, {name}_mask, requires_grad={source.requires_grad})")
    if source.storage != "dense":
        lines.append(
            f"{name} = subject.stored({name}, {source.storage!r}, {source.requires_grad}, explicit_invalid=True)"
        )
    return lines


def _mask_code(source: Source, mask: Tensor | None) -> str:
    if mask is None:
        return "None"
    if source.under is not None:
        return f"{source.under}_mask"
    if mask.numel() > MOST_WRITTEN_OUT or source.mask == "permuted":
        return f"sources.mask_of(sources.{source!r})"
    return f"torch.tensor({mask.tolist()}).reshape({tuple(mask.shape)})"


def law_lines(law: str, complaint: str, subject: Subject) -> str:
    """A comment that says which law is broken, and how."""
    return f"# {law} broken on {subject.name}: {complaint}\n"
