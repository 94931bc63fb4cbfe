"""Programs that try to get out of the sandbox, to harm the machine, or to outlive their time.

Each prints "tried" before it does anything and "BREACH" if it got what it should not. Names in @NAME@ are filled in
by the test: SECRET_FILE, PORT (TCP and UDP listeners on the loopback address), SOCKET (a listening unix socket's
path), ABSTRACT (its abstract twin), VICTIM (a process of the same user), MARK (a path outside).
"""

from __future__ import annotations

from dataclasses import dataclass

_LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nprint('tried', flush=True)\n"
_TRIED = "import os, sys\nprint('tried', flush=True)\n"


@dataclass(frozen=True)
class Attack:
    """`ends`: the statuses that mean containment. A short wall limit where the program never ends by itself."""

    name: str
    program: str
    ends: frozenset[str]
    wall_s: float = 20.0
    stdin: str = ""


def _attack(name: str, program: str, ends: str = "ok", **more: object) -> Attack:
    return Attack(name, program, frozenset(ends.split()), **more)  # type: ignore[arg-type]


def _never(statement: str, errors: str = "OSError", head: str = _TRIED) -> str:
    return (
        f"{head}try:\n    {statement}\n    print('BREACH')\nexcept {errors} as error:\n    print(repr(error)[:200])\n"
    )


def _syscalls(*calls: str) -> str:
    """Raw system calls, each of which must answer -1."""
    lines = [f"r = libc.syscall({c})\nprint('BREACH' if r >= 0 else ctypes.get_errno(), {c!r})" for c in calls]
    return _LIBC + "\n".join(lines)


