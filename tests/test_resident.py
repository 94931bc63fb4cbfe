"""What a process knows of its memory."""

from __future__ import annotations

import sys

import pytest

from rollart.resident import machine_bytes, resident_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")


def test_what_is_written_is_resident_and_below_the_machines() -> None:
    before = resident_bytes(below=False)
    held = b"x" * 40_000_000
    after = resident_bytes(below=False)
    assert 30_000_000 < after - before < 60_000_000, len(held)
    assert after <= resident_bytes() <= machine_bytes()
