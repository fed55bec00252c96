"""Functions that masked_dispatch offers at its top level."""
