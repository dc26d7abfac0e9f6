"""`import apex`: whose it is, what can be imported, what is said of the rest."""

import importlib
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from faces import apex
from launching import run

from lockstep.compat.install import FACES, choose
from lockstep.errors import UsageError

FORMS = """
from apex import amp
import apex; apex.amp.initialize
from apex import amp, optimizers, parallel
from apex.amp import *; initialize, scale_loss, master_params
from apex.amp._amp_state import _amp_state, maybe_print
from apex.amp import _amp_state
from apex.amp.handle import disable_casts
from apex.amp import lists; lists.torch_overrides.FP16_FUNCS
from apex.amp.scaler import LossScaler
from apex.amp._process_optimizer import AmpOptimizerState
from apex.amp.opt import OptimWrapper
from apex.parallel import DistributedDataParallel as DDP, Reducer, SyncBatchNorm, convert_syncbn_model
from apex.parallel import create_syncbn_process_group, ReduceOp
from apex.parallel.LARC import LARC
from apex.parallel.distributed import flat_dist_call, apply_flat_dist_call, flatten, unflatten
from apex.parallel.sync_batchnorm import SyncBatchNorm
from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm
from apex.fp16_utils import *; FP16_Optimizer, network_to_half, prep_param_lists
from apex.fp16_utils.loss_scaler import DynamicLossScaler
from apex.optimizers import FusedAdam, FP16_Optimizer
from apex.contrib.optimizers import FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD
from apex.multi_tensor_apply import multi_tensor_applier
from apex.normalization.fused_layer_norm import FusedLayerNorm, MixedFusedLayerNorm, MixedFusedRMSNorm, FusedRMSNorm
from apex.contrib.clip_grad import clip_grad_norm_
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.contrib.layer_norm import FastLayerNorm
from apex.mlp import MLP
from apex.fused_dense import FusedDense, FusedDenseGeluDense
from apex.RNN import LSTM, GRU, ReLU, Tanh, mLSTM
from apex.RNN.RNNBackend import RNNCell, stackedRNN, bidirectionalRNN
import apex; apex.RNN.models.LSTM, apex.RNN.cells.mLSTMCell
import amp_C; amp_C.multi_tensor_l2norm
import apex_C; apex_C.flatten, apex_C.unflatten
import apex; apex.check_cudnn_version_and_warn, apex.DeprecatedFeatureWarning, apex.deprecated_warning
import apex; apex.RankInfoFormatter
""".strip().splitlines()

AMP = [
    "init",
    "half_function",
    "float_function",
    "promote_function",
    "register_half_function",
    "register_float_function",
    "register_promote_function",
    "scale_loss",
    "disable_casts",
    "initialize",
    "state_dict",
    "load_state_dict",
    "master_params",
    "_amp_state",
    "amp",
    "compat",
    "frontend",
    "handle",
    "lists",
    "opt",
    "rnn_compat",
    "scaler",
    "utils",
    "wrap",
    "_initialize",
    "_process_optimizer",
    "__version__",
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_import_in_public_scripts_works(form):
    exec(form, {})


@pytest.mark.parametrize("name", AMP)
def test_apex_amp_has_every_name(name):
    assert hasattr(apex.amp, name)


def test_amp_state_is_the_object_and_its_module_stays_a_module():
    from apex.amp import _amp_state
    from apex.amp._amp_state import _amp_state as other

    assert _amp_state is other
    assert sys.modules["apex.amp._amp_state"] is not _amp_state
    assert sys.modules["apex.amp._amp_state"]._amp_state is _amp_state


@pytest.mark.parametrize(
    "path",
    [
        "apex.amp.scaler.LossScaler",
        "apex.fp16_utils.loss_scaler.DynamicLossScaler",
        "apex.fp16_utils.loss_scaler.LossScaler",
        "apex.optimizers.fused_adam.FusedAdam",
        "apex.normalization.fused_layer_norm.FusedLayerNorm",
        "apex.parallel.distributed.DistributedDataParallel",
        "apex.RNN.RNNBackend.stackedRNN",
    ],
)
def test_what_is_pickled_carries_apexs_own_path(path):
    module, _, name = path.rpartition(".")
    thing = getattr(importlib.import_module(module), name)

    assert f"c{module}\n{name}\n".encode() in pickle.dumps(thing, protocol=0)
    assert pickle.loads(f"c{module}\n{name}\n.".encode()) is thing


@pytest.mark.parametrize(
    ("module", "instead"),
    [
        ("apex.transformer", "Megatron-Core"),
        ("apex.transformer.tensor_parallel", "Megatron-Core"),
        ("apex.reparameterization", "weight_norm"),
        ("apex.pyprof", "torch.profiler"),
        ("apex.contrib.multihead_attn", "scaled_dot_product_attention"),
        ("apex.contrib.sparsity", "semi_structured"),
        ("apex.contrib.optimizers.distributed_fused_lamb", "ZeroRedundancyOptimizer"),
    ],
)
def test_what_is_not_provided_names_its_replacement(module, instead):
    parent, _, name = module.rpartition(".")

    with pytest.raises(ImportError, match=instead):
        importlib.import_module(module)
    with pytest.raises(ImportError, match=instead):
        exec(f"from {parent} import {name}", {})


def test_an_unknown_part_is_python_s_own_error():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'apex.nothing'"):
        importlib.import_module("apex.nothing")


@pytest.mark.parametrize(
    ("parts", "prefer", "ours", "said"),
    [
        (["amp", "parallel", "optimizers"], None, False, ""),
        (["optimizers", "normalization"], None, True, "has no apex.amp"),
        (["amp", "optimizers"], None, True, "has no apex.parallel"),
        ([], None, True, "pip uninstall apex"),
        (["amp", "parallel", "optimizers"], "shim", True, "as LOCKSTEP_APEX_PREFER says"),
        (["optimizers"], "nvidia", False, "as LOCKSTEP_APEX_PREFER says"),
    ],
)
def test_whose_apex_it_is(parts, prefer, ours, said):
    choice = choose("/somewhere/apex", parts, prefer)

    assert ours == choice.ours
    assert said in choice.note
    assert bool(said) == bool(choice.note)


@pytest.mark.parametrize(("place", "prefer"), [(None, "nvidia"), ("/somewhere/apex", "nvidia"), (None, "mine")])
def test_a_wish_that_cannot_be_fulfilled_raises(place, prefer):
    with pytest.raises(UsageError, match="LOCKSTEP_APEX_PREFER"):
        choose(place, [], prefer)


def make_apex(folder, *parts):
    """A package named apex that says whose it is."""
    for part in ("", *parts):
        (folder / "apex" / part).mkdir(parents=True, exist_ok=True)
        (folder / "apex" / part / "__init__.py").write_text(f"WHOSE = 'theirs{part and ' ' + part}'\n")


def python(folder, code, **variables):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=ENVIRONMENT | variables)


ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONWARNINGS": "error"}


