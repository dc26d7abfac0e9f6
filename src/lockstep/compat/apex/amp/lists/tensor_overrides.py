"""The lists for one namespace; what is changed here before `initialize` counts."""

from lockstep.amp.lists import tensor_overrides as _lists

MODULE = _lists.MODULE
FP16_FUNCS = _lists.FP16_FUNCS
FP32_FUNCS = _lists.FP32_FUNCS
CASTS = _lists.CASTS
SEQUENCE_CASTS = _lists.SEQUENCE_CASTS
BANNED_FUNCS = _lists.BANNED_FUNCS
