"""``python -m masked_dispatch``: its commands.

installation.py   info: versions, devices, rules, optional libraries
doctor.py         doctor: whether the library works with the torch that is installed
demonstration.py  demo: what the library does, in a few seconds, with checks
training.py       the part of demo that trains a model
"""
