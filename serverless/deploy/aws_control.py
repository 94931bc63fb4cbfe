"""The steps of a deployment on AWS Lambda, each a few calls of boto3. The deployer runs them in threads."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from serverless.deploy.aws_function import (
    ALIAS,
    ASSUME_ROLE,
    DESCRIPTION_PREFIX,
    DIGEST_TAG,
    DIRECT_BYTES,
    AwsFunction,
    AwsSettings,
    log_group,
    log_permission,
)
from serverless.deploy.aws_session import Boto3Clients, error_code, translate_errors
from serverless.errors import BackendFailed, PackageError, UnknownFunction
from serverless.providers.faults import LambdaReport, function_fault, function_log_tail, parse_report

T = TypeVar("T")

_CURRENT = "rollart: current were "
"""Prefix of the description of the alias `live`; the numbers of its earlier versions follow."""
_CURRENT_MOST = 30
"""Numbers in that description, which has at most 256 characters."""

_COMPARED = ("Runtime", "Handler", "MemorySize", "Timeout")
_CONFLICTS = 30
"""Attempts while another change of the function is in progress: with the waits about a minute."""
_POLL_S = 0.5
_WAIT_POLLS = 360
_ROLE_S = 60.0
"""Seconds until a new role is known everywhere (IAM is eventually consistent, usually within seconds)."""
_SMOKE_THROTTLES = 20


@dataclass(frozen=True, slots=True)
class LambdaVersion:
    """A published version. `number` is Lambda's, `digest` the package's."""

    number: str
    digest: str
    settings: Mapping[str, Any]
    architecture: str
    role: str
    arn: str
    created: str

    def runs(self, function: AwsFunction) -> bool:
        """True if this is a version of the function's package with its configuration."""
        settings = function.settings
        placed = self.architecture == settings.architecture and settings.role_arn in ("", self.role)
        return (
            placed and self.digest == function.package.version and dict(self.settings) == dict(function.configuration)
        )

    @property
    def unqualified(self) -> str:
        """The function's own ARN, `arn:aws:lambda:REGION:ACCOUNT:function:NAME`."""
        return ":".join(self.arn.split(":")[:7])


@dataclass(frozen=True, slots=True)
class LambdaAlias:
    """An alias of a version. `number` is Lambda's number of the version."""

    name: str
    number: str
    description: str


