"""rollart: orchestration for agentic reinforcement learning.

What a user's environments and reward functions need is here; importing it loads nothing heavy.
"""

from rollart.model import InfraFault, ModelFault, Observation, Sample, Scored, Step
from serverless.declare import reward

__all__ = ["InfraFault", "ModelFault", "Observation", "Sample", "Scored", "Step", "__version__", "reward"]

__version__ = "0.1.0"
