"""``import lockstep.compat.apex.install``: from here on ``import apex`` works in this process."""

from lockstep.compat.install import install

install()
