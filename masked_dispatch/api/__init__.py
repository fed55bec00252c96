"""The functions that masked_dispatch exports.

construct.py    making masked tensors, of tensors of different sizes too
padding.py      what is padding, the ends of samples, and their layout; whether windows read missing values or padding
reductions.py   torch's reductions and scans with skipna and min_count, and methods that name them
sums.py         sums of the valid contributions, and numpy.ma's weighted mean
along_dim.py    places, runs and ranks along a dimension
sparsify.py     sparse tensors from the elements that meet a condition
export.py       modules as programs of torch.export without masked tensors
known_words.py  AttributeErrors for names of other libraries
"""
