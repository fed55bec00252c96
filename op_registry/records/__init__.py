"""Dense records: what a rule sees of a masked tensor, and the algebra of validity."""
