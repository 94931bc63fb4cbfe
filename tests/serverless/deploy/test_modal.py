"""Deploying to Modal: the real client against the test plane, containers of the real runtime."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from serverless.deploy.modal_app import ModalDeployer
from serverless.deploy.package import Package, build
from serverless.errors import BackendFailed, CredentialsMissing, PackageError, SpecInvalid, UnknownFunction
from serverless.providers import modal_client
from serverless.providers.modal import ModalBackend
from serverless.providers.modal_client import DeploymentTags, ModalSettings, call_pinned, pin
from serverless.secrets import Secrets, SecretSource
from serverless.spec import FunctionSpec
from serverless.types import Cause, FaultKind
from serverless.wire import encode
from tests.serverless.deploy.wheels import write_wheel
from tests.serverless.modal_plane.provider import MISSING, PlaneProcess, running_plane
from tests.serverless.support import Books, item, until
from tests.serverless.support import package as behaving

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

LONG_S = 60.0


@pytest.fixture(scope="module")
def plane() -> Iterator[PlaneProcess]:
    with running_plane() as one:
        yield one


def scoring(directory: pathlib.Path, value: str, **settings: Any) -> Package:
    """A function `f` that scores everything with `value`, an expression."""
    (directory / "f.py").write_text(
        f"def f(items):\n    return [{{'id': i['id'], 'aggregate_reward_score': {value}}} for i in items]\n"
    )
    return build(FunctionSpec(name="f", source="f.py", handler="f", takes="items", **settings), base=directory)


@contextlib.asynccontextmanager
async def both(
    plane: PlaneProcess, *, keep: int = 5, meter: Books | None = None
) -> AsyncIterator[tuple[ModalDeployer, ModalBackend, str]]:
    """A deployer and a backend with their own prefix; their deployments are deleted afterwards."""
    settings = ModalSettings(prefix=plane.prefix(), keep=keep)
    async with ModalDeployer(settings, meter=meter) as deployer, ModalBackend(settings, run="lake-1") as backend:
        try:
            yield deployer, backend, settings.prefix
        finally:
            for function in {one.function for one in await deployer.functions()}:
                await deployer.delete(function)


async def score(backend: ModalBackend, function: str = "f") -> Any:
    reply = await backend.invoke(function, [encode(item())], deadline_s=LONG_S)
    assert reply.fault is None, reply.fault
    assert isinstance(reply.body, list)
    return reply.body[0]["aggregate_reward_score"]


def published(plane: PlaneProcess) -> int:
    return int(plane.state()["requests"].get("AppPublish", 0))


def test_a_deployment_is_tried_listed_and_called(plane: PlaneProcess) -> None:
    books = Books()

    async def main() -> None:
        one = behaving(memory_mb=256, timeout_s=2.5, concurrency=3)
        async with both(plane, meter=books) as (deployer, backend, prefix):
            assert "create app" in (await deployer.plan(one)).lines[0]
            made = await deployer.deploy(one)
            assert (made.function, made.provider, made.version) == ("behave", "modal", one.version)
            assert (made.provider_version, made.current, made.memory_mb, made.concurrency) == ("1", True, 256, 3)
            assert made.endpoint == f"{prefix}behave@1"
            assert made.created
            assert list(await deployer.functions()) == list(await deployer.versions("behave")) == [made]
            assert await score(backend, "behave") == 1.0
            on_modal = plane.pool(f"{prefix}behave")
            assert (on_modal["memory_mb"], on_modal["memory_mb_max"], on_modal["timeout_secs"]) == (256, 256, 3)
            assert (on_modal["restricted"], on_modal["retries"], on_modal["concurrent"]) == (True, 0, 0)
            assert (on_modal["block_network"], on_modal["single_use"]) == (False, False)

    asyncio.run(main())
    (trial,) = books.invocations
    assert (trial.cause, trial.items, trial.status) == (Cause.SMOKE, 0, "ok")
    assert trial.cold_start_s > 0.0
    assert trial.billed_s >= trial.cold_start_s


def test_an_image_is_that_of_the_function(
    plane: PlaneProcess, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The definitions that the real client sends; the plane builds no image."""
    (tmp_path / "Dockerfile").write_text("FROM python:3.11-slim\nCOPY table.txt /data/\n")
    (tmp_path / "table.txt").write_text("1")
    write_wheel(tmp_path / "index", "tiny_reward", "1.5", "")
    monkeypatch.setenv("UV_DEFAULT_INDEX", (tmp_path / "index").as_uri())
    monkeypatch.setenv("UV_INDEX", "")
    index = (tmp_path / "index").as_uri()
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"base": "python:3.12", "system": ["libgl1"]}, ("FROM python:3.12", "libgl1")),
        ({"dockerfile": "Dockerfile"}, ("FROM python:3.11-slim", "COPY table.txt /data/")),
    ]

    async def main() -> None:
        async with both(plane) as (deployer, _, prefix):
            for image, expected in cases:
                one = scoring(
                    tmp_path, "1.0", image=image, requirements=("tiny-reward==1.5",), index_urls=(index,), gpu="L4"
                )
                planned = " ".join((await deployer.plan(one)).lines)
                assert "build its image" in planned
                assert "on a GPU of type L4" in planned
                await deployer.deploy(one)
                sent = plane.pool(f"{prefix}f")["layers"]
                assert any(f"--extra-index-url {index} --index-strategy unsafe-best-match" in line for line in sent)
                assert all(any(text in line for line in sent) for text in expected)

    asyncio.run(main())


