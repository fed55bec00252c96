"""Random numbers.

Law: numbers are drawn for every element of the full tensor, whatever the mask and the storage, so that neither changes
torch's stream of random numbers. A number drawn from an invalid parameter is invalid.

    rules     dropout, distributions with tensor parameters, rand_like, in-place generators
"""
