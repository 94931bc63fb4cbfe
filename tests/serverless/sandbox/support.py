"""Every way to start a sandbox, tried one by one."""

from __future__ import annotations

import functools

import pytest

from serverless.errors import SandboxUnavailable
from serverless.sandbox.box import Box, SandboxProcess
from serverless.sandbox.launch import LaunchMethod, launch_methods
from serverless.sandbox.values import Limits

WAYS = {
    "bubblewrap-root": ("bubblewrap", "as root"),
    "bubblewrap-user": ("bubblewrap", "with a user namespace"),
    "landlock-root": ("landlock", "as root"),
    "landlock-user": ("landlock", "with a user namespace"),
    "landlock-alone": ("landlock", "without namespaces"),
}


def box(name: str, *, limits: Limits | None = None, preload: tuple[str, ...] = ()) -> Box:
    """A sandbox that is started in this way and no other. Skips the test where that cannot be."""
    rung, variant = WAYS[name]
    why = _why_not(name)
    if why:
        pytest.skip(why)
    return Box(_core(rung, variant, limits or Limits(), preload))


@functools.cache
def _why_not(name: str) -> str:
    rung, variant = WAYS[name]
    if not _ways(rung, variant, Limits(), ()):
        return f"{name}: not root"
    try:
        with Box(_core(rung, variant, Limits(), ())):
            return ""
    except SandboxUnavailable as error:
        return error.message


def _core(rung: str, variant: str, limits: Limits, preload: tuple[str, ...]) -> SandboxProcess:
    return SandboxProcess(rung, limits=limits, preload=preload, allow_unsafe=False, only=variant)


def _ways(rung: str, variant: str, limits: Limits, preload: tuple[str, ...]) -> list[LaunchMethod]:
    return [way for way in launch_methods(rung, limits=limits, preload=preload) if way.name == variant]
