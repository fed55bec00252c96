"""The demonstration: two real data sets with holes, unmodified models, and every number computed as it runs.

``make demo`` runs it, ``python -m examples.demo --help`` lists its options.

data.py          the weekly CO₂ record and the handwritten digits, from PyPI packages
statistics.py    1  masked statistics next to pandas
models.py           an ordinary Transformer and an ordinary convolutional autoencoder
training.py         one training loop for masked, filled, eager and compiled
forecasting.py   2  the Transformer on windows of the CO₂ record
digits.py        2  the autoencoder on digits with pixels missing
cases.py         3  three cases that people asked for before this library existed
plots.py         4  the pictures
"""
