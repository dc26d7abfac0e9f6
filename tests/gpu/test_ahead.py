import pytest
import torch

import lockstep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_batches_arrive_on_the_device_unchanged_and_in_order():
    data = torch.utils.data.TensorDataset(torch.rand(1000, 4096), torch.arange(1000))
    loader = lockstep.DataLoader(data, 64, seed=1)
    sums, labels = [], []
    for images, numbers in loader:
        assert images.is_cuda
        assert numbers.is_cuda
        for _ in range(20):  # keeps the device busy while the next batch travels
            images @ images.T
        sums.append(images.sum(1))
        labels.append(numbers)

    assert torch.equal(torch.cat(labels).cpu(), torch.arange(1000))
    torch.testing.assert_close(torch.cat(sums).cpu(), data.tensors[0].sum(1), rtol=1e-5, atol=1e-2)


def test_a_batch_on_its_way_does_not_count_as_given():
    loader = lockstep.DataLoader(torch.arange(10), 2)
    batches = iter(loader)
    next(batches)

    assert loader.state_dict()["position"] == 2
