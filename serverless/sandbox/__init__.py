"""Runs programs that nobody has read: the part that rewards for generated code stand on.

A program gets standard input, the Python runtime read-only and a scratch directory; no network, no environment, no
files of the host, no other program's leavings, and as much time, memory and output as its `Limits` say. See `launch`
for the ladder of isolation and `inside` for what runs in it.
"""

from serverless.sandbox.box import AsyncBox, Box, Sandbox, detect, sandbox
from serverless.sandbox.values import Limits, Ran, Rung, Status

__all__ = ["AsyncBox", "Box", "Limits", "Ran", "Rung", "Sandbox", "Status", "detect", "sandbox"]
