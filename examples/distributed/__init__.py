"""Digits with missing pixels, restored by a model that several processes train.

``torchrun --nproc-per-node 2 -m examples.distributed`` runs it, on any number of processes: the losses and the weights
are the same.

training.py    the model, its data on one rank, training steps, checkpoints
scaling.py     what a step costs a rank, from 8 ranks to 1,024
__main__.py    the program, and the table that it prints
"""
