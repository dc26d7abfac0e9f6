"""Puts the parts together: one step, its precision, its progress."""
