"""The steps of a deployment on AWS Lambda, each a few calls of boto3. The deployer runs them in threads."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
    reference_permissions,
)
from serverless.deploy.aws_session import Boto3Clients, error_code, translate_errors
from serverless.deploy.images import ContainerEngine, find_engine
from serverless.errors import BackendFailed, PackageError, UnknownFunction
from serverless.providers.faults import LambdaReport, function_fault, function_log_tail, parse_report
from serverless.retries import AWS_CONFLICT, AWS_REMOVAL, AWS_ROLE, AWS_TRIAL, RetryPolicy
from serverless.secret_runtime import REFERENCES
from serverless.secrets import SecretMissing

T = TypeVar("T")

_CURRENT = "rollart: current were "
"""Prefix of the description of the alias `live`; the numbers of its earlier versions follow."""
_CURRENT_MOST = 30
"""Numbers in that description, which has at most 256 characters."""

_COMPARED = ("Runtime", "Handler", "MemorySize", "Timeout")
_POLL_S = 0.5
_WAIT_POLLS = 360
_DOWNLOAD_S = 120.0
_ROLE_NAME = 64
"""IAM's limit of a role's name."""
_SECRETS_POLICY = "own-secrets"


@dataclass(frozen=True, slots=True)
class LambdaVersion:
    """A published version. `number` is Lambda's, `digest` the package's."""

    number: str
    digest: str
    settings: Mapping[str, Any] = field(repr=False)
    package_type: str
    architecture: str
    role: str
    arn: str
    created: str

    def runs(self, function: AwsFunction) -> bool:
        """True if this is a version of the function's package with its configuration."""
        settings = function.settings
        placed = self.architecture == settings.architecture and settings.role_arn in ("", self.role)
        configured = all(self.settings.get(key) == value for key, value in function.configuration.items())
        same = self.package_type == function.package_type and self.digest == function.package.version
        return placed and same and configured

    @property
    def references(self) -> Mapping[str, Mapping[str, str]]:
        """The references to its secrets (`serverless.secret_runtime`), by variable."""
        variables = self.settings.get("Environment", {}).get("Variables", {})
        found: Mapping[str, Mapping[str, str]] = json.loads(variables.get(REFERENCES, "{}")).get("from", {})
        return found

    @property
    def unqualified(self) -> str:
        """The function's own ARN, `arn:aws:lambda:REGION:ACCOUNT:function:NAME`."""
        return ":".join(self.arn.split(":")[:7])