class LambdaControl:
    """Owns the boto3 clients. Used from one thread at a time. While `stopped`, every wait raises `BackendFailed`."""

    def __init__(self, settings: AwsSettings) -> None:
        self._settings = settings
        self._clients = Boto3Clients(settings)
        self.stopped = threading.Event()

    def close(self) -> None:
        self._clients.close()

    def live(self, name: str) -> LambdaVersion | None:
        """The version that the alias names, None if there is no function or no alias."""
        chosen = {"FunctionName": name, "Qualifier": ALIAS}
        found = self._read(f"looking for {name}", lambda: self._lambda.get_function_configuration(**chosen))
        return _version(found) if found is not None else None

    def versions(self, name: str) -> list[LambdaVersion]:
        """Published versions, newest first; none if there is no such function."""
        listed = self._listed(
            f"listing versions of {name}", "lambda", "list_versions_by_function", "Versions", FunctionName=name
        )
        found = (_version(one) for one in listed if one["Version"] != "$LATEST")
        return sorted((v for v in found if v.digest), key=lambda v: -int(v.number))

    def aliases(self, name: str) -> list[LambdaAlias]:
        """The aliases of a function, none if it does not exist."""
        found = self._listed(f"listing aliases of {name}", "lambda", "list_aliases", "Aliases", FunctionName=name)
        return [LambdaAlias(one["Name"], str(one["FunctionVersion"]), str(one.get("Description", ""))) for one in found]

    def deployed(self, name: str) -> list[str]:
        """Numbers of the versions that have been current, oldest first; of all versions if the alias does not record
        them."""
        for alias in self.aliases(name):
            if alias.name == ALIAS and alias.description.startswith(_CURRENT):
                return alias.description.removeprefix(_CURRENT).split()
        return [version.number for version in reversed(self.versions(name))]

    def names(self) -> list[str]:
        """Lambda functions with the prefix."""
        found = self._listed("listing functions", "lambda", "list_functions", "Functions")
        return sorted(one["FunctionName"] for one in found if one["FunctionName"].startswith(self._settings.prefix))

    def ours(self, name: str) -> bool:
        """True if a function exists. Raises `BackendFailed` if it does and is not rollart's."""
        found = self._read(f"looking for {name}", lambda: self._lambda.get_function(FunctionName=name))
        if found is None:
            return False
        if DIGEST_TAG not in found.get("Tags", {}):
            raise BackendFailed(
                f"a Lambda function {name} exists that rollart did not deploy", remedy="choose another name or prefix"
            )
        return True

    def role(self) -> str:
        """The execution role's ARN; the role is created if it is missing and none was given."""
        if self._settings.role_arn:
            return self._settings.role_arn
        name = self._settings.role_name
        with translate_errors(f"looking for the role {name}"):
            iam = self._clients.of("iam")
            try:
                return str(iam.get_role(RoleName=name)["Role"]["Arn"])
            except iam.exceptions.NoSuchEntityException:
                pass
        with translate_errors(f"making the role {name}"):
            try:
                made = iam.create_role(
                    RoleName=name,
                    AssumeRolePolicyDocument=json.dumps(ASSUME_ROLE),
                    Description="Functions deployed by rollart: they may write their own logs, and nothing else.",
                )
            except iam.exceptions.EntityAlreadyExistsException:  # created by a concurrent deployment
                made = iam.get_role(RoleName=name)
            arn = str(made["Role"]["Arn"])
            _, partition, _, _, account, _ = arn.split(":", 5)
            groups = f"arn:{partition}:logs:*:{account}:log-group:{log_group(self._settings.prefix)}*"
            statement = log_permission([groups, f"{groups}:log-stream:*"])
            policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
            iam.put_role_policy(RoleName=name, PolicyName="own-logs", PolicyDocument=policy)
        return arn

    def upload(self, wanted: AwsFunction, *, create: bool) -> None:
        """Upload code and configuration, with the waits that Lambda requires in between. Raises `DeploymentOvertaken`
        if another deployment has created the function meanwhile."""
        function, name = self._lambda, wanted.name
        role = self.role()
        configuration = {"FunctionName": name, "Description": wanted.description, **wanted.configuration, "Role": role}
        with self._located(name, wanted.archive) as code, translate_errors(f"uploading {name}"):
            if create:
                try:
                    self._assumable(lambda: function.create_function(**wanted.properties({"Code": code}, role)))
                except function.exceptions.ResourceConflictException:
                    raise DeploymentOvertaken(name) from None
                self._wait("function_active_v2", FunctionName=name)
                return
            code |= {"FunctionName": name, "Architectures": [self._settings.architecture]}
            self._wait("function_updated_v2", FunctionName=name)
            self._unconflicted(lambda: function.update_function_code(**code))
            self._wait("function_updated_v2", FunctionName=name)
            self._unconflicted(lambda: self._assumable(lambda: function.update_function_configuration(**configuration)))
            self._wait("function_updated_v2", FunctionName=name)

    def publish(self, wanted: AwsFunction) -> str:
        """Publish a new version and return its number. Raises `DeploymentOvertaken` if the code is another
        deployment's."""
        name, description = wanted.name, wanted.description
        sha = base64.b64encode(hashlib.sha256(wanted.archive).digest()).decode()
        with translate_errors(f"publishing {name}"):
            try:
                made = self._unconflicted(
                    lambda: self._lambda.publish_version(FunctionName=name, CodeSha256=sha, Description=description)
                )
            except self._lambda.exceptions.InvalidParameterValueException as error:
                if "codesha256" not in str(error).lower():
                    raise
                raise DeploymentOvertaken(name) from None
            number = str(made["Version"])
            self._wait("published_version_active", FunctionName=name, Qualifier=number)
        return number

    def smoke(self, name: str, number: str, timeout_s: float) -> LambdaReport | None:
        """Call a version with the empty list. Raises `BackendFailed` with the function's error unless the answer is a
        list."""
        client = self._clients.of("lambda", once_s=timeout_s + 20.0)
        with translate_errors(f"trying {name}:{number}"):
            answer = self._again(  # a throttled call is not executed
                lambda: client.invoke(FunctionName=name, Qualifier=number, Payload=b"[]", LogType="Tail"),
                lambda e: error_code(e) == "TooManyRequestsException",
                _SMOKE_THROTTLES,
                _POLL_S,
            )
            payload = answer["Payload"].read()
        bill = parse_report(answer.get("LogResult", ""))
        if "FunctionError" in answer:
            words = function_log_tail(answer.get("LogResult", ""))
            detail = function_fault(payload, bill).detail
            raise SmokeFailed(f"{detail}; its log ends: {words}" if words else detail, bill)
        try:
            body = json.loads(payload)
        except ValueError:
            body = payload
        if not isinstance(body, list):
            raise SmokeFailed(f"it answered an empty list with {body!r:.200}, not with a list", bill)
        return bill

    def point(self, name: str, version: LambdaVersion) -> None:
        """Make a version current. The alias moves last, so that a failure has moved nothing."""
        numbers = [n for n in self.deployed(name) if n != version.number][1 - _CURRENT_MOST :]
        with translate_errors(f"tagging {name}"):
            self._lambda.tag_resource(Resource=version.unqualified, Tags={DIGEST_TAG: version.digest})
        self.name(name, ALIAS, version.number, _CURRENT + " ".join([*numbers, version.number]))

    def name(self, name: str, alias: str, number: str, description: str) -> None:
        """Point an alias to a version; the alias is created if it is missing."""
        function = self._lambda
        target = {"FunctionName": name, "Name": alias, "FunctionVersion": number, "Description": description}
        with translate_errors(f"moving {name}:{alias} to {number}"):
            try:
                self._unconflicted(lambda: function.update_alias(**target, RoutingConfig={}))
            except function.exceptions.ResourceNotFoundException:
                function.create_alias(**target)

    def remove_alias(self, name: str, alias: str) -> None:
        """Remove an alias with its provisioned environments. No effect if it is gone."""
        with translate_errors(f"deleting {name}:{alias}"):
            try:
                self.set_warm(name, 0, alias)
                self._unconflicted(lambda: self._lambda.delete_alias(FunctionName=name, Name=alias))
            except self._lambda.exceptions.ResourceNotFoundException:
                pass

    def remove(self, name: str, number: str = "") -> None:
        """Remove a version, or without a number the function with all versions. A version that is gone or still used is
        skipped."""
        function = self._lambda
        chosen = {"Qualifier": number} if number else {}
        with translate_errors(f"deleting {name} {number}".rstrip()):
            try:
                self._unconflicted(lambda: function.delete_function(FunctionName=name, **chosen), 3 if number else 30)
            except function.exceptions.ResourceNotFoundException:
                if not number:
                    raise UnknownFunction(f"there is no Lambda function {name}") from None
            except function.exceptions.ResourceConflictException:
                if not number:
                    raise

    def retain_logs(self, name: str) -> None:
        logs = self._clients.of("logs")
        group = log_group(name)
        with translate_errors(f"setting up logs of {name}"):
            try:
                logs.create_log_group(logGroupName=group)
            except logs.exceptions.ResourceAlreadyExistsException:
                pass
            logs.put_retention_policy(logGroupName=group, retentionInDays=self._settings.log_retention_days)

    def log_events(self, name: str, since_ms: int) -> list[dict[str, Any]]:
        chosen = {"logGroupName": log_group(name), "startTime": since_ms}
        return self._listed(f"reading logs of {name}", "logs", "filter_log_events", "events", **chosen)

    def warm(self, name: str, alias: str = ALIAS) -> int:
        """Provisioned concurrency of an alias."""
        found = self._read(
            f"reading the provisioned concurrency of {name}",
            lambda: self._lambda.get_provisioned_concurrency_config(FunctionName=name, Qualifier=alias),
            missing="ProvisionedConcurrencyConfigNotFoundException",
        )
        return int(found["RequestedProvisionedConcurrentExecutions"]) if found is not None else 0

    def set_warm(self, name: str, count: int, alias: str = ALIAS, *, wait: bool = True) -> None:
        """Set the number of provisioned environments, and `wait` until they are ready; 0 releases them."""
        chosen = {"FunctionName": name, "Qualifier": alias}
        if not count and not self.warm(name, alias):
            return
        with translate_errors(f"keeping {count} environments of {name} warm"):
            if count == 0:
                self._lambda.delete_provisioned_concurrency_config(**chosen)
                return
            self._lambda.put_provisioned_concurrency_config(**chosen, ProvisionedConcurrentExecutions=count)
            for _ in range(_WAIT_POLLS if wait else 0):
                state = self._lambda.get_provisioned_concurrency_config(**chosen)
                if state["Status"] == "READY":
                    return
                if state["Status"] == "FAILED":
                    raise BackendFailed(f"{name}: {count} warm environments: {state.get('StatusReason', 'refused')}")
                self.pause(_POLL_S)
        if wait:
            raise BackendFailed(f"{name}: {count} warm environments are not ready in {_WAIT_POLLS * _POLL_S:.0f} s")

    def reserved(self, name: str) -> int:
        """Reserved concurrency, 0 if none."""
        with translate_errors(f"reading the reserved concurrency of {name}"):
            found = self._lambda.get_function_concurrency(FunctionName=name)
        return int(found.get("ReservedConcurrentExecutions") or 0)

    def reserve(self, name: str, count: int) -> None:
        with translate_errors(f"reserving {count} concurrent calls for {name}"):
            if count:
                self._lambda.put_function_concurrency(FunctionName=name, ReservedConcurrentExecutions=count)
            else:
                self._lambda.delete_function_concurrency(FunctionName=name)

    @property
    def _lambda(self) -> Any:
        return self._clients.of("lambda")

    def _listed(self, doing: str, service: str, operation: str, key: str, **chosen: Any) -> list[dict[str, Any]]:
        """The entries of all pages of a listing; none if AWS has no such thing."""

        def read() -> list[dict[str, Any]]:
            pages = self._clients.of(service).get_paginator(operation).paginate(**chosen)
            return [one for page in pages for one in page[key]]

        return self._read(doing, read) or []

    def _read(self, doing: str, call: Callable[[], T], *, missing: str = "ResourceNotFoundException") -> T | None:
        """The result of a call; None if AWS has no such thing."""
        with translate_errors(doing):
            try:
                return call()
            except Exception as error:
                if error_code(error) != missing:
                    raise
                return None

    @contextlib.contextmanager
    def _located(self, name: str, archive: bytes) -> Iterator[dict[str, Any]]:
        """The archive's location for Lambda, from where it is removed at the end."""
        if len(archive) <= DIRECT_BYTES:
            yield {"ZipFile": archive}
            return
        bucket = self._settings.bucket
        if not bucket:
            raise PackageError(
                f"the archive of {name} is {len(archive) / 1e6:.0f} MB, above Lambda's {DIRECT_BYTES / 1e6:.0f} MB",
                remedy="name an S3 bucket of the region as `bucket`, or drop requirements or artefacts",
            )
        key = f"rollart/{name}/{hashlib.sha256(archive).hexdigest()}.zip"
        with translate_errors(f"uploading {name} to s3://{bucket}"):
            s3 = self._clients.of("s3")
            s3.put_object(Bucket=bucket, Key=key, Body=archive)
        try:
            yield {"S3Bucket": bucket, "S3Key": key}
        finally:
            s3.delete_object(Bucket=bucket, Key=key)

    def _wait(self, waiter: str, **chosen: str) -> None:
        self._lambda.get_waiter(waiter).wait(**chosen, WaiterConfig={"Delay": _POLL_S, "MaxAttempts": _WAIT_POLLS})

    def _unconflicted(self, call: Callable[[], T], attempts: int = _CONFLICTS) -> T:
        """Retry while another change of the function is in progress."""
        return self._again(call, lambda e: error_code(e) == "ResourceConflictException", attempts, 2.0)

    def _assumable(self, call: Callable[[], T]) -> T:
        """Retry while Lambda does not know a new role yet."""
        return self._again(call, lambda e: "cannot be assumed" in str(e), int(_ROLE_S), 1.0)

    def _again(self, call: Callable[[], T], passing: Callable[[Exception], bool], attempts: int, pause_s: float) -> T:
        for _ in range(attempts - 1):
            try:
                return call()
            except Exception as error:
                if not passing(error):
                    raise
            self.pause(pause_s)
        return call()

    def pause(self, seconds: float) -> None:
        """Block for `seconds`. Raises `BackendFailed` if the deployer is closed meanwhile."""
        if self.stopped.wait(seconds):
            raise BackendFailed("the deployer was closed while it waited for AWS")


class DeploymentOvertaken(BackendFailed):
    """Another deployment of the function interfered between two steps of this one."""

    def __init__(self, name: str) -> None:
        super().__init__(f"other deployments of {name} get in between again and again", remedy="deploy it again")


class SmokeFailed(BackendFailed):
    """The trial of a new version failed. `report` is the bill of the trial, if there is one."""

    def __init__(self, message: str, bill: LambdaReport | None) -> None:
        super().__init__(message)
        self.report = bill


def _version(found: Mapping[str, Any]) -> LambdaVersion:
    described = str(found.get("Description", ""))
    return LambdaVersion(
        number=str(found["Version"]),
        digest=described.removeprefix(DESCRIPTION_PREFIX) if described.startswith(DESCRIPTION_PREFIX) else "",
        settings={key: found.get(key) for key in _COMPARED},
        architecture=str(next(iter(found.get("Architectures", ())), "x86_64")),
        role=str(found["Role"]),
        arn=str(found["FunctionArn"]),
        created=str(found["LastModified"]).replace("+0000", "Z"),
    )
