"""Reports for people: coverage, `explain`, and what each storage runs."""