@dataclass(frozen=True, slots=True)
class LambdaAlias:
    """An alias of a version. `number` is Lambda's number of the version, `canary` that of a second version, which gets
    the share `weight` of the calls ('' and 0 if there is none). `revision` changes with each update."""

    name: str
    number: str
    description: str
    canary: str = ""
    weight: float = 0.0
    revision: str = ""


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
        return [_alias(one) for one in found]

    def released(self, name: str) -> LambdaAlias | None:
        """The alias `live`, None if there is no function or no alias."""
        return next((alias for alias in self.aliases(name) if alias.name == ALIAS), None)

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

    def role(self, wanted: AwsFunction) -> str:
        """The execution role's ARN; the role is created if it is missing and none was given. A function with secrets on
        AWS has a role of its own, see `grant_secrets`."""
        return self._settings.role_arn or self._role(self._role_name(wanted))

    def keeps_role(self, live: LambdaVersion, wanted: AwsFunction) -> bool:
        """True if the next version has the role of the current one, which Lambda requires of a canary."""
        if self._settings.role_arn:
            return live.role == self._settings.role_arn
        return live.role.endswith(f"/{self._role_name(wanted)}")

    def grant_secrets(self, name: str) -> bool:
        """Permit the function's own role to read the secrets of all its published versions, and no others. True if the
        policy was changed.

        Called after a version was published and after versions were removed: the versions that are there decide, so
        that no deployment takes a secret from a version that is called. If another deployment publishes between the
        listing and the change, the loop takes up its version. Versions with another role are not concerned.
        """
        if self._settings.role_arn:
            return False
        role, iam, changed = self._own_role_name(name), self._clients.of("iam"), False
        chosen, given = {"RoleName": role, "PolicyName": _SECRETS_POLICY}, None
        while (policy := self._secrets_policy(name, role)) is not None:
            given = given or self._read(
                f"looking for the secrets of the role {role}",
                lambda: iam.get_role_policy(**chosen)["PolicyDocument"],
                missing="NoSuchEntity",
            )
            if policy == given:
                break
            with translate_errors(f"granting secrets to the role {role}"):
                iam.put_role_policy(**chosen, PolicyDocument=json.dumps(policy))
            given, changed = policy, True
        return changed

    def _secrets_policy(self, name: str, role: str) -> dict[str, Any] | None:
        """The policy for the secrets of a function's versions with this role, None if they have no secrets."""
        versions = [v for v in self.versions(name) if v.role.endswith(f"/{role}") and v.references]
        if not versions:
            return None
        _, partition, _, region, account, *_ = versions[0].arn.split(":")
        references = [one for version in versions for one in version.references.values()]
        keys = {str(version.settings.get("KMSKeyArn", "")) for version in versions}
        statements = reference_permissions(references, keys, f"arn:{partition}:{{}}:{region}:{account}")
        return {"Version": "2012-10-17", "Statement": statements}

    def _role_name(self, wanted: AwsFunction) -> str:
        return self._own_role_name(wanted.name) if wanted.references else self._settings.role_name

    def _own_role_name(self, name: str) -> str:
        """The name of a function's own role. Roles have no region, so it has the function's name and region, which
        contain no dot. One that is too long ends with its digest."""
        full = f"{self._settings.role_name}.{name}.{self._lambda.meta.region_name}"
        if len(full) <= _ROLE_NAME:
            return full
        digest = hashlib.sha256(full.encode()).hexdigest()[:16]
        return f"{full[: _ROLE_NAME - len(digest) - 1]}.{digest}"

    def require_secrets(self, wanted: AwsFunction) -> None:
        """Raise `SecretMissing` for a secret that AWS does not have. A secret that this user may not look for is left
        to the function's role."""
        for name, reference in wanted.references.items():
            try:
                if "ssm" in reference:
                    self._clients.of("ssm").get_parameter(Name=reference["ssm"], WithDecryption=False)
                else:
                    self._clients.of("secretsmanager").describe_secret(SecretId=reference["aws_secret"])
            except Exception as error:
                if error_code(error) in ("ResourceNotFoundException", "ParameterNotFound"):
                    place = "Parameter Store" if "ssm" in reference else "Secrets Manager"
                    found = reference.get("ssm") or reference["aws_secret"]
                    raise SecretMissing(
                        f"function {wanted.package.spec.name} has no value of the secret {name}: "
                        f"{found} is not in {place} of {self._clients.of('lambda').meta.region_name}",
                        remedy=f"create it there, or set functions.secrets.{name}",
                    ) from None
                if not error_code(error).startswith("AccessDenied"):
                    with translate_errors(f"looking for the secret {name}"):
                        raise

    def _role(self, name: str) -> str:
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
                    Description="Functions deployed by rollart: they may write their own logs, and read their secrets.",
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
        role = self.role(wanted)
        configuration = {"FunctionName": name, "Description": wanted.description, "Environment": {"Variables": {}}}
        configuration |= {**wanted.configuration, "Role": role}
        with self._located(wanted) as code, translate_errors(f"uploading {name}"):
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
        sha = self._code_sha(wanted)
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
            answer = AWS_TRIAL.run_blocking(  # a throttled call is not executed
                lambda: client.invoke(FunctionName=name, Qualifier=number, Payload=b"[]", LogType="Tail"),
                lambda error: error_code(error) == "TooManyRequestsException",
                pause=self.pause,
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

    def point(self, name: str, version: LambdaVersion, seen: LambdaAlias | None = None) -> None:
        """Make a version the only current one. The alias moves last, so that a failure has moved nothing. Raises
        `DeploymentOvertaken` if the alias was moved since it was `seen`."""
        numbers = [n for n in self.deployed(name) if n != version.number][1 - _CURRENT_MOST :]
        with translate_errors(f"tagging {name}"):
            self._lambda.tag_resource(Resource=version.unqualified, Tags={DIGEST_TAG: version.digest})
        described = _CURRENT + " ".join([*numbers, version.number])
        revision = seen.revision if seen is not None else ""
        self.point_alias(name, ALIAS, version.number, described, revision=revision)

    def split(self, name: str, seen: LambdaAlias, canary: str, weight: float) -> None:
        """Give a share of the calls of `live` to a canary. Raises `DeploymentOvertaken` if the alias was moved since it
        was `seen`."""
        routing = {"AdditionalVersionWeights": {canary: weight}}
        with translate_errors(f"giving {weight:g} of the calls of {name} to version {canary}"):
            self._update_alias(name, ALIAS, seen.revision, RoutingConfig=routing)

    def point_alias(self, name: str, alias: str, number: str, description: str, *, revision: str = "") -> None:
        """Point an alias to a version alone; the alias is created if it is missing."""
        target = {"FunctionVersion": number, "Description": description}
        with translate_errors(f"moving {name}:{alias} to {number}"):
            try:
                self._update_alias(name, alias, revision, **target, RoutingConfig={"AdditionalVersionWeights": {}})
            except self._lambda.exceptions.ResourceNotFoundException:
                self._lambda.create_alias(FunctionName=name, Name=alias, **target)

    def _update_alias(self, name: str, alias: str, revision: str, **changes: Any) -> None:
        """Raises `DeploymentOvertaken` if the alias has another revision, unless none is given."""
        chosen = {"FunctionName": name, "Name": alias, **({"RevisionId": revision} if revision else {})}
        try:
            self._unconflicted(lambda: self._lambda.update_alias(**chosen, **changes))
        except self._lambda.exceptions.PreconditionFailedException:
            raise DeploymentOvertaken(name) from None

    def archive(self, name: str, number: str) -> bytes:
        """The archive of a version. Raises `PackageError` if AWS does not give one, as for a container image."""
        found = self._read(
            f"looking for {name}:{number}", lambda: self._lambda.get_function(FunctionName=name, Qualifier=number)
        )
        location = str((found or {}).get("Code", {}).get("Location", ""))
        if not location.startswith(("https://", "http://")):
            raise PackageError(f"AWS gives no archive of {name}:{number}")
        with translate_errors(f"downloading {name}:{number}"):
            try:
                with urllib.request.urlopen(location, timeout=_DOWNLOAD_S) as response:  # a presigned URL of AWS
                    data: bytes = response.read()
            except OSError as error:
                raise PackageError(f"the archive of {name}:{number} cannot be downloaded: {error}") from None
        return data

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
                policy = AWS_REMOVAL if number else AWS_CONFLICT
                self._unconflicted(lambda: function.delete_function(FunctionName=name, **chosen), policy)
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
            AWS_CONFLICT.run_blocking(  # while an alias moves, Lambda gives it weights of its own
                lambda: self._lambda.put_provisioned_concurrency_config(
                    **chosen, ProvisionedConcurrentExecutions=count
                ),
                lambda e: "alias with weights" in str(e).lower(),
                pause=self.pause,
            )
            for _ in range(_WAIT_POLLS if wait else 0):
                state = self._lambda.get_provisioned_concurrency_config(**chosen)
                if state["Status"] == "READY":
                    return
                if state["Status"] == "FAILED":
                    raise BackendFailed(f"{name}: {count} warm environments: {state.get('StatusReason', 'refused')}")
                self.pause(_POLL_S)
        if wait:
            raise BackendFailed(f"{name}: {count} warm environments are not ready in {_WAIT_POLLS * _POLL_S:.0f} s")

    def reserved(self, name: str) -> int | None:
        """Reserved concurrency, None if none is reserved. A function with 0 is switched off."""
        with translate_errors(f"reading the reserved concurrency of {name}"):
            found = self._lambda.get_function_concurrency(FunctionName=name)
        reserved = found.get("ReservedConcurrentExecutions")
        return None if reserved is None else int(reserved)

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

    def check_package_type(self, wanted: AwsFunction) -> None:
        """Raise `BackendFailed` if the function exists with code of the other kind, which Lambda never changes."""
        live = self._read(
            f"looking for {wanted.name}", lambda: self._lambda.get_function_configuration(FunctionName=wanted.name)
        )
        kind = wanted.package_type if live is None else str(live.get("PackageType", "Zip"))
        if kind != wanted.package_type:
            raise BackendFailed(
                f"{wanted.name} exists with code of type {kind}; Lambda never changes it to {wanted.package_type}",
                remedy="give the function another name, or delete the deployed one",
            )

    def image_digest(self, wanted: AwsFunction) -> str:
        """The digest of the function's image in its repository, '' if it is not there."""
        assert wanted.image is not None, "an archive has no image"
        chosen = {"repositoryName": self._settings.repository, "imageIds": [{"imageTag": wanted.image.tag}]}
        ecr = self._clients.of("ecr")
        with translate_errors(f"looking for the image of {wanted.name}"):
            try:
                return str(ecr.describe_images(**chosen)["imageDetails"][0]["imageDigest"])
            except (ecr.exceptions.ImageNotFoundException, ecr.exceptions.RepositoryNotFoundException):
                return ""

    def repository(self) -> str:
        """The URI of the repository of images, which is created if it is missing."""
        ecr, name = self._clients.of("ecr"), self._settings.repository
        with translate_errors(f"looking for the repository {name}"):
            try:
                found = ecr.describe_repositories(repositoryNames=[name])["repositories"][0]
            except ecr.exceptions.RepositoryNotFoundException:
                found = ecr.create_repository(repositoryName=name)["repository"]
        return str(found["repositoryUri"])

    def _pushed(self, wanted: AwsFunction) -> str:
        """The function's image by its digest; it is built and pushed unless it is in its repository."""
        image, uri = wanted.image, self.repository()
        assert image is not None, "an archive has no image"
        digest = self.image_digest(wanted)
        if not digest:
            engine, target = engine_for(wanted), f"{uri}:{image.tag}"
            engine.build(image, target)
            with translate_errors("asking ECR for a password"):
                granted = self._clients.of("ecr").get_authorization_token()["authorizationData"][0]
            user, _, password = base64.b64decode(granted["authorizationToken"]).decode().partition(":")
            engine.push(target, user=user, password=password)
            digest = self.image_digest(wanted)
        if not digest:
            raise BackendFailed(f"{uri} has no image {image.tag} after its push", remedy="see the registry's log")
        return f"{uri}@{digest}"

    def _code_sha(self, wanted: AwsFunction) -> str:
        """Lambda's `CodeSha256`: of an archive in base64, of an image its digest."""
        if wanted.image is not None:
            return self.image_digest(wanted).removeprefix("sha256:")
        return base64.b64encode(hashlib.sha256(wanted.archive).digest()).decode()

    @contextlib.contextmanager
    def _located(self, wanted: AwsFunction) -> Iterator[dict[str, Any]]:
        """The code's location for Lambda; an archive is removed from it at the end."""
        if wanted.image is not None:
            yield {"ImageUri": self._pushed(wanted)}
            return
        name, archive = wanted.name, wanted.archive
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

    def _unconflicted(self, call: Callable[[], T], policy: RetryPolicy = AWS_CONFLICT) -> T:
        """Retry while another change of the function is in progress."""
        return policy.run_blocking(
            call, lambda error: error_code(error) == "ResourceConflictException", pause=self.pause
        )

    def _assumable(self, call: Callable[[], T]) -> T:
        """Retry while Lambda does not know a new role yet (IAM is eventually consistent, usually within seconds)."""
        return AWS_ROLE.run_blocking(call, lambda error: "cannot be assumed" in str(error), pause=self.pause)

    def pause(self, seconds: float) -> None:
        """Block for `seconds`. Raises `BackendFailed` if the deployer is closed meanwhile."""
        if self.stopped.wait(seconds):
            raise BackendFailed("the deployer was closed while it waited for AWS")


def engine_for(wanted: AwsFunction) -> ContainerEngine:
    """The container engine of this machine. Raises `BackendFailed` if none answers."""
    engine, reason = find_engine()
    if engine is None:
        assert wanted.image is not None, "an archive needs no engine"
        raise BackendFailed(
            f"the image of {wanted.name} has to be built, and no container engine answers here ({reason})",
            remedy="write its build context with `rollart rewards deploy FILE --render DIR`, build it elsewhere and "
            f"push it to the repository {wanted.settings.repository} with the tag {wanted.image.tag}: the next "
            "deployment uses it",
        )
    return engine


class DeploymentOvertaken(BackendFailed):
    """Another deployment of the function interfered between two steps of this one."""

    def __init__(self, name: str) -> None:
        super().__init__(f"other deployments of {name} get in between again and again", remedy="deploy it again")


class SmokeFailed(BackendFailed):
    """The trial of a new version failed. `report` is the bill of the trial, if there is one."""

    def __init__(self, message: str, bill: LambdaReport | None) -> None:
        super().__init__(message)
        self.report = bill


def _alias(found: Mapping[str, Any]) -> LambdaAlias:
    """An alias. While an alias with provisioned concurrency moves, Lambda gives it a second version with weight 1
    (terraform-provider-aws#48116), which is no canary."""
    weights = (found.get("RoutingConfig") or {}).get("AdditionalVersionWeights") or {}
    canary = next((str(n) for n, weight in weights.items() if 0.0 < float(weight) < 1.0), "")
    return LambdaAlias(
        name=str(found["Name"]),
        number=str(found["FunctionVersion"]),
        description=str(found.get("Description", "")),
        canary=canary,
        weight=float(weights[canary]) if canary else 0.0,
        revision=str(found.get("RevisionId", "")),
    )


def _variables(found: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a function with variables; none of another one."""
    variables = (found.get("Environment") or {}).get("Variables")
    if not variables:
        return {}
    key = {"KMSKeyArn": found["KMSKeyArn"]} if found.get("KMSKeyArn") else {}
    return {"Environment": {"Variables": dict(variables)}, **key}


def _version(found: Mapping[str, Any]) -> LambdaVersion:
    described = str(found.get("Description", ""))
    return LambdaVersion(
        number=str(found["Version"]),
        digest=described.removeprefix(DESCRIPTION_PREFIX) if described.startswith(DESCRIPTION_PREFIX) else "",
        settings={key: found.get(key) for key in _COMPARED} | _variables(found),
        package_type=str(found.get("PackageType", "Zip")),
        architecture=str(next(iter(found.get("Architectures", ())), "x86_64")),
        role=str(found["Role"]),
        arn=str(found["FunctionArn"]),
        created=str(found["LastModified"]).replace("+0000", "Z"),
    )
