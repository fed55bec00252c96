"""How a call on masked tensors becomes a run of a rule."""
