"""Deployments to AWS Lambda with the real boto3 over HTTP; new versions run before they are current."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from serverless.deploy.aws import AwsDeployer
from serverless.errors import BackendFailed, CredentialsMissing, SpecInvalid, UnknownFunction
from serverless.providers.aws import AwsLambdaBackend
from serverless.secrets import Secrets, SecretSource
from serverless.types import Cause
from serverless.wire import encode
from tests.serverless.aws.provider import MISSING, archive, at, client, environment, settings
from tests.serverless.aws.provider import plane as new_plane
from tests.serverless.support import Books, item, package, until

if TYPE_CHECKING:
    from tests.serverless.aws.plane import Plane

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")]


@pytest.fixture
def plane() -> Iterator[Plane]:
    with new_plane() as one:
        yield one


@contextlib.asynccontextmanager
async def deployer(plane: Plane, **changes: Any) -> AsyncIterator[AwsDeployer]:
    async with AwsDeployer(settings(plane, **changes)) as one:
        yield one


def test_a_function_is_deployed_whole(plane: Plane) -> None:
    books = Books()
    one = package(memory_mb=256)

    async def main() -> Any:
        async with AwsDeployer(settings(plane), meter=books) as aws:
            planned = await aws.plan(one)
            return planned, await aws.deploy(one), list(await aws.functions())

    planned, deployed, listed = asyncio.run(main())
    assert planned.lines
    assert "create the Lambda function rollart-behave" in planned.lines[0]
    assert (deployed.function, deployed.version, deployed.provider_version) == ("behave", one.version, "1")
    assert (deployed.current, deployed.memory_mb, listed) == (True, 256, [deployed])
    assert deployed.endpoint.endswith(":function:rollart-behave:live")
    found = client(plane).get_function(FunctionName="rollart-behave", Qualifier="live")
    assert found["Configuration"]["Timeout"] == 5
    assert found["Tags"]["rollart:digest"] == one.version
    groups = client(plane, "logs").describe_log_groups()["logGroups"]
    assert [(g["logGroupName"], g["retentionInDays"]) for g in groups] == [("/aws/lambda/rollart-behave", 14)]
    policy = client(plane, "iam").get_role_policy(RoleName="rollart-functions", PolicyName="own-logs")
    (statement,) = policy["PolicyDocument"]["Statement"]
    assert statement["Action"] == ["logs:CreateLogStream", "logs:PutLogEvents"]
    assert all("/aws/lambda/rollart-*" in resource for resource in statement["Resource"])
    assert [(i.cause, i.items) for i in books.invocations] == [(Cause.SMOKE, 0)]
    assert sum(i.billed_s for i in books.invocations) == pytest.approx(plane.billed_s())


def test_the_same_again_changes_nothing(plane: Plane) -> None:
    async def main() -> Any:
        async with deployer(plane) as aws:
            first = await aws.deploy(package())
            before = dict(plane.calls), sum(plane.executions.values())
            planned = await aws.plan(package())
            return first, await aws.deploy(package()), planned, before

    first, again, planned, (calls, executions) = asyncio.run(main())
    assert again == first
    assert not planned.lines
    changing = {call: n for call, n in plane.calls.items() if not call.startswith("GET")}
    assert changing == {call: n for call, n in calls.items() if not call.startswith("GET")}
    assert sum(plane.executions.values()) == executions


def test_a_change_is_a_new_version_and_the_alias_moves(plane: Plane) -> None:
    async def main() -> Any:
        async with deployer(plane) as aws:
            await aws.deploy(package())
            planned = await aws.plan(package(memory_mb=256, timeout_s=7.0))
            await aws.deploy(package(memory_mb=256, timeout_s=7.0))
            return planned, list(await aws.versions("behave"))

    planned, versions = asyncio.run(main())
    assert planned.lines[1:] == ("memory_mb: 128 -> 256", "timeout_s: 5.0 -> 7.0")
    assert [(v.provider_version, v.current, v.memory_mb) for v in versions] == [("2", True, 256), ("1", False, 128)]


def test_settings_that_only_we_read_are_a_version_too(plane: Plane) -> None:
    """Lambda sees no difference between these two; the digest does, and must become current."""

    async def main() -> Any:
        async with deployer(plane) as aws:
            await aws.deploy(package())
            return await aws.deploy(package(deterministic=False))

    assert asyncio.run(main()).version == package(deterministic=False).version


def test_rollback_and_forward_again(plane: Plane) -> None:
    packages = [package(memory_mb=mb) for mb in (128, 256, 384)]

    async def main() -> Any:
        async with deployer(plane) as aws:
            for one in packages:
                await aws.deploy(one)
            back = await aws.rollback("behave")
            first = await aws.rollback("behave", packages[0].version[:12])
            with pytest.raises(UnknownFunction, match="has no version before"):
                await aws.rollback("behave")
            with pytest.raises(UnknownFunction, match="has no version 'ffff'"):
                await aws.rollback("behave", "ffff")
            uploads = plane.calls["PUT /code"]
            forward = await aws.deploy(packages[2])
            return back, first, forward, plane.calls["PUT /code"] - uploads

    back, first, forward, uploads = asyncio.run(main())
    assert [d.version for d in (back, first, forward)] == [packages[n].version for n in (1, 0, 2)]
    assert forward.provider_version == "3"
    assert uploads == 0, "the version is still there: only the alias moves"


@pytest.mark.parametrize("source", ["broken", "lambdas:grumpy"])
def test_a_version_that_does_not_work_never_becomes_current(plane: Plane, source: str, tmp_path: pathlib.Path) -> None:
    good, bad = package(name="f"), _broken(source, tmp_path)

    async def main() -> Any:
        async with deployer(plane) as aws:
            await aws.deploy(good)
            with pytest.raises(BackendFailed, match="does not work") as failure:
                await aws.deploy(bad)
            return str(failure.value), list(await aws.versions("f")), await aws.plan(good)

    message, versions, planned = asyncio.run(main())
    assert ("no_such_module" if source == "broken" else "not with a list") in message
    assert [(v.version, v.current) for v in versions] == [(good.version, True)]
    assert not planned.lines


def test_a_first_version_that_does_not_work_leaves_nothing(plane: Plane, tmp_path: pathlib.Path) -> None:
    async def main() -> Any:
        async with deployer(plane) as aws:
            with pytest.raises(BackendFailed, match="no_such_module"):
                await aws.deploy(_broken("broken", tmp_path))
            return list(await aws.functions())

    assert asyncio.run(main()) == []
    assert client(plane).list_functions()["Functions"] == []


def test_old_versions_are_pruned_and_their_numbers_not_used_again(plane: Plane) -> None:
    async def main() -> Any:
        async with deployer(plane, keep_versions=2) as aws:
            for mb in (128, 192, 256, 320):
                await aws.deploy(package(memory_mb=mb))
            return [(v.provider_version, v.memory_mb) for v in await aws.versions("behave")]

    assert asyncio.run(main()) == [("4", 320), ("3", 256)]


def test_an_update_that_takes_time_is_waited_for(plane: Plane) -> None:
    """Between code, configuration and version Lambda refuses changes (ResourceConflictException) until it is done."""

    async def main() -> Any:
        async with deployer(plane) as aws:
            await aws.deploy(package())
            plane.polls = 1
            return await aws.deploy(package(memory_mb=256))

    assert asyncio.run(main()).memory_mb == 256


def test_a_cancelled_deployment_ends_and_the_next_one_completes_it(plane: Plane) -> None:
    from tests.serverless.aws.plane import refusal

    message = "The role defined for the function cannot be assumed by Lambda."
    refusals = [refusal(400, "InvalidParameterValueException", message)] * 50
    plane.refusals["POST /2015-03-31/functions"] = refusals

    async def main() -> Any:
        async with deployer(plane) as aws:
            task = asyncio.ensure_future(aws.deploy(package()))
            await until(lambda: len(refusals) < 50, 30.0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            left = len(refusals)
            refusals.clear()
            return left, await aws.deploy(package())

    left, deployed = asyncio.run(main())
    assert left > 40, "it did not go on trying"
    assert deployed.current


def test_scaling_and_warm_environments(plane: Plane) -> None:
    async def main() -> Any:
        async with deployer(plane) as aws:
            first = await aws.deploy(package(warm=1))
            more = await aws.scale("behave", warm=2, concurrency=7)
            none = await aws.scale("behave", warm=0, concurrency=0)
            return first, more, none

    first, more, none = asyncio.run(main())
    assert [(d.warm, d.concurrency) for d in (first, more, none)] == [(1, 0), (2, 7), (0, 0)]


def test_a_look_up_that_fails_after_the_alias_has_moved_is_no_failed_deployment(plane: Plane) -> None:
    from tests.serverless.aws.plane import refusal

    path = "GET /2019-09-30/functions/rollart-behave/provisioned-concurrency"

    async def main() -> Any:
        async with deployer(plane, keep_versions=1) as aws:
            plane.refusals[path] = [refusal(403, "AccessDeniedException", "not authorized")] * 8
            first = await aws.deploy(package())
            with pytest.raises(BackendFailed, match="version 1 is current, but"):
                await aws.deploy(package(warm=1))
            plane.refusals.clear()
            again, third = await aws.deploy(package(warm=1)), await aws.deploy(package(warm=1))
            plane.refusals["DELETE /2015-03-31/functions/rollart-behave"] = [
                refusal(403, "AccessDeniedException", "not authorized")
            ] * 8
            unpruned = await aws.deploy(package(memory_mb=256))
            assert (unpruned.current, unpruned.problem) == (True, "")
            return first, again, third

    first, again, third = asyncio.run(main())
    assert (first.current, first.warm) == (True, None)
    assert "not authorized" in first.problem
    assert (again.unchanged, again.warm, again.problem) == (False, 1, "")
    assert (third.unchanged, third.warm) == (True, 1)


def test_concurrency_is_reserved_if_asked(plane: Plane) -> None:
    async def main() -> Any:
        async with deployer(plane, reserve_concurrency=True) as aws:
            first = await aws.deploy(package(concurrency=3))
            planned = await aws.plan(package(concurrency=5))
            second = await aws.deploy(package(concurrency=5))
            client(plane).put_function_concurrency(FunctionName="rollart-behave", ReservedConcurrentExecutions=0)
            return first, planned, second, await aws.plan(package(concurrency=5)), list(await aws.functions())

    first, planned, second, off, listed = asyncio.run(main())
    assert planned.lines == ("reserved concurrency: 3 -> 5",)
    assert (first.concurrency, second.concurrency, second.provider_version) == (3, 5, "1")
    assert off.lines == ("reserved concurrency: 0 -> 5",)
    assert "switched off by a reserved concurrency of 0" in listed[0].problem


def test_logs_are_read_oldest_first_and_followed_with_the_run_of_each_call(plane: Plane) -> None:
    async def main() -> Any:
        async with deployer(plane) as aws, AwsLambdaBackend(settings(plane), run="lake-1") as backend:
            await aws.deploy(package())
            answer = client(plane).invoke(
                FunctionName="rollart-behave",
                Qualifier="live",
                Payload=json.dumps([{"id": "shown", "messages": [], "metadata": {"do": "raise"}}]).encode(),
            )
            answer["Payload"].read()
            lines, last = await aws.logs("behave"), await aws.logs("behave", limit=1)
            followed = []
            async with asyncio.timeout(60.0):
                async for line in aws.follow("behave", since_s=3600.0):
                    if line.text.startswith("ValueError"):
                        followed.append((line.text, line.run, line.items))
                        if len(followed) == 1:
                            await backend.attach("behave")
                            event = [encode(item(key, do="raise")) for key in ("first", "second")]
                            await backend.invoke("behave", event, deadline_s=60.0)
                    if len(followed) == 3:
                        break
            return lines, last, followed

    lines, last, followed = asyncio.run(main())
    assert followed == [
        ("ValueError: no such shown", "", ("shown",)),
        ("ValueError: no such first", "lake-1", ("first",)),
        ("ValueError: no such second", "lake-1", ("second",)),
    ]
    assert any("ValueError: no such shown" in line.text for line in lines)
    assert [line.t for line in lines] == sorted(line.t for line in lines)
    assert last == lines[-1:]


def test_delete_and_what_is_not_there(plane: Plane) -> None:
    async def main() -> None:
        async with deployer(plane) as aws:
            await aws.deploy(package())
            await aws.delete("behave")
            assert list(await aws.functions()) == []
            for call in (aws.delete, aws.versions, aws.rollback, aws.logs, aws.scale):
                with pytest.raises(UnknownFunction):
                    await call("behave")
            assert (await aws.deploy(package())).current

    asyncio.run(main())


def test_a_function_of_someone_elses_is_left_alone(plane: Plane) -> None:
    role = client(plane, "iam").create_role(RoleName="theirs", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    client(plane).create_function(
        FunctionName="rollart-behave",
        Role=role,
        Runtime="python3.12",
        Handler="a.b",
        Code={"ZipFile": archive({"a.py": b""})},
    )

    async def main() -> None:
        async with deployer(plane) as aws:
            for attempt in (aws.deploy(package()), aws.plan(package()), aws.delete("behave")):
                with pytest.raises(BackendFailed, match="did not deploy"):
                    await attempt
            assert list(await aws.functions()) == []

    asyncio.run(main())


def test_a_role_that_is_not_known_everywhere_yet_is_waited_for(plane: Plane) -> None:
    from tests.serverless.aws.plane import refusal

    message = "The role defined for the function cannot be assumed by Lambda."
    plane.refusals["POST /2015-03-31/functions"] = [refusal(400, "InvalidParameterValueException", message)]

    async def main() -> Any:
        async with deployer(plane) as aws:
            return await aws.deploy(package())

    assert asyncio.run(main()).current
    assert plane.refusals["POST /2015-03-31/functions"] == []


@contextlib.asynccontextmanager
async def judge(plane: Plane, secret: str, **changes: Any) -> AsyncIterator[AwsDeployer]:
    """A deployer for functions whose JUDGE_KEY is this secret of the account."""
    manager = client(plane, "secretsmanager")
    with contextlib.suppress(manager.exceptions.ResourceExistsException):
        manager.create_secret(Name=secret, SecretString=f"the value of {secret}")
    secrets, meter = Secrets({"JUDGE_KEY": SecretSource(aws_secret=secret)}), changes.pop("meter", None)
    async with AwsDeployer(settings(plane, **changes), meter=meter, secrets=secrets) as one:
        yield one


def readable(plane: Plane, function: str = "rollart-secretive", version: str = "live") -> set[str]:
    """The secrets that the role of a function's version may read."""
    configuration = client(plane).get_function_configuration(FunctionName=function, Qualifier=version)
    role = configuration["Role"].rpartition("/")[2]
    assert len(role) <= 64
    found = client(plane, "iam").get_role_policy(RoleName=role, PolicyName="own-secrets")["PolicyDocument"]
    (statement,) = (one for one in found["Statement"] if one["Action"] == "secretsmanager:GetSecretValue")
    return {arn.rpartition(":")[2].removesuffix("-??????") for arn in statement["Resource"]}


