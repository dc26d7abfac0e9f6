"""What old scripts import and rely on. Only the first lines of a rank know it, so it can be deleted whole some day."""
