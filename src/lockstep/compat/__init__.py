"""What old scripts import and call; only the first lines of a rank know it, so that it can be deleted whole some day."""
