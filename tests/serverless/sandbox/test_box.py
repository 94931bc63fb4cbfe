"""The resources and limits of programs in a sandbox, for every launch method, blocking and not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from serverless.errors import SandboxUnavailable
from serverless.sandbox import Box, Limits, detect, launch, sandbox
from serverless.sandbox.launch import RungUnavailable
from tests.serverless.sandbox.support import WAYS, box
from tests.serverless.support import alive, children, descendants

pytestmark = pytest.mark.slow  # real processes


@pytest.fixture(params=WAYS)
def boxed(request: pytest.FixtureRequest) -> Iterator[Box]:
    with box(request.param, limits=Limits(wall_s=60.0)) as one:
        yield one


def gone(*pids: int) -> None:
    deadline = time.monotonic() + 60.0
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, "something is left running"
        time.sleep(0.01)


def test_programs_have_input_output_and_an_exit_code(boxed: Box) -> None:
    ran = boxed.run("print(sum(map(int, input().split())))", "40 2\n")
    assert (ran.stdout, ran.stderr, ran.status, ran.exit_code, ran.ok) == ("42\n", "", "ok", 0, True)
    assert 0.0 < ran.cpu_s < 5.0
    assert ran.wall_s > 0.0
    assert ran.max_rss_mb > 1.0
    for program, status, code in (
        ("raise SystemExit(7)", "exit", 7),
        ("raise SystemExit", "ok", 0),
        ("import sys; sys.exit('no')", "exit", 1),
        ("1 / 0", "exit", 1),
        ("def f(:", "exit", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGUSR1)", "signal", -signal.SIGUSR1),
    ):
        ran = boxed.run(program)
        assert (ran.status, ran.exit_code) == (status, code), ran


def test_a_traceback_shows_the_program_and_nothing_of_the_runner(boxed: Box) -> None:
    error = boxed.run("def f():\n    return 1 / 0\n\nf()\n").stderr
    assert error.splitlines()[1:3] == ['  File "main.py", line 4, in <module>', "    f()"]
    assert error.endswith("ZeroDivisionError: division by zero\n")


def test_programs_run_as_python_runs_them(boxed: Box) -> None:
    program = """
    import asyncio, atexit, collections, json, os, random, sys, tempfile, threading
    from dataclasses import dataclass
    @dataclass
    class Point: x: int = 1
    async def main():
        await asyncio.sleep(0)
        return Point()
    atexit.register(lambda: print('bye'))
    threading.Thread(target=lambda: print('thread')).start()
    with tempfile.TemporaryFile() as f: f.write(b'x')
    open('helper.py', 'w').write('def f(): return 5')
    import helper
    print(__name__, sys.argv, asyncio.run(main()), helper.f())
    print('é', input(), ascii('\\udc80'))
    """
    ran = boxed.run(textwrap.dedent(program), "ü\n")
    assert ran.stderr == ""
    assert sorted(ran.stdout.splitlines()) == ["__main__ ['main.py'] Point(x=1) 5", "bye", "thread", "é ü '\\udc80'"]


def test_programs_may_have_some_threads(boxed: Box) -> None:
    program = """
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier
    meet = Barrier(10)
    with ThreadPoolExecutor(10) as pool:
        print(len(list(pool.map(lambda n: meet.wait(), range(10)))))
    """
    ran = boxed.run(textwrap.dedent(program))
    assert ran.stdout == "10\n", ran


def test_programs_are_not_one_anothers_chance(boxed: Box) -> None:
    draws = {boxed.run("import random; print(random.random())").stdout for _ in range(4)}
    orders = {boxed.run("print(hash('a'))").stdout for _ in range(2)}
    assert (len(draws), len(orders)) == (4, 1)


@pytest.mark.parametrize(
    "leave",
    [
        "open('x', 'w').write('leak')",
        "open('/tmp/x', 'w').write('leak')",
        "open('/dev/shm/x', 'w').write('leak')",
        "from multiprocessing import shared_memory as s; s.SharedMemory('leak', True, 10)",
        "import os; os.makedirs('a/b'); os.symlink('/', 'a/b/c'); os.mkfifo('pipe')",
        "import builtins, sys, json; builtins.leak = sys.leak = json.loads = 'leak'",
        "import os; os.environ['leak'] = 'leak'; os.umask(0); os.chdir('/')",
        "import sys; sys.path.insert(0, '/tmp'); sys.setrecursionlimit(50)",
    ],
)
def test_what_a_program_leaves_is_not_there_for_the_next(boxed: Box, leave: str) -> None:
    look = """
    import builtins, json, os, sys
    def names(place):
        try:
            return sorted(set(os.listdir(place)) - {'job', 'shm'})
        except OSError:  # exists for packages installed below it
            return []
    places = () if os.path.exists('/etc/passwd') else ('.', '/tmp', '/dev/shm')
    print(os.listdir('.'), [names(p) for p in places], hasattr(builtins, 'leak'), hasattr(sys, 'leak'))
    print(json.loads('1'), 'leak' in os.environ, os.umask(0o77), sys.getrecursionlimit(), os.getcwd()[-3:])
    """
    look = textwrap.dedent(look)
    before = boxed.run(look)
    boxed.run(leave)
    after = boxed.run(look)
    assert before.ok
    assert "leak" not in after.stdout.replace("leak'", "")
    assert (after.stdout, after.stderr) == (before.stdout, before.stderr)


def test_limits_are_those_of_the_call(boxed: Box) -> None:
    hungry = "x = bytearray(100 << 20); print(len(x) >> 20)"
    assert boxed.run(hungry, limits=Limits(memory_mb=200)).stdout == "100\n"
    assert boxed.run(hungry, limits=Limits(memory_mb=50)).status == "memory"
    assert boxed.run("print('x' * 5000)", limits=Limits(output_bytes=1000)).status == "output"
    assert len(boxed.run("print('x' * 5000)", limits=Limits(output_bytes=1000)).stdout) == 1000
    assert boxed.run("print('x' * 999)", limits=Limits(output_bytes=1000)).status == "ok"
    late = boxed.run("print('early', flush=True)\nimport time; time.sleep(60)", limits=Limits(wall_s=2.0))
    assert (late.status, late.stdout) == ("time", "early\n")
    busy = boxed.run("while True: pass", limits=Limits(wall_s=60.0, cpu_s=1.0))
    assert busy.status == "time"
    assert 0.2 <= busy.cpu_s <= 5.0  # the kernel counts this limit in ticks
    big = "open('x', 'wb').write(bytes(3 << 20))"
    assert boxed.run(big, limits=Limits(files_mb=4)).ok
    assert not boxed.run(big, limits=Limits(files_mb=2)).ok


def test_a_supervisor_that_dies_is_replaced_and_its_job_was_killed(boxed: Box) -> None:
    """Whatever kills it while a program runs: here we do, from outside."""
    boxed.run("pass")
    assert boxed.pid is not None
    first, supervisor = boxed.pid, (children(boxed.pid) or [boxed.pid])[0]

    jobs: list[int] = []

    def kill() -> None:
        while not jobs:
            time.sleep(0.005)
            jobs.extend(descendants(supervisor))
        os.kill(supervisor, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    ran = boxed.run("import time; time.sleep(60)")
    killer.join()
    gone(first, supervisor, *jobs)
    assert (ran.status, ran.ok) == ("killed", False)
    assert boxed.run("print(1)").stdout == "1\n"
    assert boxed.pid != first


def test_a_sandbox_that_died_between_programs_blames_none(boxed: Box) -> None:
    boxed.run("pass")
    assert boxed.pid is not None
    inside = descendants(boxed.pid)
    for pid in (*inside, boxed.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    gone(*inside)
    assert boxed.run("print(1)").stdout == "1\n"


def test_modules_are_preloaded_and_nothing_installed_is_visible_without() -> None:
    plain = "import importlib.util as u; print(u.find_spec('numpy') is not None)"
    loaded = "import sys; n = 'numpy' in sys.modules; import numpy as np; print(n, np.ones((9, 9)) @ np.ones(9))"
    for name in WAYS:
        rung, _ = WAYS[name]
        try:
            with sandbox(rung, preload=("numpy",)) as one:
                ran = one.run(loaded)
        except SandboxUnavailable as error:
            pytest.skip(error.message)
        assert ran.stdout == "True [9. 9. 9. 9. 9. 9. 9. 9. 9.]\n", ran
        with sandbox(rung) as one:
            assert one.run(plain).stdout == "False\n"


def test_a_preload_that_does_not_exist_is_said_at_once() -> None:
    with pytest.raises(SandboxUnavailable, match="No module named 'nothing'"), sandbox(preload=["nothing"]):
        pass


def test_leaving_ends_every_process(boxed: Box) -> None:
    boxed.run("pass")
    assert boxed.pid is not None
    pids = [boxed.pid, *descendants(boxed.pid)]
    boxed.close()
    assert not any(map(alive, pids))


def test_a_killed_owner_leaves_nothing() -> None:
    script = """
    from serverless.sandbox import sandbox
    box = sandbox().box()
    print(box.run('print(1)').stdout, flush=True)
    box.run('import time; time.sleep(600)', limits=__import__('serverless.sandbox').sandbox.Limits(wall_s=600))
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    if owner.stdout.readline() != b"1\n":
        owner.wait()
        pytest.skip("no sandbox works here")
    deadline = time.monotonic() + 60.0
    while len(inside := descendants(owner.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert inside
    owner.kill()
    owner.wait()
    owner.stdout.close()
    gone(*inside)


def test_the_asynchronous_form_runs_as_many_at_once_as_it_has_sandboxes() -> None:
    async def main() -> list[str]:
        async with sandbox(size=2, limits=Limits(wall_s=60.0)) as boxes:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(boxes.run(f"print(input(), {n})", "a")) for n in range(6)]
            return [task.result().stdout for task in tasks]

    before = set(descendants())
    assert asyncio.run(main()) == [f"a {n}\n" for n in range(6)]
    assert set(descendants()) <= before


def test_cancelling_kills_the_program_and_the_sandbox_lives_on() -> None:
    async def main() -> str:
        async with sandbox(limits=Limits(wall_s=60.0)) as boxes:
            inside = set(descendants())
            task = asyncio.get_running_loop().create_task(boxes.run("import time; time.sleep(60)"))
            async with asyncio.timeout(60.0):
                while set(descendants()) <= inside:
                    await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            ran = await boxes.run("print(1)")
            gone(*inside - set(descendants()))
            return ran.stdout

    before = set(descendants())
    assert asyncio.run(main()) == "1\n"
    assert set(descendants()) <= before


def test_a_forked_process_gets_a_sandbox_of_its_own(boxed: Box) -> None:
    boxed.run("pass")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, boxed.run("print(1)").stdout.encode() + str(boxed.pid).encode())
            boxed.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    written = os.read(reading, 100).split()
    os.close(reading)
    assert written[0] == b"1"
    assert int(written[1]) != boxed.pid
    assert boxed.run("print(2)").stdout == "2\n"


