"""The demo's Transformer, trained in a function compiled by XLA: ``python -m examples.xla`` (the extra `xla`).

training.py  the step, as a function of parameters and a masked batch
__main__.py  the same steps eagerly on the CPU and compiled by XLA, side by side
"""
