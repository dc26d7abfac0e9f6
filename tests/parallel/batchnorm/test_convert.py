"""Models made synchronised and back: nothing gets lost, and what cannot be kept is left alone and named."""

import contextlib
import copy
import io
import warnings

import pytest
import torch
from ranks import run_ranks
from torch import nn

import lockstep
from lockstep.parallel.batchnorm.convert import count_synchronised
from lockstep.parallel.batchnorm.layer import BatchNorm


class WithReLU(nn.BatchNorm2d):
    """What timm's BatchNormAct2d is, in short."""

    def forward(self, x):
        return super().forward(x).relu()


class OtherDefaults(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels, eps=1e-3)


def net():
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm3d(4), nn.BatchNorm1d(5)))


def test_every_kind_is_converted_in_place_and_counted():
    model = net()
    layers = list(model.modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    converted = lockstep.convert_sync_batchnorm(model)

    assert converted is model
    assert count_synchronised(model) == 3
    assert all(one is other for one, other in zip(layers, model.modules(), strict=True))
    assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))


def test_b06_revert_gives_back_classes_and_state():
    """B06: there was no way back for export."""
    model = net()
    before, kinds = copy.deepcopy(model.state_dict()), [type(layer) for layer in model.modules()]
    lockstep.revert_sync_batchnorm(lockstep.convert_sync_batchnorm(model))

    assert [type(layer) for layer in model.modules()] == kinds
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not {"_former_class", "_group"} & set(vars(model[1]))


def test_b08_attributes_flags_and_hooks_stay():
    """B08: qconfig and num_batches_tracked were lost by conversions."""
    layer = nn.BatchNorm2d(3, momentum=None).eval().to(torch.float64)
    layer.qconfig = "qconfig"
    layer.num_batches_tracked.fill_(7)
    layer.weight.requires_grad_(False)
    seen = []
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
    weight = layer.weight
    converted = lockstep.convert_sync_batchnorm(layer)
    converted(torch.ones(2, 3, 1, 1, dtype=torch.float64))
    handle.remove()
    converted(torch.ones(2, 3, 1, 1, dtype=torch.float64))

    assert seen == ["SyncBatchNorm"]
    assert (converted.qconfig, converted.num_batches_tracked.item(), converted.momentum) == ("qconfig", 7, None)
    assert (converted.training, converted.weight is weight, weight.requires_grad) == (False, True, False)


def test_b02_a_subclass_with_its_own_forward_is_left_and_named():
    """B02: torch drops the ReLU without a word."""
    model = nn.Sequential(nn.BatchNorm2d(3), WithReLU(3), nn.LazyBatchNorm2d()).eval()
    before = model[1](torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)))
    with pytest.warns(UserWarning, match=r"left 2 layer.*'1' \(WithReLU has its own forward\), '2' \(LazyBatchNorm2d"):
        lockstep.convert_sync_batchnorm(model)

    assert [type(layer) for layer in model] == [lockstep.SyncBatchNorm, WithReLU, nn.LazyBatchNorm2d]
    assert torch.equal(before, model[1](torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))))


def test_b02_a_converter_says_what_to_put_there():
    """B02: everywhere the layer is used, at the root too, and even if the new module holds the old one."""
    shared = WithReLU(3)
    model = nn.Sequential(shared, nn.Sequential(shared))

    def converter(layer):
        plain = BatchNorm(3)
        plain.__dict__.update(vars(layer))
        return nn.Sequential(lockstep.convert_sync_batchnorm(plain), nn.ReLU())

    lockstep.convert_sync_batchnorm(model, converter=converter)
    assert model[0] is model[1][0]
    assert model[0][0].weight is shared.weight
    assert count_synchronised(model) == 1

    root = lockstep.convert_sync_batchnorm(shared, converter=nn.Sequential)
    assert root[0] is shared


