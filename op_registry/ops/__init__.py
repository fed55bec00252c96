"""The rules, in a folder for each family of operators; its docstring states the law. Importing this registers them.

Every module of every family is imported by its name, so that a new file of rules needs no entry in a list.
"""

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
