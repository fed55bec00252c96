"""``python -m masked_dispatch``: its commands.

doctor.py         info: versions, devices, rules, optional libraries; doctor: whether the library works with them
demonstration.py  demo: what the library does, in a few seconds, with checks
"""