def test_a_role_reads_the_secrets_of_all_kept_versions_and_no_others(plane: Plane, tmp_path: pathlib.Path) -> None:
    """A canary and a failed trial take no secret from the current version, and a rollback finds its own."""
    failing = tmp_path / "secretive.py"
    failing.write_text("def secretive(sample):\n    return 1.0\n\n\nraise RuntimeError('no weights')\n")
    bad = at(failing, name="secretive", handler="secretive", secrets=("JUDGE_KEY",))
    one = package("secretive")

    async def main() -> None:
        async with judge(plane, "a", keep_versions=2) as a, judge(plane, "b", keep_versions=2) as b:
            await a.deploy(one)
            assert readable(plane) == {"a"}
            await b.deploy(one, canary=0.5)
            assert readable(plane) == {"a", "b"}
            await b.rollback("secretive")
            assert readable(plane) == {"a", "b"}, "both versions are kept"
            async with judge(plane, "c", keep_versions=2) as c:
                with pytest.raises(BackendFailed, match="no weights"):
                    await c.deploy(bad)
                assert {"a", "b"} <= readable(plane)
                await c.deploy(one)
                await c.deploy(package("secretive", memory_mb=320))
            assert readable(plane) == {"b", "c"}, "version 1 is pruned, and the canary is kept"

    asyncio.run(main())


