"""The laws of the semantics page: each module states its own as values, and a new law is one file.

values.py      P1, P2 and P8: plain torch's results, the oracle's, or a refusal
hidden.py      P3 and P4: what lies under a mask, and how a tensor is stored, has no effect
gradients.py   P5, and "later": gradients
modes.py       P6 and P7: views; compiled code
devices.py     on another device as on the CPU
padding.py     P9: a padded batch is its samples
ragged.py      the batches of P9
dimensions.py  "dims": what rules state of dimensions
"""

from __future__ import annotations

import importlib
import pkgutil

from op_registry.conformance.law import Law

_modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
_laws: list[Law] = [law for module in _modules for law in getattr(module, "LAWS", ())]
# Every law by its name, in order.
LAWS: dict[str, Law] = {law.name: law for law in sorted(_laws, key=lambda law: law.name)}
