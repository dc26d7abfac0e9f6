"""What old scripts import and call. Only the first lines of a rank know it, so that it can be deleted whole."""
