"""The apex that lockstep provides, for tests: ``from faces import apex``."""

import lockstep.compat.apex.install  # noqa: F401

# isort: split
import amp_C
import apex
import apex_C

__all__ = ["amp_C", "apex", "apex_C"]
