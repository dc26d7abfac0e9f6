"""What a rehearsal has seen: facts of each rank, put together, in words."""