def test_every_rung_is_tried_and_says_why_not() -> None:
    rungs = {rung.name: rung for rung in detect()}
    assert list(rungs) == ["provider", "bubblewrap", "landlock", "unsafe"]
    assert all(rung.available != bool(rung.why_not) for rung in rungs.values())
    assert "not inside AWS Lambda or Modal" in rungs["provider"].why_not


def test_without_any_isolation_nothing_runs_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise RungUnavailable("not here")

    for name in ("_on_provider", "_bubblewrap", "_landlock", "_single"):
        monkeypatch.setattr(launch, name, refuse)
    with pytest.raises(SandboxUnavailable, match="not here"), sandbox():
        pass
    with pytest.raises(SandboxUnavailable, match="isolates nothing"), sandbox("unsafe"):
        pass
    with sandbox(allow_unsafe=True) as one:
        assert one.rung == "unsafe"
        assert one.run("print(1)").stdout == "1\n"
    assert "UNSAFE" in caplog.text


def test_the_unsafe_rung_shows_what_the_battery_looks_for(tmp_path: pathlib.Path) -> None:
    """The same attempts succeed without isolation: the battery's canaries see."""
    secret, mark = tmp_path / "secret", tmp_path / "mark"
    secret.write_text("planted")
    before = set(descendants())
    with sandbox("unsafe", allow_unsafe=True, limits=Limits(wall_s=60.0)) as one:
        assert one.run(f"print(open({str(secret)!r}).read())").stdout == "planted\n"
        assert one.run(f"open({str(mark)!r}, 'w').write('x')").ok
        assert one.run("import socket; socket.socket().bind(('127.0.0.1', 0))").ok
        # Limits and reaping hold even here.
        assert one.run("import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(600)").ok
        assert len(set(descendants()) - before) == 1
        assert one.run("x = bytearray(1 << 30)").status == "memory"
    assert mark.exists()


def test_inside_a_provider_its_boundary_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "hosting_provider", lambda *args, **settings: "lambda")
    with sandbox() as one:
        assert one.rung == "provider"
        assert one.run("import os; os.fork()").status == "exit"
        assert "PermissionError" in one.run("import socket; socket.socket()").stderr
        assert one.run("print(1)").stdout == "1\n"
