"""A factorization of a large matrix of ratings, which is never stored densely: ``python -m examples.ratings``."""
