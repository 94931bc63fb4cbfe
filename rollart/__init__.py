"""rollart: orchestration for agentic reinforcement learning.

Exports the names that users' environments and reward functions need. Importing it loads no heavy module, and none
before a name is accessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollart.model import InfraFault, ModelFault, Observation, Sample, Scored, Step
    from serverless.declare import reward

__all__ = ["InfraFault", "ModelFault", "Observation", "Sample", "Scored", "Step", "__version__", "reward"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rollart' has no attribute '{name}'")
    if name == "reward":
        from serverless.declare import reward

        return reward
    from rollart import model

    return getattr(model, name)