@pytest.mark.parametrize("answer", ["itself", "None"])
def test_a_converter_that_leaves_a_layer_decides_whether_it_is_warned_of(answer):
    model = nn.Sequential(WithReLU(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lockstep.convert_sync_batchnorm(model, converter=lambda layer: layer if answer == "itself" else None)

    assert type(model[0]) is WithReLU
    assert len(caught) == (answer == "None")


def test_a_forward_set_on_one_layer_is_respected():
    layer = nn.BatchNorm1d(3)
    layer.forward = lambda x: x
    with pytest.warns(UserWarning, match=r"'the model itself' \(this BatchNorm1d has a forward of its own\)"):
        assert type(lockstep.convert_sync_batchnorm(layer)) is nn.BatchNorm1d


def test_a_parametrized_layer_is_left():
    layer = nn.BatchNorm1d(3)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    with pytest.warns(UserWarning, match="has its own"):
        lockstep.convert_sync_batchnorm(layer)


def test_a_subclass_that_only_changes_defaults_is_converted_and_comes_back():
    layer = lockstep.convert_sync_batchnorm(OtherDefaults(3))

    assert (type(layer), layer.eps) == (lockstep.SyncBatchNorm, 1e-3)
    assert type(lockstep.revert_sync_batchnorm(layer)) is OtherDefaults


def test_a_lazy_layer_that_has_seen_its_input_is_converted():
    layer = nn.LazyBatchNorm1d()
    layer(torch.ones(2, 3))

    assert type(lockstep.convert_sync_batchnorm(layer)) is lockstep.SyncBatchNorm


def test_torchs_own_synchronised_layers_are_converted_and_keep_their_group():
    layer = lockstep.convert_sync_batchnorm(nn.SyncBatchNorm(3, process_group="a group"))
    given = lockstep.convert_sync_batchnorm(nn.SyncBatchNorm(3, process_group="a group"), process_group="another")

    assert (type(layer), layer.process_group, given.process_group) == (lockstep.SyncBatchNorm, "a group", "another")
    assert type(lockstep.revert_sync_batchnorm(layer)) is BatchNorm


def test_shared_layers_stay_shared_and_instance_norm_is_not_batch_norm():
    shared = nn.BatchNorm1d(3)
    model = lockstep.convert_sync_batchnorm(nn.ModuleDict({"a": shared, "b": shared, "c": nn.InstanceNorm1d(3)}))

    assert model["a"] is model["b"] is shared
    assert count_synchronised(model) == 1
    assert type(model["c"]) is nn.InstanceNorm1d


def test_converting_twice_changes_nothing_more():
    layer = lockstep.convert_sync_batchnorm(lockstep.convert_sync_batchnorm(nn.BatchNorm3d(3)))

    assert type(lockstep.revert_sync_batchnorm(layer)) is nn.BatchNorm3d


def test_revert_leaves_what_ordinary_batch_norm_cannot_do():
    model = nn.Sequential(lockstep.SyncBatchNorm(3, fuse_relu=True), lockstep.SyncBatchNorm(3))
    with pytest.warns(UserWarning, match=r"'0' \(channel_last=False, fuse_relu=True\)"):
        lockstep.revert_sync_batchnorm(model)

    assert [type(layer) for layer in model] == [lockstep.SyncBatchNorm, BatchNorm]


def test_a_converted_model_is_copied_and_pickled_whole():
    import pickle

    model = lockstep.convert_sync_batchnorm(net())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(lockstep.revert_sync_batchnorm(twin)[1]) is nn.BatchNorm2d
    assert count_synchronised(model) == 3


def replicated(rank, options):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = lockstep.replicate(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), WithReLU(3)), **options)
    return count_synchronised(model), said.getvalue(), [str(warning.message) for warning in warned]


def test_replicate_converts_says_how_many_and_names_what_it_left_on_rank_0():
    (count, said, warned), *others = run_ranks(replicated, 2, {})

    assert count == 2
    assert said.startswith("lockstep.replicate: 2 batch norm layer(s) normalise over the batches of all 2 ranks")
    assert len(warned) == 1
    assert "'2' (WithReLU has its own forward)" in warned[0]
    assert others == [(2, "", [])]


def test_replicate_leaves_batch_norm_alone_if_told_to():
    assert run_ranks(replicated, 2, {"sync_batchnorm": False}) == [(0, "", [])] * 2
