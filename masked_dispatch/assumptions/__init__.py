"""Whether the torch that is installed is as the library assumes, and what follows is right; no check needs pytest.

Checks of assumptions have the numbers of torch_internals.py. Every check can run again in the same process, and leaves
nothing behind.

checks.py       how a check is registered, what it expects, the error that names the version of torch
dispatch.py     the dispatcher, functorch, printing, collation, TorchScript
engine.py       the autograd engine
distributed.py  torch.distributed
compiler.py     Dynamo
at_import.py    which of them are asked at import, of a torch that nobody tried
assignments.py  x[i] = v in every spelling
graphs.py       what follows it or stands beside it: AOTAutograd, inductor, make_fx, export
"""
