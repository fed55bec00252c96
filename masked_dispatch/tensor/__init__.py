"""The tensor subclasses: dense and sparse masked tensors as values, and what they share."""