ATTACKS = [
    # The network.
    _attack("connects", _never("import socket; socket.create_connection(('127.0.0.1', @PORT@), 2).sendall(b'x')")),
    _attack("listens", _never("import socket; s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen()")),
    _attack("asks_dns", _never("import socket; socket.getaddrinfo('example.com', 80)")),
    _attack(
        "sends_datagrams",
        _never("import socket; socket.socket(2, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @PORT@))"),
    ),
    _attack("unix_socket", _never("import socket; s = socket.socket(socket.AF_UNIX); s.connect('@SOCKET@')")),
    _attack("abstract_socket", _never("import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0@ABSTRACT@')")),
    _attack("raw_socket_calls", _syscalls("41, 2, 1, 0", "41, 1, 1, 0", "41, 16, 3, 0", "53, 2, 1, 0, bytes(8)")),
    # Files.
    _attack("reads_passwd", _never("print(open('/etc/passwd').read())")),
    _attack("reads_secret_file", _never("print(open('@SECRET_FILE@').read())")),
    _attack(
        "reads_home",
        _TRIED + "for p in ('/root/.bashrc', '/root/.ssh', '/home', '/var/log'):\n"
        "    try:\n        print('BREACH', os.listdir(p) if os.path.isdir(p) else open(p).read())\n"
        "    except OSError: pass\n",
    ),
    _attack(
        "reads_environment",
        _TRIED + "print(dict(os.environ))\nimport ctypes\n"
        "print(ctypes.c_char_p.in_dll(ctypes.CDLL(None), 'environ') and '')\n",
    ),
    _attack("writes_usr", _never("open('/usr/lib/rollart-breach', 'w').write('x')")),
    _attack("writes_runtime", _never("open(os.__file__, 'a').write('')")),
    _attack("writes_outside", _never("open('@MARK@', 'w').write('x')")),
    _attack("truncates_secret", _never("os.truncate('@SECRET_FILE@', 0)")),
    _attack("chmods_secret", _never("os.chmod('@SECRET_FILE@', 0o777)")),
    _attack(
        "escapes_by_symlink",
        _TRIED + "os.symlink('@SECRET_FILE@', 'link')\nos.symlink('/', 'root')\n"
        "for p in ('link', 'root@SECRET_FILE@', '../../../../../..@SECRET_FILE@'):\n"
        "    try: print('BREACH', open(p).read())\n    except OSError: pass\n"
        "try: open('root@MARK@', 'w').write('BREACH')\nexcept OSError: pass\n",
    ),
    _attack("hard_links_secret", _never("os.link('@SECRET_FILE@', 'mine'); open('mine').read()")),
    _attack(
        "reads_proc_of_others",
        _TRIED + "for pid in ('1', 'self', str(os.getppid()), '@VICTIM@'):\n"
        "    for name in ('environ', 'mem', 'maps', 'root@SECRET_FILE@', 'cwd/../@SECRET_FILE@'):\n"
        "        try:\n            with open(f'/proc/{pid}/{name}', 'rb') as f: print('BREACH', f.read(100))\n"
        "        except OSError: pass\n",
    ),
    _attack("writes_supervisors_memory", _never("open(f'/proc/{os.getppid()}/mem', 'r+b')")),
    _attack(
        "opens_devices",
        _TRIED + "for p in ('mem', 'kmem', 'port', 'sda', 'vda', 'kvm', 'fuse', 'tty', 'ptmx', 'console'):\n"
        "    try: print('BREACH', p, os.open('/dev/' + p, os.O_RDWR))\n    except OSError: pass\n"
        "import stat\nfor kind in (stat.S_IFCHR, stat.S_IFBLK):\n"
        "    try: os.mknod('dev', 0o666 | kind, os.makedev(1, 1)); os.open('dev', os.O_RDWR); print('BREACH')\n"
        "    except OSError: pass\n",
    ),
    _attack(
        "uses_inherited_descriptors",
        _TRIED + "import struct, json\n"
        "body = json.dumps({'status': 'ok', 'stdout': 'BREACH', 'stderr': '', 'exit_code': 0, 'wall_s': 0,"
        " 'cpu_s': 0, 'max_rss_mb': 0, 'clean': True}).encode()\n"
        "for fd in range(3, 1024):\n    try:\n        os.write(fd, struct.pack('>I', len(body)) + body)\n"
        "        print('BREACH', fd)\n    except OSError: pass\n",
    ),
    # More time, memory, processes or disk than there is.
    _attack("fork_bomb", _TRIED + "while True:\n    try: os.fork()\n    except OSError: pass\n", "time", wall_s=2.0),
    _attack(
        "thread_bomb",
        _TRIED + "import threading, time\nn = 0\ntry:\n    while n < 5000:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\n"
        "    print('BREACH')\nexcept RuntimeError as e: print(e, n)\n",
    ),
    _attack("loops", _TRIED + "while True: pass\n", "time", wall_s=2.0),
    _attack(
        "burns_cpu_in_children",
        _TRIED + "try:\n    os.fork(); os.fork()\nexcept OSError: pass\nwhile True: pass\n",
        "time",
        wall_s=2.0,
    ),
    _attack("sleeps", _TRIED + "import time\ntime.sleep(600)\n", "time", wall_s=2.0),
    _attack("stops_itself", _TRIED + "import signal\nos.kill(os.getpid(), signal.SIGSTOP)\n", "time", wall_s=2.0),
    _attack(
        "ignores_signals",
        _TRIED + "import signal\nfor n in range(1, 65):\n"
        "    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass\n",
        "time",
        wall_s=2.0,
    ),
    _attack(
        "endless_exit_handler",
        _TRIED + "import atexit\n@atexit.register\ndef f():\n    while True: pass\n",
        "time",
        wall_s=2.0,
    ),
    _attack("floods_output", _TRIED + "while True: print('x' * 10000)\n", "output"),
    _attack("floods_errors", _TRIED + "while True: os.write(2, b'x' * 65536)\n", "output"),
    _attack(
        "floods_from_a_child",
        _TRIED + "try: pid = os.fork()\nexcept OSError: pid = 0\n"
        "while True:\n    os.write(1, b'x' * 65536) if not pid else os.wait()\n",
        "output exit",
    ),
    _attack("allocates_a_gibibyte", _never("x = bytearray(1 << 30)", "MemoryError")),
    _attack("allocates_and_dies", _TRIED + "x = []\nwhile True: x.append(bytearray(1 << 20))\n", "memory"),
    _attack("fills_the_disk", _never("f = open('big', 'wb')\n    while True: f.write(bytes(1 << 20))"), "ok output"),
    _attack(
        "fills_the_disk_in_pieces",
        _TRIED + "import signal\nn = 0\ntry:\n    while n < 500:\n"
        "        open(f'big{n}', 'wb').write(bytes(1 << 20)); n += 1\n    print('BREACH')\n"
        "except OSError as e: print(e, n)\n",
        "ok output",
    ),
    _attack(
        "makes_many_files",
        _TRIED + "n = 0\ntry:\n    while n < 30000: open(f'f{n}', 'w').close(); n += 1\n"
        "except OSError as e: print(e)\n",
        "ok time output",
    ),
    _attack("nests_directories", _TRIED + "for n in range(3000): os.mkdir('d'); os.chdir('d')\n", "ok output"),
    _attack("locks_directories", _TRIED + "os.makedirs('a/b/c')\ntry: os.chmod('a/b', 0)\nexcept OSError: pass\n"),
    _attack("opens_many_files", _never("x = [open('/dev/null') for _ in range(5000)]")),
    _attack(
        "pipes_deadlock",
        _TRIED + "sys.stdout.write('y' * 500_000)\nsys.stdout.flush()\nprint(len(sys.stdin.read()))\n",
        stdin="z" * 3_000_000,
    ),
    _attack("never_reads_stdin", _TRIED, stdin="z" * 3_000_000),
    _attack(
        "huge_traceback",
        _TRIED + "def f(n):\n    f(n + 1)\ntry: f(0)\nexcept RecursionError:\n    raise ValueError('x' * 30_000_000)\n",
        "output exit",
    ),
    _attack(
        "chained_exceptions",
        _TRIED + "e = None\nfor n in range(2000):\n    try:\n        raise ValueError(n) from e\n"
        "    except ValueError as caught: e = caught\nraise e\n",
        "exit signal",
    ),
    _attack("breaks_the_parser", _TRIED + "eval('(' * 5000 + ')' * 5000)\n", "exit"),
    # Processes that outlive it, and the processes of others.
    _attack(
        "daemon_in_a_session",
        _TRIED + "import time\ntry:\n    if os.fork() == 0:\n        os.setsid()\n"
        "        time.sleep(600)\nexcept OSError: pass\n",
    ),
    _attack(
        "orphan_by_double_fork",
        _TRIED + "import time\ntry:\n    if os.fork() == 0:\n        if os.fork() == 0:\n"
        "            os.setsid()\n            time.sleep(600)\n        os._exit(0)\nexcept OSError: pass\n",
    ),
    _attack(
        "leaves_a_shell_behind",
        _TRIED + "import subprocess\ntry:\n"
        "    subprocess.Popen(['/bin/sleep', '600'], start_new_session=True)\nexcept OSError: pass\n",
    ),
    _attack("kills_everybody", _TRIED + "try: os.kill(-1, 9)\nexcept OSError: pass\n", "ok signal killed"),
    _attack(
        "kills_its_parent",
        _TRIED + "import time\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass\ntime.sleep(.2)\n",
        "ok signal killed",
    ),
    _attack(
        "kills_process_1",
        _TRIED + "for n in (9, 15, 2, 1, 17):\n    try: os.kill(1, n)\n    except OSError: pass\n",
        "ok killed",
    ),
    _attack("kills_a_neighbour", _TRIED + "try: os.kill(@VICTIM@, 9)\nexcept OSError: pass\n"),
    _attack("kills_its_group", _TRIED + "try: os.killpg(0, 9)\nexcept OSError: pass\n", "ok signal"),
    _attack(
        "traces_its_parent",
        _LIBC + "for pid in (os.getppid(), 1, @VICTIM@):\n    for request in (16, 0x4206):\n"
        "        print('BREACH' if libc.ptrace(request, pid, None, None) == 0 else 'no')\n",
    ),
    _attack(
        "reads_memory_of_others", _syscalls("310, os.getppid(), 0, 0, 0, 0, 0", "311, os.getppid(), 0, 0, 0, 0, 0")
    ),
    _attack(
        "limits_its_parent",
        _TRIED + "import resource\nfor which in (resource.RLIMIT_CPU, resource.RLIMIT_NPROC):\n"
        "    try: resource.prlimit(os.getppid(), which, (0, 0)); print('BREACH')\n    except OSError: pass\n",
    ),
    _attack(
        "raises_its_limits",
        _never("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "(OSError, ValueError)"),
    ),
    _attack("slows_its_parent", _never("os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)")),
    # Privileges and the kernel.
    _attack("becomes_root", _never("os.setuid(0) if os.getuid() else os.chroot('.'); os.open('/etc/shadow', 0)")),
    _attack(
        "uses_capabilities",
        _LIBC + "import struct\nhead = ctypes.create_string_buffer(struct.pack('=Ii', 0x20080522, 0))\n"
        "data = ctypes.create_string_buffer(24)\nassert libc.syscall(125, head, data) == 0\n"
        "print('BREACH' if any(data.raw) else 'none')\n",
    ),
    _attack(
        "unshares",
        _LIBC + "for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000):\n"
        "    print('BREACH' if libc.unshare(flag) == 0 else 'no')\n",
    ),
    _attack(
        "mounts",
        _LIBC + "for kind in (b'proc', b'tmpfs', b'sysfs'):\n"
        "    print('BREACH' if libc.mount(b'none', b'/tmp', kind, 0, None) == 0 else 'no')\n",
    ),
    _attack(
        "new_kernel_calls",
        _syscalls(
            "435, bytes(88), 88",
            "425, 8, bytes(120)",
            "321, 0, bytes(64), 64",
            "323, 0",
            "442, -100, b'/', 0, bytes(32), 32",
            "428, -100, b'/', 1",
            "438, 3, 0, 0",
            "298, bytes(64), 0, -1, -1, 0",
            "319, b'x', 0",
            "999, 0",
        ),
    ),
    _attack("clone_into_namespace", _syscalls("56, 0x10000000 | 17, 0, 0, 0, 0")),
    _attack("x32_calls", _syscalls("0x40000000 + 39", "0x40000000 + 41, 2, 1, 0")),
    _attack(
        "i386_calls",
        _LIBC + "import mmap\ncode = bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3])\n"
        "page = mmap.mmap(-1, 4096, prot=7)\npage.write(code)\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))\n"
        "print('BREACH', f())\n",
        "signal",
    ),
    _attack("keys", _syscalls("248, b'user', b'breach', b'x', 1, -3", "250, 0, -3, 1")),
    _attack(
        "lasting_shared_memory",
        _syscalls(
            "29, 4242, 4096, 0o1666", "64, 4242, 1, 0o1666", "68, 4242, 0o1666", "240, b'breach', 0o102, 0o600, 0"
        ),
    ),
    # Its own end.
    _attack("segfault", _LIBC + "ctypes.string_at(0)\n", "signal"),
    _attack("leaves_at_once", _TRIED + "os._exit(3)\n", "exit"),
    _attack("aborts", _TRIED + "os.abort()\n", "signal"),
    _attack(
        "overflows_the_stack",
        _TRIED + "import sys\nsys.setrecursionlimit(10**8)\ndef f(x): return [f(x)]\nf(0)\n"
        "class A:\n    def __getattr__(self, n): return getattr(self, n)\nA().x\n",
        "signal exit memory time",
        wall_s=5.0,
    ),
    _attack(
        "replaces_the_streams",
        _TRIED + "sys.stdout.close(); sys.stderr.close(); os.close(1); os.close(2)\nraise ValueError\n",
        "exit",
    ),
    _attack(
        "poisons_the_runner",
        _TRIED + "import builtins, traceback, threading, gc\nfor o in gc.get_objects():\n"
        "    if type(o).__name__ == 'Zygote': print('BREACH' if o._channel.fileno() == 0 else 'no')\n"
        "os._exit = sys.exit = lambda *a: None\nbuiltins.open = None\nraise KeyError\n",
        "exit time",
        wall_s=2.0,
    ),
]
