"""Runs untrusted programs: the basis of rewards for generated code.

A program gets standard input, the Python runtime read-only and a scratch directory. It gets no network, no environment,
no files of the host and no remains of other programs, and as much time, memory and output as its `Limits` allow. See
`launch` for the ladder of isolation and `inside` for the programs in the sandbox.
"""

from serverless.sandbox.box import AsyncBox, Box, Sandbox, detect, sandbox
from serverless.sandbox.values import Limits, Ran, Rung, Status

__all__ = ["AsyncBox", "Box", "Limits", "Ran", "Rung", "Sandbox", "Status", "detect", "sandbox"]
