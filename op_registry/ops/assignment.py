"""Assignment."""
