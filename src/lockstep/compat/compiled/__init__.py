"""Stand-ins for apex's compiled modules, imported under their own names."""
