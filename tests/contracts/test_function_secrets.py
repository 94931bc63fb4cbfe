"""The conformance suite of secrets on every provider: real processes, clients and runtimes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import pathlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

import pytest

from serverless.deploy.package import Package
from serverless.meter import MeterSink
from serverless.pipeline.offload import Offload
from serverless.providers.base import Backend
from serverless.providers.http import Bearer, Endpoint, HttpBackend
from serverless.providers.http_server import FunctionHttpServer
from serverless.secrets import Secrets, SecretSource
from serverless.workers.host import WorkerHost
from serverless.workers.local import LocalBackend
from serverless.workers.remote import HostedBackend, WorkerHosts
from tests.contracts.function_secrets import LIMIT_S, SecretsWorld, life_of_a_secret
from tests.serverless.aws.provider import AwsLambda
from tests.serverless.modal_plane.provider import MISSING, running_plane
from tests.serverless.support import item

pytestmark = pytest.mark.slow  # each starts real workers


class LocalSecrets(SecretsWorld):
    runtime: Literal["rollart", "awslambdaric"] = "rollart"

    @contextlib.asynccontextmanager
    async def open(self, packages: Sequence[Package], meter: MeterSink) -> AsyncIterator[Backend]:
        async with LocalBackend(root=self.root, runtime=self.runtime, meter=meter, secrets=self.secrets) as backend:
            for one in packages:
                await backend.deploy(one)
            yield backend


class RuntimeSecrets(LocalSecrets):
    runtime = "awslambdaric"


class HostedSecrets(SecretsWorld):
    """Workers of a machine that has no value."""

    @contextlib.asynccontextmanager
    async def open(self, packages: Sequence[Package], meter: MeterSink) -> AsyncIterator[Backend]:
        hosts = WorkerHosts()
        async with LocalBackend(root=self.root) as machine:
            host = WorkerHost(machine, "the token")
            server = await asyncio.start_server(host.serve, "127.0.0.1", 0)
            link = await hosts.join("one", f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", "the token")
            async with HostedBackend(hosts, meter=meter, secrets=self.secrets) as backend:
                for one in packages:
                    await backend.deploy(one)
                yield backend
            await link.aclose()
            server.close()
            await host.close()


class HttpSecrets(SecretsWorld):
    """Our own front, whose machine has no value: each call sends it."""

    @contextlib.asynccontextmanager
    async def open(self, packages: Sequence[Package], meter: MeterSink) -> AsyncIterator[Backend]:
        async with (
            LocalBackend(root=self.root, secrets=Secrets(late=True)) as local,
            FunctionHttpServer(local, token="t") as front,
        ):
            for one in packages:
                await local.deploy(one)
            endpoints = {
                p.spec.name: Endpoint(f"{front.url}/functions/{p.spec.name}", Bearer("t"), send_secrets=True)
                for p in packages
            }
            async with HttpBackend(endpoints, meter=meter, secrets=self.secrets) as backend:
                for one in packages:
                    await backend.deploy(one)
                yield backend


LOCAL = {"local": LocalSecrets, "hosted": HostedSecrets, "awslambdaric": RuntimeSecrets, "http": HttpSecrets}


@pytest.mark.parametrize("name", LOCAL)
def test_local_workers_have_a_secret_and_nothing_else_does(name: str, tmp_path: pathlib.Path) -> None:
    if name == "awslambdaric" and importlib.util.find_spec("awslambdaric") is None:
        pytest.skip("awslambdaric is not installed")
    asyncio.run(life_of_a_secret(LOCAL[name](tmp_path)))


class LambdaSecrets(SecretsWorld):
    """Secrets Manager and Parameter Store by moto, fetched by the function in AWS's own runtime."""

    children = False

    def __init__(self, directory: pathlib.Path, plane: Any, source: SecretSource) -> None:
        super().__init__(directory)
        self.plane, self.source = plane, source
        self._shown: list[bytes] = []

    @property
    def secrets(self) -> Secrets:
        return Secrets({"JUDGE_KEY": self.source})

    async def rotate(self, value: str) -> None:
        from tests.serverless.aws.provider import client

        if self.source.ssm:
            client(self.plane, "ssm").put_parameter(
                Name=self.source.ssm, Value=value, Type="SecureString", Overwrite=True
            )
            return
        manager, text = client(self.plane, "secretsmanager"), json.dumps({"key": value})
        name = self.source.aws_secret.partition(":")[0]
        try:
            manager.put_secret_value(SecretId=name, SecretString=text)
        except manager.exceptions.ResourceNotFoundException:
            manager.create_secret(Name=name, SecretString=text)

    @contextlib.asynccontextmanager
    async def open(self, packages: Sequence[Package], meter: MeterSink) -> AsyncIterator[Backend]:
        from serverless.providers.aws import AwsLambdaBackend
        from tests.serverless.aws.provider import client, settings

        of_plane = settings(self.plane, secrets_ttl_s=0.0)
        async with AwsLambdaBackend(of_plane, meter=meter, secrets=self.secrets) as backend:
            for one in packages:
                await backend.deploy(one)
            yield backend
            lines = [line.text for line in await backend.deployer.logs("secretive")]
            found = client(self.plane).get_function(FunctionName="rollart-secretive")
            self._shown += ["\n".join(lines).encode(), repr(found).encode()]

    def shown(self) -> Iterator[bytes]:
        yield from self._shown


