"""``apex.multi_tensor_apply``: calls an operation on lists of tensors, in apex's order of arguments."""

from .multi_tensor_apply import MultiTensorApply

multi_tensor_applier = MultiTensorApply(2048 * 32)
