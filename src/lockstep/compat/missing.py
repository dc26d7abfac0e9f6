"""What apex had that is not provided, and what to use instead: pure, a table and one look into it."""

_TORCHS = "torch.nn.functional.scaled_dot_product_attention"

REPLACEMENTS = {
    "apex.transformer": "Megatron-Core (pip install megatron-core), where its parts went",
    "apex.pyprof": "torch.profiler, or nsys with torch.cuda.nvtx",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.contrib.bottleneck": "torchvision.models.resnet.Bottleneck, compiled with torch.compile",
    "apex.contrib.conv_bias_relu": "torch.nn.functional.conv2d and relu, compiled with torch.compile",
    "apex.contrib.cudnn_gbn": "apex.parallel.SyncBatchNorm with process_group=create_syncbn_process_group(n)",
    "apex.contrib.fmha": _TORCHS,
    "apex.contrib.focal_loss": "torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.gpu_direct_storage": "torch.cuda.gds",
    "apex.contrib.group_norm": "torch.nn.GroupNorm",
    "apex.contrib.groupbn": "apex.parallel.SyncBatchNorm with process_group=create_syncbn_process_group(n)",
    "apex.contrib.index_mul_2d": "input1[index] * input2",
    "apex.contrib.multihead_attn": f"torch.nn.MultiheadAttention or {_TORCHS}",
    "apex.contrib.nccl_allocator": "torch.cuda.MemPool with the allocator of torch.distributed's nccl backend",
    "apex.contrib.openfold_triton": "torch.nn.LayerNorm and torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.peer_memory": "torch.distributed",
    "apex.contrib.sparsity": "torch.sparse.to_sparse_semi_structured and torch.ao.pruning",
    "apex.contrib.torchsched": "torch.compile",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.contrib.optimizers.distributed_fused_adam": "torch.distributed.optim.ZeroRedundancyOptimizer around AdamW",
    "apex.contrib.optimizers.distributed_fused_lamb": "torch.distributed.optim.ZeroRedundancyOptimizer",
}  # fmt: skip


def replacement(module: str) -> str:
    """What to say to an import of ``module``; empty if there is nothing special to say.

    Example:
        >>> replacement("apex.contrib.group_norm.group_norm")
        'apex.contrib.group_norm is not part of the apex that lockstep provides; use torch.nn.GroupNorm.'
        >>> replacement("apex.amp")
        ''
    """
    parts = module.split(".")
    for count in range(len(parts), 1, -1):
        name = ".".join(parts[:count])
        if name in REPLACEMENTS:
            return f"{name} is not part of the apex that lockstep provides; use {REPLACEMENTS[name]}."
    return ""
