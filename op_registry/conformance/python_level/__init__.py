"""Conformance of what torch writes in Python around its operators: functions, modules, distributions.

names          which callables there are, found in torch's own namespaces
calls          sample calls of functions: torch's operator database, and by hand
modules        sample calls of modules: torch's module database, and by hand
distributions  sample calls of distributions' methods and of kl_divergence
trial          the laws that a call is put to, and what came of it
"""
