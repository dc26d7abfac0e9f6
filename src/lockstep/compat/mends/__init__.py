"""Names that old scripts use and that are gone: a table of them, and what stands in for each."""
