"""Property tests have no deadline: how fast this machine is at the moment is no property of the code."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("any speed", deadline=None)
if not os.environ.get("CI"):  # with it, Hypothesis has a profile of its own: no deadline, the same examples every time
    settings.load_profile("any speed")
