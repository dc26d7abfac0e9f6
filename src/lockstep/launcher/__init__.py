"""Starts the ranks and watches over them. Never imports what runs inside them."""
