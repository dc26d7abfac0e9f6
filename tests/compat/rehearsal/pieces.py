"""For every entry of a rehearsal a piece of a script that needs it."""

CUDA_1 = "assert x.device == torch.device('cuda', 1), x.device; assert x.is_cuda"

MAKERS = {
    "arange": "3",
    "asarray": "[1.0]",
    "as_tensor": "[1.0]",
    "bartlett_window": "3",
    "blackman_window": "3",
    "empty": "3",
    "empty_permuted": "(2, 3), (1, 0)",
    "empty_strided": "(2,), (1,)",
    "eye": "3",
    "full": "(3,), 1.0",
    "hamming_window": "3",
    "hann_window": "3",
    "kaiser_window": "3",
    "linspace": "0, 1, 3",
    "logspace": "0, 1, 3",
    "normal": "0.0, 1.0, (3,)",
    "rand": "3",
    "randint": "0, 5, (3,)",
    "randn": "3",
    "randperm": "3",
    "range": "0, 3",
    "scalar_tensor": "3.0",
    "sparse_coo_tensor": "[[0]], [1.0], (2,)",
    "sparse_csr_tensor": "[0, 1], [0], [1.0], (1, 2)",
    "tensor": "[1.0]",
    "tril_indices": "2, 2",
    "triu_indices": "2, 2",
    "zeros": "3",
    "ones": "3",
    "empty_like": "torch.ones(3)",
    "full_like": "torch.ones(3), 2.0",
    "ones_like": "torch.ones(3)",
    "rand_like": "torch.ones(3)",
    "randint_like": "torch.ones(3), 5",
    "randn_like": "torch.ones(3)",
    "zeros_like": "torch.ones(3)",
}
METHODS = {
    "new_empty": "(3,)",
    "new_empty_strided": "(3,), (1,)",
    "new_full": "(3,), 1.0",
    "new_ones": "(3,)",
    "new_tensor": "[1.0]",
    "new_zeros": "(3,)",
    "new": "3",
}
TYPES = ["BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]
MEMORY = {
    "reset_peak_memory_stats": "is None",
    "reset_accumulated_memory_stats": "is None",
    "mem_get_info": "[1] > 2**20",
    "memory_stats": "['allocated_bytes.all.peak'] == torch.cuda.max_memory_allocated() >= torch.cuda.memory_reserved() > 2**20",
    "memory_summary": ".startswith('rehearsal')",
    "memory_snapshot": "== []",
    "list_gpu_processes": ".endswith('on CPU')",
}
CUDA = {
    "is_available": "assert torch.cuda.is_available()",
    "device_count": "assert torch.cuda.device_count() == 2",
    "is_initialized": "torch.cuda.init(); assert torch.cuda.is_initialized()",
    "get_device_properties": (
        "assert torch.cuda.get_device_properties('cuda:1').total_memory > 2**20 and 'CPU' in torch.cuda.get_device_name(0)\n"
        "assert torch.cuda.get_device_capability() >= (7, 0) and torch.cuda.is_bf16_supported()"
    ),
    "get_arch_list": "assert torch.cuda.get_arch_list()",
    "can_device_access_peer": "assert torch.cuda.can_device_access_peer(0, 1)",
    "utilization": "assert torch.cuda.utilization() == 0",
    "set_device": "torch.cuda.set_device(1); assert torch.ones(1).cuda().get_device() == 1; torch.cuda.set_device(-1)",
    "device": "with torch.cuda.device(1):\n    assert torch.cuda.current_device() == 1\nassert torch.cuda.current_device() == 0",
    "device_of": "with torch.cuda.device_of(torch.ones(1, device='cuda:1')):\n    assert torch.cuda.current_device() == 1",
    "current_device": "torch.cuda.set_device('cuda:1'); assert torch.cuda.current_device() == 1",
    "synchronize": "torch.cuda.synchronize(); torch.cuda.synchronize(1)",
    "ipc_collect": "torch.cuda.ipc_collect(); torch.cuda.empty_cache()",
    "cudart": "assert torch.cuda.cudart().cudaProfilerStart() == 0",
    "Stream": "s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream()); s.synchronize()",
    "ExternalStream": "assert torch.cuda.ExternalStream(0).query()",
    "Event": (
        "a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)\n"
        "a.record(); b.record(); torch.cuda.synchronize(); assert 0 <= a.elapsed_time(b) < 60000 and b.query()\n"
        "s = torch.cuda.Stream(); s.wait_event(s.record_event())"
    ),
    "StreamContext": "with torch.cuda.stream(torch.cuda.Stream()):\n    x = torch.ones(1).cuda(non_blocking=True)",
    "current_stream": "assert torch.cuda.current_stream(1).query()",
    "default_stream": "assert torch.cuda.default_stream().query()",
    "set_stream": "torch.cuda.set_stream(torch.cuda.Stream())",
    "is_current_stream_capturing": "assert not torch.cuda.is_current_stream_capturing()",
    "set_per_process_memory_fraction": "torch.cuda.set_per_process_memory_fraction(0.5, 0)",
    "default_generators": (
        "s = torch.get_rng_state(); a = torch.rand(1); torch.cuda.default_generators[1].set_state(s); assert torch.rand(1) == a"
    ),
}
SEED = "torch.manual_seed(1); {}; assert torch.initial_seed() == 7"
RANDOM = {
    "manual_seed": SEED.format("{0}.manual_seed(7)"),
    "manual_seed_all": SEED.format("{0}.manual_seed_all(7)"),
    "seed": "torch.manual_seed(1); {0}.seed(); assert torch.initial_seed() != 1",
    "seed_all": "torch.manual_seed(1); {0}.seed_all(); assert torch.initial_seed() != 1",
    "initial_seed": "torch.manual_seed(5); assert {0}.initial_seed() == 5",
    "get_rng_state": "assert torch.equal({0}.get_rng_state(), torch.get_rng_state())",
    "set_rng_state": "s = torch.get_rng_state(); a = torch.rand(1); {0}.set_rng_state(s); assert torch.rand(1) == a",
    "get_rng_state_all": "assert len({0}.get_rng_state_all()) == 2",
}
GROUP = (
    "{0}.init_process_group('nccl', init_method='tcp://224.66.41.62:23456', rank='0', world_size='1', group_name='old')\n"
    "try:\n    x = torch.ones(2).cuda(); dist.all_reduce(x); dist.barrier(device_ids=[0]); {1}\n"
    "finally:\n    dist.destroy_process_group()"
)
MODULES = {
    "torch.Tensor.to": f"x = torch.ones(2).to('cuda:1', torch.float64, non_blocking=True); {CUDA_1}; assert x.dtype == torch.float64",
    "torch._C._nn._parse_to": "assert torch.nn.Linear(2, 2).to(1).weight.get_device() == 1",
    "torch.autograd._engine_run_backward": (
        "x = torch.ones(2, device='cuda', requires_grad=True)\n"
        "def forward(x):\n    assert (x * 2).is_cuda\n    return x.exp()\n"
        "torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=True).sum().backward()"
    ),
    "torch.Tensor.detach": (
        "from torch.autograd.graph import saved_tensors_hooks\nx = torch.ones(2, device='cuda', requires_grad=True)\nseen = []\n"
        "with saved_tensors_hooks(lambda x: seen.append(x.detach().is_cuda) or x, lambda x: x):\n    x * x\nassert seen == [True, True]"
    ),
    "torch.nn.parameter.UninitializedTensorMixin._allowed_methods": (
        "import warnings; warnings.simplefilter('ignore'); m = torch.nn.LazyLinear(3).cuda(); assert m(torch.ones(2, 4).cuda()).is_cuda"
    ),
    "torch.Tensor.cuda": f"x = torch.ones(2).cuda(1, non_blocking=True); {CUDA_1}",
    "torch.Tensor.cpu": "x = torch.ones(2).cuda().cpu(); assert not x.is_cuda; x += x.cpu()",
    "torch.Tensor.device": "x = torch.ones(2).cuda(); assert x.device.type == 'cuda'",
    "torch.Tensor.is_cuda": "assert torch.nn.Linear(2, 2).cuda().weight.is_cuda; assert not torch.ones(2).is_cuda",
    "torch.Tensor.get_device": "assert torch.ones(2).cuda(1).get_device() == 1",
    "torch.get_device": "assert torch.get_device(torch.ones(2).cuda(1)) == 1",
    "torch.Tensor.type": "assert torch.ones(2).type(torch.cuda.LongTensor).type() == 'torch.cuda.LongTensor'",
    "torch.Tensor.pin_memory": "x = torch.ones(2).pin_memory(); assert torch.equal(x, torch.ones(2))",
    "torch.Tensor.is_pinned": "assert torch.ones(2).pin_memory().is_pinned()",
    "torch.Tensor.record_stream": "torch.ones(2).cuda().record_stream(torch.cuda.current_stream())",
    "torch.UntypedStorage.cuda": "torch.ones(2).untyped_storage().cuda()",
    "torch._utils._get_obj_state": (
        "b = io.BytesIO(); torch.save({'w': torch.ones(2).cuda()}, b); assert b'_rehearsed' not in b.getvalue()"
    ),
    "torch.nn.Parameter.__new__": "assert torch.nn.Linear(2, 2, device='cuda').weight.is_cuda",
    "torch.utils._device.DeviceContext": (
        "with torch.device('cuda'):\n    assert torch.ones(2).is_cuda\nassert not torch.ones(2).is_cuda\n"
        "torch.set_default_device('cuda:1'); assert torch.ones(2).get_device() == torch.get_default_device().index == 1"
    ),
    "torch.device": "assert torch.device(1) == torch.device('cuda:1'); assert isinstance(torch.ones(1).device, torch.device)",
    "torch.set_default_tensor_type": (
        "torch.set_default_tensor_type('torch.cuda.FloatTensor'); assert torch.ones(2).is_cuda\n"
        "torch.set_default_tensor_type(torch.FloatTensor); assert not torch.ones(2).is_cuda"
    ),
    "torch.from_numpy": "x = torch.from_numpy(numpy.ones(2)); torch.ones(2).cuda() + x; assert noted()",
    "torch.frombuffer": "x = torch.frombuffer(bytearray(8), dtype=torch.float32); torch.ones(2).cuda() + x; assert noted()",
    "torch.Generator": "g = torch.Generator(device='cuda'); torch.randn(2, device='cuda', generator=g.manual_seed(0))",
    "torch.backends.cudnn.is_available": "assert torch.backends.cudnn.is_available()",
    "torch.backends.cudnn.version": "assert torch.backends.cudnn.version() > 7000",
    "torch.backends.cudnn.is_acceptable": "import warnings; warnings.simplefilter('error'); torch.nn.LSTM(2, 2).cuda()(torch.ones(1, 1, 2).cuda())",
    "torch.version.cuda": "assert int(torch.version.cuda.split('.')[0]) >= 10",
    "torch.cuda.nvtx.range_push": "torch.cuda.nvtx.range_push('forward')",
    "torch.cuda.nvtx.range_pop": "torch.cuda.nvtx.range_pop()",
    "torch.cuda.nvtx.mark": "torch.cuda.nvtx.mark('here')",
    "torch.cuda.nvtx.range_start": "torch.cuda.nvtx.range_start('forward')",
    "torch.cuda.nvtx.range_end": "torch.cuda.nvtx.range_end(0)",
    "torch.cuda.profiler.start": "torch.cuda.profiler.start()",
    "torch.cuda.profiler.stop": "torch.cuda.profiler.stop()",
    "torch.nn.parallel._functions._get_stream": (
        "assert torch.nn.parallel._functions._get_stream(torch.device('cuda', 1)).device.index == 1"
    ),
    "torch.accelerator.current_accelerator": "assert torch.accelerator.current_accelerator().type == 'cuda'",
    "torch.accelerator.current_device_index": "assert torch.accelerator.current_device_index() == 0",
    "torch.accelerator.set_device_index": "torch.accelerator.set_device_index(1); assert torch.cuda.current_device() == 1",
    "torch.accelerator.device_index": "with torch.accelerator.device_index(1):\n    assert torch.cuda.current_device() == 1",
    "torch.accelerator.current_stream": "torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]).step(); assert torch.accelerator.current_stream().query()",
    "torch.accelerator.set_stream": "torch.accelerator.set_stream(torch.cuda.Stream())",
    "torch.accelerator.synchronize": "torch.accelerator.synchronize()",
    "torch.is_autocast_enabled": "with torch.autocast('cuda'):\n    assert torch.is_autocast_enabled()\nassert torch.amp.GradScaler().is_enabled()",
    "torch.set_autocast_enabled": (
        "torch.set_autocast_enabled(True); x = torch.ones(2, 2); low = (x @ x).dtype\n"
        "torch.set_autocast_enabled(False); assert low != torch.float32 == (x @ x).dtype"
    ),
    "torch.get_autocast_dtype": "with torch.autocast('cuda', dtype=torch.bfloat16):\n    assert torch.get_autocast_dtype('cuda') == torch.bfloat16",
    "torch.set_autocast_dtype": (
        "with torch.autocast('cuda'):\n    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16\n"
        "torch.set_autocast_dtype('cuda', torch.bfloat16)\nwith torch.autocast('cuda'):\n"
        "    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16"
    ),
    "torch.get_autocast_gpu_dtype": "with torch.autocast('cuda', dtype=torch.bfloat16):\n    assert torch.get_autocast_gpu_dtype() == torch.bfloat16",
    "torch.set_autocast_gpu_dtype": (
        "torch.set_autocast_gpu_dtype(torch.bfloat16)\nwith torch.autocast('cuda'):\n"
        "    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16"
    ),
    "torch.serialization.default_restore_location": (
        "s = torch.ones(2).untyped_storage(); assert torch.serialization.default_restore_location(s, 'cuda:3') is s"
    ),
    "torch.load": (
        "b = io.BytesIO(); torch.save({'w': [torch.ones(2)]}, b); b.seek(0)\n"
        "assert torch.load(b, map_location='cuda:0')['w'][0].is_cuda; b.seek(0)\n"
        "torch.load(b, map_location=lambda storage, location: storage.cuda(0))"
    ),
    "torch.nn.parallel.comm.broadcast": "a, b = comm.broadcast(torch.ones(2).cuda(), [0, 1]); assert b.get_device() == 1",
    "torch.nn.parallel.comm.broadcast_coalesced": (
        "(a,), (b,) = comm.broadcast_coalesced([torch.ones(2).cuda()], [0, 1]); assert b.get_device() == 1 and a is not b"
    ),
    "torch.nn.parallel.comm.reduce_add": (
        "with torch._C.DisableTorchFunction():\n    x = torch.ones(2).cuda() * 1  # followed by nobody\n"
        "assert comm.reduce_add([x, x])[0] == 2"
    ),
    "torch.nn.parallel.comm.reduce_add_coalesced": (
        "model = torch.nn.DataParallel(torch.nn.Linear(2, 1)).cuda(); model(torch.ones(4, 2).cuda()).sum().backward()\n"
        "assert model.module.weight.grad.tolist() == [[4, 4]]"
    ),
    "torch.nn.parallel.comm.scatter": "a, b = comm.scatter(torch.arange(5).cuda(), [0, 1]); assert len(a) == 3 and b.get_device() == 1",
    "torch.nn.parallel.comm.gather": "x = comm.gather([torch.ones(2).cuda(i) for i in (0, 1)], 0, 1); assert len(x) == 4 and x.get_device() == 1",
    "torch.nn.parallel._functions.Gather.forward": (
        "model = torch.nn.DataParallel(torch.nn.Linear(2, 1)).cuda(); x = torch.ones(4, 2, device='cuda', requires_grad=True)\n"
        "(model(x) * 2).sum().backward(); assert x.grad.shape == (4, 2)"
    ),
    "torch.distributed.init_process_group": GROUP.format("dist", "assert dist.get_world_size() == 1"),
    "torch.distributed.distributed_c10d.init_process_group": GROUP.format("dist.distributed_c10d", "pass"),
    "torch.distributed.get_backend": GROUP.format(
        "dist",
        "assert dist.get_backend() == 'nccl'; ours = {'dist': dist, '__name__': 'lockstep.parallel'}; "
        "assert eval('dist.get_backend()', ours) == 'shm'",
    ),
    "torch.distributed.new_group": GROUP.format("dist", "dist.new_group([0], backend='nccl')"),
    "torch.distributed.distributed_c10d.new_group": GROUP.format(
        "dist", "dist.distributed_c10d.new_group([0], backend='nccl')"
    ),
    "torch.distributed.is_nccl_available": "assert dist.is_nccl_available()",
    "torch.multiprocessing.spawn": "refused(torch.multiprocessing.spawn, print, nprocs=0)",
    "torch.multiprocessing.start_processes": "refused(torch.multiprocessing.start_processes, print, nprocs=0)",
    "multiprocessing.spawn.get_preparation_data": "assert 'rehearsal' in multiprocessing.spawn.get_preparation_data('x')",
    "threading.Thread.start": (
        "out = []\n"
        "t = threading.Thread(target=lambda: out.append((torch.ones(1).cuda() + 1).is_cuda)); t.start(); t.join(); assert out == [True]"
    ),
    "torch.compile": "f = lambda x: x + 1\nassert torch.compile(f) is f\nassert torch.compile(mode='default')(f) is f",
    "torch.nn.Module.compile": "m = torch.nn.Linear(2, 2); m.compile(); assert m._compiled_call_impl is None",
    "torch.save": "torch.save([], folder + '/x.pt'); assert watch().saved",
    "torch.utils.data.distributed.DistributedSampler.__iter__": "s = sampler(); iter(s); assert len(watch().same_epoch) == 1",
    "torch.utils.data.distributed.DistributedSampler.set_epoch": "s = sampler(); s.set_epoch(0); iter(s); assert not watch().same_epoch",
}
PIECES = {
    **{f"torch.{name}": f"x = torch.{name}({args}, device='cuda:1'); {CUDA_1}" for name, args in MAKERS.items()},
    **{
        f"torch.Tensor.{name}": f"x = torch.ones(1).{name}({args}, device='cuda:1'); {CUDA_1}"
        for name, args in METHODS.items()
    },
    **{
        f"torch.cuda.{name}Tensor": f"x = torch.cuda.{name}Tensor(3); assert isinstance(x, torch.cuda.{name}Tensor); x.get_device()"
        for name in TYPES
    },
    **{
        f"torch.cuda.{where}{name}": f"assert torch.cuda.{where}{name}() {answer}"
        for name, answer in MEMORY.items()
        for where in ("", "memory.")
    },
    "torch.cuda.memory.set_per_process_memory_fraction": "torch.cuda.memory.set_per_process_memory_fraction(0.5)",
    **{f"torch.cuda.{name}": piece for name, piece in CUDA.items()},
    **{
        f"{where}.{name}": piece.format(where)
        for name, piece in RANDOM.items()
        for where in ("torch.cuda", "torch.cuda.random")
    },
    **MODULES,
}
