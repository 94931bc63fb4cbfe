"""The attack battery: the effect of each program is checked from outside, for every launch method."""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from serverless.sandbox import Box, Limits
from tests.serverless.sandbox.attacks import ATTACKS, Attack
from tests.serverless.sandbox.support import WAYS, box
from tests.serverless.support import alive, descendants

pytestmark = [
    pytest.mark.slow,  # real processes
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the system call numbers are those of x86_64"),
]

SECRET = "rollart-planted-secret-5d1f"


@dataclass
class World:
    """Targets of an attacker."""

    directory: pathlib.Path
    tcp: socket.socket
    udp: socket.socket
    unix: socket.socket
    abstract: socket.socket
    victim: subprocess.Popen[bytes]

    def fill(self, text: str) -> str:
        values = {
            "SECRET_FILE": self.directory / "secret",
            "PORT": self.tcp.getsockname()[1],
            "SOCKET": self.directory / "socket",
            "ABSTRACT": self.abstract.getsockname()[1:].decode(),
            "VICTIM": self.victim.pid,
            "MARK": self.directory / "mark",
        }
        for name, value in values.items():
            text = text.replace(f"@{name}@", str(value))
        return text

    def untouched(self) -> None:
        secret = self.directory / "secret"
        assert secret.read_text() == SECRET
        assert secret.stat().st_mode & 0o777 == 0o644
        assert {p.name for p in self.directory.iterdir()} == {"secret", "socket"}
        assert not pathlib.Path("/usr/lib/rollart-breach").exists()
        assert self.victim.poll() is None
        for listener in (self.tcp, self.unix, self.abstract):
            with contextlib.suppress(BlockingIOError):
                listener.accept()
                raise AssertionError("a connection came out of the sandbox")
        with contextlib.suppress(BlockingIOError):
            raise AssertionError(f"a datagram came out of the sandbox: {self.udp.recv(100)!r}")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("outside")
    directory.chmod(0o777)
    (directory / "secret").write_text(SECRET)
    (directory / "secret").chmod(0o644)
    with contextlib.ExitStack() as stack:
        tcp, udp, unix, abstract = (
            stack.enter_context(socket.socket(family, kind))
            for family, kind in (
                (socket.AF_INET, socket.SOCK_STREAM),
                (socket.AF_INET, socket.SOCK_DGRAM),
                (socket.AF_UNIX, socket.SOCK_STREAM),
                (socket.AF_UNIX, socket.SOCK_STREAM),
            )
        )
        tcp.bind(("127.0.0.1", 0))
        udp.bind(tcp.getsockname())
        unix.bind(str(directory / "socket"))
        abstract.bind(f"\0rollart-canary-{os.getpid()}")
        for listener in (tcp, unix, abstract):
            listener.listen()
        for one in (tcp, udp, unix, abstract):
            one.setblocking(False)
        environment = {"ROLLART_SECRET": SECRET, "PATH": os.environ["PATH"]}
        victim = subprocess.Popen(["sleep", "1000"], env=environment)
        os.environ["ROLLART_SECRET"] = SECRET
        try:
            yield World(directory, tcp, udp, unix, abstract, victim)
        finally:
            del os.environ["ROLLART_SECRET"]
            victim.kill()
            victim.wait()


@pytest.fixture(scope="module", params=WAYS)
def boxed(request: pytest.FixtureRequest) -> Iterator[Box]:
    limits = Limits(wall_s=60.0, cpu_s=10.0, memory_mb=256, output_bytes=1 << 20, files_mb=32, processes=16)
    with box(request.param, limits=limits) as one:
        yield one


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_is_contained(boxed: Box, world: World, attack: Attack) -> None:
    boxed.run("pass")  # a sandbox that the attack before broke starts again here
    assert boxed.pid is not None
    supervisor, before = boxed.pid, set(descendants(boxed.pid))
    limits = Limits(attack.wall_s, 10.0, 256, 1 << 20, 32, 16)
    ran = boxed.run(world.fill(attack.program), attack.stdin, limits)
    output = ran.stdout + ran.stderr
    assert ran.status in attack.ends, ran
    assert ran.stdout.startswith("tried") or ran.status in ("killed", "output", "signal"), output[:500]
    assert "BREACH" not in output, output[:2000]
    assert SECRET not in output
    assert len(output) <= 3 * limits.output_bytes
    world.untouched()
    _nothing_left(boxed, supervisor, before)
    after = boxed.run("import os; print(sorted(os.listdir('.')), open.__name__, 6 * 7)")
    assert (after.stdout, after.status) == ("[] open 42\n", "ok"), after


def _nothing_left(boxed: Box, supervisor: int, before: set[int]) -> None:
    """The sandbox has its own processes as before, or it was given up and all of them are gone."""
    if boxed.pid == supervisor:
        assert set(descendants(supervisor)) == before
        return
    deadline = time.monotonic() + 60.0
    while any(map(alive, {supervisor, *before})):
        assert time.monotonic() < deadline, "processes outlived their sandbox"
        time.sleep(0.01)


def test_the_battery_is_as_large_as_promised() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 22