@pytest.mark.skipif(bool(AwsLambda.missing), reason=AwsLambda.missing or "-")
@pytest.mark.parametrize("source", [SecretSource(aws_secret="prod/judge:key"), SecretSource(ssm="/prod/judge")])
def test_a_function_on_lambda_fetches_its_secret(source: SecretSource, tmp_path: pathlib.Path) -> None:
    from tests.serverless.aws.provider import plane

    with plane() as one:
        asyncio.run(life_of_a_secret(LambdaSecrets(tmp_path, one, source)))


class ModalSecrets(SecretsWorld):
    """A `modal.Secret`, whose present value a new container has."""

    children = shared = False

    def __init__(self, directory: pathlib.Path, plane: Any) -> None:
        super().__init__(directory)
        self.plane, self._made = plane, False
        self._shown: list[bytes] = []

    @property
    def secrets(self) -> Secrets:
        return Secrets({"JUDGE_KEY": SecretSource(modal="judge")})

    async def rotate(self, value: str) -> None:
        import modal

        if self._made:
            await modal.Secret.from_name("judge").update.aio({"JUDGE_KEY": value})
        else:
            await modal.Secret.objects.create.aio("judge", {"JUDGE_KEY": value})
            self._made = True

    async def renewed(self, offload: Offload) -> None:
        await offload.submit("secretive", item("die", do="die"), LIMIT_S)

    @contextlib.asynccontextmanager
    async def open(self, packages: Sequence[Package], meter: MeterSink) -> AsyncIterator[Backend]:
        from serverless.deploy.modal_app import ModalDeployer
        from serverless.providers.modal import ModalBackend
        from serverless.providers.modal_client import ModalSettings

        settings = ModalSettings(prefix=self.plane.prefix())
        async with (
            ModalDeployer(settings, secrets=self.secrets) as deployer,
            ModalBackend(settings, meter=meter, secrets=self.secrets) as backend,
        ):
            for one in packages:
                await backend.deploy(one)
            yield backend
            lines = [line.text for line in await deployer.logs("secretive")]
            self._shown += ["\n".join(lines).encode(), json.dumps(self.plane.state()).encode()]

    def shown(self) -> Iterator[bytes]:
        yield from self._shown


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_function_on_modal_has_its_secret(tmp_path: pathlib.Path) -> None:
    with running_plane() as plane:
        asyncio.run(life_of_a_secret(ModalSecrets(tmp_path, plane)))