def test_an_installed_apex_is_ours_only_where_it_is_not_whole(tmp_path):
    """One process looks at four of them; none is imported to be looked at."""
    folders = {
        "whole": ("amp", "parallel", "optimizers"),
        "today": ("optimizers", "normalization"),
        "pyramid": (),
        "none": None,
    }
    for name, parts in folders.items():
        (tmp_path / name).mkdir()
        if parts is not None:
            make_apex(tmp_path / name, *parts)
    code = """
    import sys, importlib
    try:
        import apex
        print("apex without install?", apex)
    except ModuleNotFoundError as error:
        print(error)
    import lockstep.compat.apex.install
    for name in ("whole", "today", "pyramid", "none"):
        sys.path.insert(0, name)
        importlib.invalidate_caches()
        import apex
        print(name, getattr(apex, "WHOSE", "ours"))
        for module in [m for m in sys.modules if m.split(".")[0] == "apex"]:
            del sys.modules[module]
        sys.path.pop(0)
    """

    done = python(tmp_path, code)

    assert "No module named 'apex'\nwhole theirs\ntoday ours\npyramid ours\nnone ours\n" == done.stdout, done.stderr
    first, second = (line.replace(f"{tmp_path}/", "") for line in done.stderr.splitlines())
    assert "lockstep: import apex gives lockstep's: the apex in today/apex has no apex.amp." in first
    assert "lockstep: import apex gives lockstep's: the package in pyramid/apex is another one of that name" in second


def test_an_apex_that_was_imported_before_and_is_not_whole_raises(tmp_path):
    make_apex(tmp_path, "optimizers")

    done = python(tmp_path, "import apex; import lockstep.compat.apex.install")

    assert "UsageError" in done.stderr
    assert "Import lockstep.compat.apex.install first" in done.stderr


def test_lockstep_run_provides_apex_and_loads_none_of_it_otherwise(tmp_path):
    source = """
    import sys
    early = sorted(name for name in sys.modules if name.split(".")[0] == "apex" or "lockstep.compat.apex" in name)
    import apex
    from apex.optimizers import FusedAdam
    print(early, FusedAdam.__module__, apex.__file__)
    """

    done = run(tmp_path, textwrap.dedent(source), "-n", "1")

    assert f"[] apex.optimizers.fused_adam {FACES['apex']}\n" == done.stdout, done.stderr


def test_multiproc_starts_ranks_with_apexs_arguments(tmp_path):
    script = tmp_path / "main.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    command = [
        sys.executable,
        "-m",
        "lockstep.compat.apex.parallel.multiproc",
        str(script),
        "--world-size",
        "2",
        "--lr",
        "1",
    ]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)

    lines = sorted(re.findall(r"\['--world-size.*", done.stdout))
    assert [f"['--world-size', '2', '--lr', '1', '--rank', '{rank}'] {rank} 2" for rank in "01"] == lines, done.stderr


def test_the_installed_files_are_all_there():
    assert all(Path(path).exists() for path in FACES.values())
