import pytest
from torch import nn

from lockstep import amp
from lockstep.amp import policies


@pytest.fixture(autouse=True)
def amp_is_off_afterwards():
    """O1 casts for the whole process, and registrations stay; the next test finds neither."""
    yield
    amp.initialize(nn.Identity(), enabled=False)
    policies._registrations.clear()
    vars(amp._amp_state).clear()
    amp._amp_state.__init__()
