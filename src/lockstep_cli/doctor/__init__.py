"""``lockstep doctor``: one file per thing looked at: ``look`` reads the facts, pure functions judge them."""
