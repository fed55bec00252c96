"""``masked_dispatch.explain(torch.cumsum, x, 1)``: what happens in a call, operator by operator.

``masked_dispatch.explain(torch.cumsum)``: what it means.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from masked_dispatch.api.call_observer import Observer
from masked_dispatch.api.explanation import Explanation
from masked_dispatch.compiler_internals import uncompiled
from op_registry.report import explain as report
from op_registry.report.names import UnknownName

UNCOMPILED = (
    "explained as it runs uncompiled; what a compiled graph stores densely is in the log of "
    'masked_dispatch.densification, and refused under densify("never")'
)


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Explain ``function(*args, **kwargs)``: its operators, their rules and lowerings, and what is stored densely, and
    why. Without arguments, explain what a function of torch means.

    function  a function of tensors: a torch function, an operator, a module, your own function

    ``explain(torch.sort)``, without arguments, calls nothing. It says which operators the function is or calls. For
    each of them, it prints the law of the operator's category, what the operator's own rule adds to the law, which
    dimensions the operator works on, and how it runs in each storage. `function` can be a function or class of torch,
    or an operator of torch.ops, your own too.

    With arguments, the call runs, because the operators it reaches may depend on values and on storage. It runs without
    derivatives, under the current `densify` policy, and on copies. Tensors among the arguments (in lists, tuples and
    dicts too) are cloned, a module is deep-copied and random generators are reset afterwards, so that these do not
    change for the caller; other side effects of `function` happen. With sparsely stored arguments each operator runs
    twice, to find out which lowering takes the call. An error of the call becomes part of the explanation and is not
    raised. A compiled function is explained as it runs uncompiled, and the explanation says so.

    Raises TypeError if `function` can't be called.
    """
    if not callable(function):
        raise TypeError(
            f"explain takes a function and its arguments, as explain(torch.cumsum, x, 1); {type(function).__name__} "
            "is not callable"
        )

    if not args and not kwargs and (meaning := _meaning(function)):
        return Explanation(meaning.partition(" ")[0], (), meaning=meaning)
    observer, error = Observer(), ""
    original = uncompiled(function)
    note = "" if original is function else UNCOMPILED
    function = original
    copies: dict[int, Tensor] = {}
    called = copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function
    with torch.no_grad():
        copied_args, copied_kwargs = _copied(args, copies), _copied(kwargs, copies)
        with _random_state_restored({t.device for t in copies.values()}):
            try:
                observer.run(called, *copied_args, **copied_kwargs)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
    name = resolve_name(function) or getattr(function, "__name__", None) or type(function).__name__
    return Explanation(name, tuple(observer.steps), error, note)


def _meaning(function: Callable[..., Any]) -> str:
    """What a function, a class or an operator of torch means; "" for others, whose calls alone can be explained."""
    if isinstance(function, torch.nn.Module):
        return ""
    try:
        return report.explain(function, samples=False)
    except UnknownName:
        return ""


def _copied(value: object, copies: dict[int, Tensor]) -> Any:
    """Arguments with every tensor cloned; a tensor that is passed twice is cloned once."""
    if isinstance(value, Tensor):
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone()
        return copies[id(value)]
    if isinstance(value, dict):
        return {key: _copied(v, copies) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_copied(v, copies) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _random_state_restored(devices: set[torch.device]) -> contextlib.AbstractContextManager[None]:
    """A context that restores the random generators of the CPU and of `devices`, which are of one type."""
    others = [d for d in devices if d.type not in ("cpu", "meta")]
    if not others:
        return torch.random.fork_rng(devices=())
    return torch.random.fork_rng(devices=[d.index or 0 for d in others], device_type=others[0].type)