def test_functions_with_secrets_share_no_role(plane: Plane) -> None:
    """Of one name under two prefixes, or with names that agree in more characters than a role's name has."""
    names = [f"{'judge-' * 8}{n}" for n in "12"]

    async def main() -> None:
        for prefix, secret in (("rollart-", "a"), ("team-", "b")):
            async with judge(plane, secret, prefix=prefix) as aws:
                await aws.deploy(package("secretive"))
        for name, secret in zip(names, ("a", "b"), strict=True):
            async with judge(plane, secret, prefix="long-") as aws:
                await aws.deploy(package("secretive", name=name))

    asyncio.run(main())
    assert (readable(plane), readable(plane, "team-secretive")) == ({"a"}, {"b"})
    assert [readable(plane, f"long-{name}") for name in names] == [{"a"}, {"b"}]
    roles = {role["RoleName"] for role in client(plane, "iam").list_roles()["Roles"]}
    assert {"rollart-functions.rollart-secretive.us-east-1", "rollart-functions.team-secretive.us-east-1"} < roles
    assert len(roles) == 4


def test_a_canary_with_another_role_is_refused_before_anything_is_uploaded(plane: Plane) -> None:
    """Lambda routes calls of an alias to versions of one role alone."""

    async def main() -> int:
        async with judge(plane, "a") as aws:
            await aws.deploy(package(name="secretive"))
            uploads = plane.calls["PUT /code"]
            with pytest.raises(SpecInvalid, match="gives both versions one role"):
                await aws.deploy(package("secretive"), canary=0.5)
            return plane.calls["PUT /code"] - uploads

    assert asyncio.run(main()) == 0


