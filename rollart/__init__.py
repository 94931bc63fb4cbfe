"""rollart: orchestration for agentic reinforcement learning.

Exports the names that users' environments and reward functions need. Importing it loads no heavy module, and none
before a name is accessed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollart.model import InfraFault, ModelFault, Observation, Sample, Scored, Step
    from serverless.declare import reward
    from serverless.types import TokenUsage
    from serverless.usage import record_tokens

__all__ = [
    "InfraFault",
    "ModelFault",
    "Observation",
    "Sample",
    "Scored",
    "Step",
    "TokenUsage",
    "__version__",
    "record_tokens",
    "reward",
]

__version__ = "0.1.0"

_MODULES = {
    "TokenUsage": "serverless.types",
    "record_tokens": "serverless.usage",
    "reward": "serverless.declare",
}
"""Modules of the names that are not `rollart.model`'s."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rollart' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES.get(name, "rollart.model")), name)
