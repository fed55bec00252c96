"""Dense records, through which rules read masked tensors, and the algebra of validity."""
