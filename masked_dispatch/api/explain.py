"""``masked_dispatch.explain(torch.cumsum, x, 1)``: what happens to a call, operator by operator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from masked_dispatch.api.call_observer import Observer
from masked_dispatch.api.explanation import Explanation


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """What happens to ``function(*args, **kwargs)``: operators, rules, lowerings, and what is stored densely and why.

    function  anything that is called with tensors: of torch's, an operator, a module, your own

    The call is made, since what it reaches may depend on values and on what is stored: without derivatives, under the
    `densify` policy in force, and on copies. Tensors among the arguments (in lists, tuples and dicts too) are cloned,
    a module is deep-copied and random generators are reset afterwards, so that nothing of the caller's changes; what
    else `function` writes to, it writes to. With sparsely stored arguments each operator runs twice, to find out which
    of its lowerings takes the call. An error of the call is part of the explanation and is not raised.

    Raises TypeError if `function` can't be called.
    """
    if not callable(function):
        raise TypeError(
            f"explain takes a function and its arguments, as explain(torch.cumsum, x, 1); {type(function).__name__} "
            "is not callable"
        )

    observer, error = Observer(), ""
    copies: dict[int, Tensor] = {}
    called = copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function
    with torch.no_grad():
        given, named = _copied(args, copies), _copied(kwargs, copies)
        with _random_numbers_kept({t.device for t in copies.values()}):
            try:
                observer.run(called, *given, **named)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
    name = resolve_name(function) or getattr(function, "__name__", None) or type(function).__name__
    return Explanation(name, tuple(observer.steps), error)


def _copied(value: Any, copies: dict[int, Tensor]) -> Any:
    """Arguments with every tensor cloned; one that is passed twice stays one."""
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


def _random_numbers_kept(devices: set[torch.device]) -> Any:
    """A context after which the random generators of the CPU and of `devices`, of one type, are as before."""
    others = [d for d in devices if d.type not in ("cpu", "meta")]
    if not others:
        return torch.random.fork_rng(devices=())
    return torch.random.fork_rng(devices=[d.index or 0 for d in others], device_type=others[0].type)