def test_needs_become_modals_settings(plane: PlaneProcess, tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        one = scoring(
            tmp_path, "1.0", gpu="L4", cpu=2.0, trust="untrusted", requirements=("pytest==8.3.0",), warm=1, timeout_s=20
        )
        async with both(plane) as (deployer, backend, prefix):
            made = await deployer.deploy(one)
            on_modal = plane.pool(f"{prefix}f")
            assert (on_modal["gpu"], on_modal["milli_cpu"]) == ("L4", 2000)
            assert (on_modal["block_network"], on_modal["single_use"], on_modal["restricted"]) == (True, True, True)
            assert any("pytest==8.3.0" in line for line in on_modal["image"])
            assert made.warm == 1
            workers = set()
            for _ in range(2):
                reply = await backend.invoke("f", [encode(item())], deadline_s=LONG_S)
                assert reply.fault is None
                assert reply.invocation is not None
                workers.add(reply.invocation.worker)
            assert len(workers) == 2

    asyncio.run(main())


def test_a_look_that_fails_after_the_version_is_live_is_no_failed_deployment(
    plane: PlaneProcess, tmp_path: pathlib.Path
) -> None:
    async def main() -> None:
        async with both(plane) as (deployer, _, _):
            plane.fail("FunctionGetSchedulingParams", "INVALID_ARGUMENT", "no settings")
            first = await deployer.deploy(scoring(tmp_path, "1.0"))
            assert (first.current, first.warm) == (True, None)
            assert "no settings" in first.problem

    asyncio.run(main())


def test_the_same_digest_again_is_no_deployment(plane: PlaneProcess, tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with both(plane) as (deployer, backend, _):
            first = await deployer.deploy(scoring(tmp_path, "1.0"))
            before = published(plane)
            assert not (await deployer.plan(scoring(tmp_path, "1.0"))).lines
            assert await deployer.deploy(scoring(tmp_path, "1.0")) == first
            await backend.deploy(scoring(tmp_path, "1.0"))
            wider = scoring(tmp_path, "1.0", concurrency=9, keep_alive_s=30)
            assert (await deployer.plan(wider)).lines == ("max_containers -> 9", "scaledown_window -> 30")
            assert (await deployer.deploy(wider)).concurrency == 9
            assert not (await deployer.plan(wider)).lines
            assert published(plane) == before

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "why"), [("1/0", "ZeroDivisionError"), ("return 5", "answered 5"), ("import nothing_here", "nothing_here")]
)
def test_a_version_that_fails_its_trial_is_never_live(
    plane: PlaneProcess, tmp_path: pathlib.Path, body: str, why: str
) -> None:
    (tmp_path / "bad.py").write_text(f"def f(items):\n    {body}\n    return []\n")
    bad = build(
        FunctionSpec(name="f", source="bad.py", handler="f", takes="items", warm=1, keep_alive_s=2), base=tmp_path
    )

    async def main() -> None:
        async with both(plane) as (deployer, backend, prefix):
            with pytest.raises(BackendFailed, match=f"failed its trial: .*{why}"):
                await deployer.deploy(bad)
            assert list(await deployer.functions()) == []
            with pytest.raises(UnknownFunction, match="deployed: none"):
                await backend.invoke("f", [], deadline_s=LONG_S)
            good = await deployer.deploy(scoring(tmp_path, "1.0"))
            with pytest.raises(BackendFailed, match="failed its trial"):
                await deployer.deploy(bad)
            assert list(await deployer.functions()) == [good]
            assert await score(backend) == 1.0
            failed = plane.pool(f"{prefix}f")
            assert failed["version"] == 2
            await until(lambda: not plane.pool(f"{prefix}f")["containers"], LONG_S)

    asyncio.run(main())