def test_a_permission_that_is_not_known_everywhere_yet_is_waited_for(plane: Plane) -> None:
    """Only after it was changed: otherwise the function's own access is denied, and waiting does not help."""
    books = Books()

    async def main() -> Any:
        async with judge(plane, "a", meter=books) as aws:
            plane.denied = 2
            first = await aws.deploy(package("secretive"))
            assert plane.denied == 0
            tried = plane.executions["rollart-secretive"]
            plane.denied = 1
            with pytest.raises(BackendFailed, match="AccessDenied"):
                await aws.deploy(package("secretive", memory_mb=320))
            return first, tried, plane.executions["rollart-secretive"]

    first, tried, in_all = asyncio.run(main())
    assert first.current
    assert (tried, in_all) == (3, 4)
    assert [i.cause for i in books.invocations] == [Cause.SMOKE] * 4, "each trial is billed"
    assert sum(i.billed_s for i in books.invocations) == pytest.approx(plane.billed_s())


def test_what_the_user_may_not_do_is_named(plane: Plane) -> None:
    from tests.serverless.aws.plane import refusal

    message = "User: nobody is not authorized to perform: lambda:CreateFunction"
    plane.refusals["POST /2015-03-31/functions"] = [refusal(403, "AccessDeniedException", message)]

    async def main() -> None:
        async with deployer(plane) as aws:
            with pytest.raises(CredentialsMissing, match=r"lambda:CreateFunction.*grant it"):
                await aws.deploy(package())

    asyncio.run(main())


@pytest.mark.parametrize(
    "changes",
    [
        {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None},
        {"AWS_ACCESS_KEY_ID": "AKIAREFUSED"},
        {"AWS_PROFILE": "nobody"},
    ],
    ids=["none", "refused", "no such profile"],
)
def test_no_credentials_are_named_with_the_remedy(plane: Plane, changes: dict[str, str | None]) -> None:
    async def main() -> None:
        async with AwsDeployer(settings(plane)) as aws:
            with pytest.raises(CredentialsMissing, match="aws configure"):
                await aws.plan(package())

    with environment(**changes):
        asyncio.run(main())


def _broken(source: str, tmp_path: pathlib.Path) -> Any:
    if source == "broken":
        return package("broken", name="f", memory_mb=128)
    (tmp_path / "grumpy.py").write_text("def handler(event, context):\n    return 'no'\n")
    return at(tmp_path / "grumpy.py", name="f", handler="handler", memory_mb=128)
