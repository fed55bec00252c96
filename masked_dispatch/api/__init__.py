"""The functions that masked_dispatch exports.

construct.py      making masked tensors
stacking.py       pad_stack
padding.py        what is padding, the ends of samples, and their layout
known_words.py    AttributeErrors for names of other libraries
accumulate.py     sums of the valid contributions
reductions.py     torch's reductions and scans with skipna and min_count
average.py        numpy.ma's weighted mean
methods.py        methods that name the functions with skipna and min_count
signatures.py     what reductions and scans are called with, for type checkers
skipna.py         what skipna and min_count mean
along_dim.py      places, runs and ranks along a dimension
sparsify.py       sparse tensors from the elements that meet a condition
windows.py        whether windows read missing values or padding
export.py         modules as programs of torch.export without masked tensors
"""