def test_another_source_of_a_secret_is_another_deployment(plane: PlaneProcess, tmp_path: pathlib.Path) -> None:
    """Containers have the `modal.Secret` of their deployment, and the package's version does not name it."""
    one = scoring(tmp_path, "float(__import__('os').environ['JUDGE_KEY'])", secrets=("JUDGE_KEY",))
    prefix = plane.prefix()

    def deployer(source: str) -> ModalDeployer:
        secrets = Secrets({"JUDGE_KEY": SecretSource(modal=source)})
        return ModalDeployer(ModalSettings(prefix=prefix), secrets=secrets)

    async def main() -> None:
        import modal

        async with (
            deployer("judge") as first,
            deployer("judge2") as second,
            ModalBackend(ModalSettings(prefix=prefix)) as backend,
        ):
            for name, value in (("judge", "1.5"), ("judge2", "2.5")):
                client = first.namespace.client
                await modal.Secret.objects.create.aio(name, {"JUDGE_KEY": value}, client=client)
            await first.deploy(one)
            assert await score(backend) == 1.5
            assert (await first.deploy(one)).unchanged
            assert not (await first.plan(one)).lines
            assert (await second.plan(one)).lines == ("modal.Secrets: other ones -> judge2",)
            made = await second.deploy(one)
            assert (made.unchanged, made.provider_version) == (False, "2")
            await backend.attach("f", "2")
            assert await score(backend) == 2.5
            assert not (await second.plan(one)).lines
            before = published(plane)
            assert (await first.deploy(one)).provider_version == "1", "the first one is kept"
            assert published(plane) == before
            await first.delete("f")

    asyncio.run(main())


def test_a_rollback_during_a_build_is_not_undone(plane: PlaneProcess, tmp_path: pathlib.Path) -> None:
    def images() -> int:
        return int(plane.state()["requests"].get("ImageGetOrCreate", 0))

    async def main() -> None:
        async with both(plane) as (deployer, _, prefix), ModalDeployer(ModalSettings(prefix=prefix)) as other:
            one = await deployer.deploy(scoring(tmp_path, "1.0"))
            await deployer.deploy(scoring(tmp_path, "2.0"))
            requests = images()
            with plane.held("ImageGetOrCreate"):
                third = asyncio.create_task(deployer.deploy(scoring(tmp_path, "3.0"), canary=0.5))
                await until(lambda: images() > requests, LONG_S)
                assert (await other.rollback("f")).version == one.version
            made = await third
            assert [v.version for v in await deployer.functions()] == [one.version, made.version]

    asyncio.run(main())


