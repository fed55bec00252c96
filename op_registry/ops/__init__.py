"""The rules, in a folder or a file for each family of operators; its docstring states the law.

Importing this package registers them.

What a rule means is written once, for people who call the operator: the paragraphs of a file's docstring that begin
with "Law", and the docstring of the rule's function. `masked_dispatch.explain` and docs/operators.md show both.

Every module of every family is imported by its name, so that a new file of rules needs no entry in a list.
"""

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
