"""What `initialize` did inside apex; lockstep.amp.front and lockstep.amp.models do it."""

__all__: list[str] = []