def test_versions_are_pinned_rolled_back_and_pruned(plane: PlaneProcess, tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with both(plane, keep=1) as (deployer, backend, prefix):
            one = await deployer.deploy(scoring(tmp_path, "1.0"))
            assert await score(backend) == 1.0
            two = await deployer.deploy(scoring(tmp_path, "2.0"))
            assert await score(backend) == 1.0  # a run goes on with the version that it began with
            async with ModalBackend(ModalSettings(prefix=prefix)) as later:
                assert await score(later) == 2.0
            with pytest.raises(UnknownFunction, match="has no version 'ffffffffffff'"):
                await deployer.rollback("f", "ffffffffffff")

            before = published(plane)
            back = await deployer.rollback("f")
            assert (back.version, back.provider_version, back.current) == (one.version, "1", True)
            assert [v.current for v in await deployer.versions("f")] == [False, True]
            with pytest.raises(UnknownFunction, match="has no version before"):
                await deployer.rollback("f")
            assert "kept, no upload" in (await deployer.plan(scoring(tmp_path, "2.0"))).lines[0]
            assert (await deployer.deploy(scoring(tmp_path, "2.0"))).version == two.version
            assert published(plane) == before
            await backend.deploy(scoring(tmp_path, "2.0"))
            assert await score(backend) == 2.0

            await backend.deploy(scoring(tmp_path, "3.0"))
            assert await score(backend) == 3.0
            assert [v.provider_version for v in await deployer.versions("f")] == ["3", "2"]

    asyncio.run(main())


def test_a_run_calls_its_own_version_though_another_was_deployed_before_its_first_call(
    plane: PlaneProcess, tmp_path: pathlib.Path
) -> None:
    """And an answer of another version than was called is a fault, which can be tried again."""

    async def main() -> None:
        async with both(plane) as (deployer, a, prefix), ModalBackend(ModalSettings(prefix=prefix)) as b:
            ours = scoring(tmp_path, "1.0")
            await a.deploy(ours)
            await b.deploy(scoring(tmp_path, "-7.0"))
            await deployer.deploy(scoring(tmp_path, "0.5"))
            assert (await score(a), await score(b)) == (1.0, -7.0)
            target = await pin(deployer.namespace, "f", 2, ours.version)
            answered = await call_pinned(target, [encode(item())], "1")
            assert answered.body is None
            assert answered.fault is not None
            assert (answered.fault.kind, answered.fault.retryable) == (FaultKind.BAD_ANSWER, True)
            assert "was called, but" in answered.fault.detail

    asyncio.run(main())


def test_warmth_moves_with_the_live_version(plane: PlaneProcess, tmp_path: pathlib.Path) -> None:
    def containers(prefix: str, version: int) -> int:
        return len(plane.pool(f"{prefix}f", version)["containers"])

    async def main() -> None:
        settings: dict[str, Any] = {"warm": 1, "keep_alive_s": 2}
        async with both(plane) as (deployer, _, prefix):
            await deployer.deploy(scoring(tmp_path, "1.0", **settings))
            await deployer.deploy(scoring(tmp_path, "2.0", **settings))
            await until(lambda: (containers(prefix, 1), containers(prefix, 2)) == (0, 1), LONG_S)
            assert (await deployer.rollback("f")).warm == 1
            await until(lambda: (containers(prefix, 1), containers(prefix, 2)) == (1, 0), LONG_S)

    asyncio.run(main())


def test_it_scales_to_zero_and_back(plane: PlaneProcess, tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with both(plane) as (deployer, backend, prefix):
            await deployer.deploy(scoring(tmp_path, "1.0", keep_alive_s=0))
            await until(lambda: not plane.pool(f"{prefix}f")["containers"], LONG_S)
            reply = await backend.invoke("f", [encode(item())], deadline_s=LONG_S)
            assert reply.fault is None
            assert reply.invocation is not None
            assert reply.invocation.cold_start_s > 0.0
            again = await backend.invoke("f", [encode(item())], deadline_s=LONG_S)
            assert again.invocation is not None
            assert (again.invocation.worker, again.invocation.cold_start_s) == (reply.invocation.worker, 0.0)

            scaled = await deployer.scale("f", warm=2, concurrency=5)
            assert (scaled.warm, scaled.concurrency) == (2, 5)
            await until(lambda: len(plane.pool(f"{prefix}f")["containers"]) == 2, LONG_S)
            again_deployed = await deployer.deploy(scoring(tmp_path, "2.0", keep_alive_s=2))
            assert (again_deployed.warm, again_deployed.concurrency) == (2, 5)
            assert (await deployer.deploy(scoring(tmp_path, "2.0", keep_alive_s=2, concurrency=3))).concurrency == 3
            assert (await deployer.scale("f", warm=0)).concurrency == 3
            await until(lambda: not plane.pool(f"{prefix}f")["containers"], LONG_S)
            with pytest.raises(SpecInvalid, match="not less than"):
                await deployer.scale("f", warm=-1)

    asyncio.run(main())


def test_logs_are_what_the_function_printed(plane: PlaneProcess, tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with both(plane) as (deployer, backend, _):
            await deployer.deploy(scoring(tmp_path, "print('said', i['id'], flush=True) or 1.0"))
            for n in range(3):
                await backend.invoke("f", [encode(item(f"item-{n}"))], deadline_s=LONG_S)

            async def said() -> list[str]:
                return [line.text for line in await deployer.logs("f") if "said" in line.text]

            async with asyncio.timeout(LONG_S):
                while len(await said()) < 3:
                    await asyncio.sleep(0.05)
            assert await said() == [f"said item-{n}" for n in range(3)]
            last = (await deployer.logs("f", limit=1))[0]
            assert (last.text, last.source, last.run, last.items) == ("said item-2", "stdout", "lake-1", ("item-2",))
            assert last.t.endswith("+00:00")
            followed = []
            async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
                async for line in deployer.follow("f", since_s=3600.0):
                    if "said" in line.text:
                        followed.append((line.text, line.items))
                        if line.text == "said item-2":
                            event = [encode(item(key)) for key in ("x", "y")]
                            group.create_task(backend.invoke("f", event, deadline_s=LONG_S))
                    if line.text == "said y":
                        break
            assert followed == [
                *[(f"said item-{n}", (f"item-{n}",)) for n in range(3)],
                *[(f"said {key}", ("x", "y")) for key in ("x", "y")],
            ]

    asyncio.run(main())


def test_what_is_deleted_is_unknown(plane: PlaneProcess, tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with both(plane) as (deployer, _, _):
            await deployer.deploy(scoring(tmp_path, "1.0"))
            await deployer.delete("f")
            for asked in (deployer.delete, deployer.versions, deployer.logs, deployer.rollback, deployer.scale):
                with pytest.raises(UnknownFunction, match="deployed: none"):
                    await asked("f")
            assert (await deployer.deploy(scoring(tmp_path, "2.0"))).provider_version == "1"

    asyncio.run(main())


def test_what_cannot_be_deployed_is_refused_before_anything_happens(
    plane: PlaneProcess, tmp_path: pathlib.Path
) -> None:
    async def main() -> None:
        async with both(plane) as (deployer, _, _):
            before = published(plane)
            with pytest.raises(PackageError, match="no-such-thing-at-all"):
                await deployer.deploy(scoring(tmp_path, "1.0", requirements=("no-such-thing-at-all",)))
            with pytest.raises(SpecInvalid, match="at most 63"):
                await deployer.deploy(behaving(name="x" * 64))
            assert published(plane) == before

    asyncio.run(main())


def test_the_workspaces_prices_are_read(plane: PlaneProcess) -> None:
    async def main() -> None:
        async with both(plane) as (deployer, _, _):
            rates = await deployer.rates()
            assert all(price > 0 for price in rates.values())
            assert len(rates) == 3

    asyncio.run(main())


def test_a_wrong_token_is_refused_with_the_remedy(plane: PlaneProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-wrong")

    async def main() -> None:
        async with ModalDeployer():
            pass

    with pytest.raises(CredentialsMissing, match=r"unknown.*modal token new"):
        asyncio.run(main())


def test_no_token_is_refused_with_the_remedy(tmp_path: pathlib.Path) -> None:
    """In a process of its own: Modal reads its file of profiles when it is imported."""
    code = (
        "import asyncio\n"
        "from serverless.providers.modal import ModalBackend\n"
        "async def main():\n"
        "    async with ModalBackend():\n"
        "        pass\n"
        "asyncio.run(main())\n"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MODAL_")}
    environ |= {"MODAL_CONFIG_PATH": str(tmp_path / "none.toml"), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "CredentialsMissing: Modal knows no token (set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET" in done.stderr


def test_a_server_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, plane: PlaneProcess) -> None:
    import socket

    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MODAL_SERVER_URL", f"http://127.0.0.1:{unheard.getsockname()[1]}")
        monkeypatch.setattr(modal_client, "CONNECT_S", 1.0)

        async def main() -> None:
            async with ModalDeployer():
                pass

        with pytest.raises(BackendFailed, match="does not answer within 1 s"):
            asyncio.run(main())


def test_importing_the_modules_loads_no_modal() -> None:
    code = (
        "import sys, serverless.providers.modal, serverless.deploy.modal_app, serverless.deploy.modal_entry\n"
        "assert not {'modal', 'grpclib', 'rollart_handler'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_tags_say_which_deployment_is_which() -> None:
    digest = "ab" * 32
    first = DeploymentTags(other={"team": "rl"}).added(1, digest, 10.0, keep=1)
    third = first.added(2, "cd" * 32, 20.0, keep=1).added(3, "ef" * 32, 30.9, keep=1)
    assert DeploymentTags.read(third.tags()) == DeploymentTags(
        3, {3: "ef" * 32, 2: "cd" * 32}, {3: 30, 2: 20}, {"team": "rl"}
    )
    assert all(len(text) <= 63 for pair in third.tags().items() for text in pair)
    sourced = DeploymentTags().added(4, "ab" * 32, 40.0, keep=1, secrets="0f" * 16)
    assert DeploymentTags.read(sourced.tags()) == sourced
    assert (sourced.matching("ab" * 32, "0f" * 16), sourced.matching("ab" * 32, "")) == ([4], [])
    assert "rollart-s4" not in sourced.added(5, digest, 50.0, keep=0).tags()
    assert DeploymentTags.read({"rollart-live": "7", "rollart-vx": "?", "rollart-v2": "not base64 !"}).live == 0
