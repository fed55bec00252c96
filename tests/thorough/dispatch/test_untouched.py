"""Who imports masked_dispatch and uses plain tensors sees no difference: the same graphs, results and kernels.

One subprocess with the library loaded and one without run the same work and print what they got.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import masked_dispatch as md
from repository import ROOT

WORK = r'''
import contextlib, sys, warnings
import torch, torch.nn as nn
if sys.argv[1] == "with":
    import masked_dispatch

    used = masked_dispatch.masked_tensor(torch.ones(2, 3), torch.tensor([[True, False, True], [True, True, True]]))
    (used.exp().mean(-1) + 1).sum().item()  # kernels are installed, and have run

from torch.fx.experimental.proxy_tensor import make_fx
warnings.simplefilter("ignore")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 3))

    def forward(self, x):
        h = self.norm(self.embed(x))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h[:, 0] += 1
        return torch.softmax(self.head(h).clamp(-5, 5), -1).mean(1)


torch.manual_seed(0)
net, x = Net(), torch.randn(2, 5, 6)
target = torch.tensor([0, 2])


def loss(x):
    return nn.functional.cross_entropy(net(x), target)


def function(x):
    y = x.reshape(5, 12).t()
    return (y @ y.mT).std() + torch.where(x > 0, x, x.exp()).cumsum(-1).amax()


def show(name, thing):
    torch.set_printoptions(precision=8)
    print("##", name)
    print(thing.code if hasattr(thing, "code") else thing)


def graphs_of(compiled_function, *args):
    """The forward and backward graphs that a backend is given."""
    seen = []

    def keep(graph, inputs):
        seen.append(graph.code)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    output = torch.compile(compiled_function, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))(*args)
    output.sum().backward()
    return "\n".join(seen)


def export(strict, module=net, args=(x,)):
    program = torch.export.export(module, args, strict=strict)
    show(f"export strict={strict} {type(module).__name__}", program.graph)
    show("its result", program.module()(*args))
    show("decomposed", program.run_decompositions().graph)


class Mapped(nn.Module):
    def forward(self, x):
        return torch.vmap(lambda r: (r.exp() @ r.mT).mean())(x)


class Branching(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x.cos(), lambda x: x * 2, (x,))


export(False)
export(True)
export(False, Mapped())
export(True, Mapped())
export(False, Branching())
show("make_fx", make_fx(function)(x))
show("make_fx pre-dispatch", make_fx(function, pre_dispatch=True)(x))
show("make_fx symbolic", make_fx(function, tracing_mode="symbolic")(x))
show("make_fx vmap", make_fx(torch.vmap(lambda r: r.t().softmax(0)))(x))
show("make_fx functionalize", make_fx(torch.func.functionalize(lambda x: x.clone().add_(1)[0].mul_(2)))(x))
show("grad", torch.func.grad(loss)(x))
show("vmap of grad", torch.vmap(torch.func.grad(lambda r: function(r[None].expand(2, 5, 6))))(x))
show("jvp", torch.func.jvp(function, (x,), (torch.ones_like(x),)))
show("hessian", torch.func.hessian(lambda v: (v.sin() * v).sum())(x[0, 0]))
with torch.autograd.forward_ad.dual_level():
    dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
    show("forward mode", torch.autograd.forward_ad.unpack_dual(function(dual)))
with torch.autocast("cpu", torch.bfloat16):
    show("autocast", loss(x))
    show("autocast dtypes", [net.embed(x).dtype, net(x).dtype, (x @ x.mT).dtype, function(x).dtype])
show("compiled", graphs_of(loss, x))
show("compiled grad", graphs_of(lambda x: torch.func.grad(function)(x * net.embed.weight[0]), x))
show("checkpoint compiled", graphs_of(
    lambda x: torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False), x
))
parameters = list(net.parameters())
show("backward", [g.sum().item() for g in torch.autograd.grad(loss(x), parameters)])
optimizer = torch.optim.AdamW(parameters, foreach=True)
loss(x).backward()
optimizer.step()
show("optimizer", sum(p.abs().sum() for p in parameters))
with torch.inference_mode():
    show("inference mode", net(x))
with torch.autograd.graph.save_on_cpu():
    show("saved tensor hooks", torch.autograd.grad(loss(x), parameters[:1])[0])
show("kernel of exp", [
    key for key in ("CPU", "Autograd", "AutocastCPU", "FuncTorchBatched", "CompositeImplicitAutograd")
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::exp", key)
])
show("types", (type(x + 1), type(nn.Parameter(x)), type(x.detach()), torch.Tensor.__torch_function__))
'''


def run(which: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", WORK, which], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def sections() -> tuple[dict[str, str], dict[str, str]]:
    """What is printed without and with the library, by heading."""

    def split(printed: str) -> dict[str, str]:
        parts = [part.partition("\n") for part in printed.split("## ")[1:]]
        return {f"{i} {name}": body for i, (name, _, body) in enumerate(parts)}

    with ThreadPoolExecutor() as both:
        without, with_library = both.map(run, ("without", "with"))
    return split(without), split(with_library)


def test_plain_tensors_are_untouched(sections: tuple[dict[str, str], dict[str, str]]) -> None:
    without, with_library = sections
    assert len(without) > 30
    assert list(without) == list(with_library)
    different = [name for name in without if without[name] != with_library[name]]
    assert not different, "\n\n".join(
        f"{name}\n--- without\n{without[name]}\n--- with\n{with_library[name]}" for name in different
    )


def test_no_masked_operator_appears(sections: tuple[dict[str, str], dict[str, str]]) -> None:
    assert not [name for name, body in sections[1].items() if "masked_dispatch" in body]


def frames_entered(work: Any) -> set[str]:
    """The modules of this library whose Python code runs while `work` does."""
    entered = set()

    def watch(frame: Any, event: str, argument: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith(("masked_dispatch", "op_registry")):
            entered.add(name)

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return entered


def test_a_plain_operator_runs_no_code_of_ours() -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def work() -> None:
        y = torch.nn.functional.layer_norm(x.exp() @ x.mT, (3,)).softmax(-1)
        y.detach().clone()[0].add_(1)
        torch.vmap(lambda r: r.sum())(y.detach())
        y.sum().backward()

    assert frames_entered(work) == set()
    assert frames_entered(lambda: md.as_masked_tensor(x) + 1)
