"""Conformance of the code that torch writes in Python around its operators: functions, modules, distributions.

names          the callables, found in torch's own namespaces
calls          sample calls of functions: torch's operator database, and by hand
modules        sample calls of modules: torch's module database, and by hand
distributions  sample calls of distributions' methods and of kl_divergence
trial          tests the laws on a call
"""
