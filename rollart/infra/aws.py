"""The AWS resources of a run's functions, independent of the template language: names, settings, archives,
permissions.

CloudFormation and SAM templates of the AWS parts: a bucket for weights and code, and the reward functions.

The AWS parts as Terraform's JSON. No test applies it: the tests read it and follow its references.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollart.errors import SpecError
from rollart.infra.files import RenderedFiles, json_text, yaml_text
from serverless.deploy.aws_function import AwsSettings, bundle, function_configuration
from serverless.deploy.package import Package

ALIAS = "live"
"""The alias that a run calls; `rollart rewards rollback` moves it."""

DIGEST_TAG = "rollart:digest"
"""The tag that marks a function of `rollart`; its value is the digest of the package."""

DESCRIPTION_PREFIX = "rollart:"

RESERVED_LOGICAL_NAMES = ("Bucket", "BucketPolicy", "ControllerPolicy", "FunctionsRole")
"""Logical names of a template's other resources."""

LOGICAL_NAME_SUFFIXES = ("", "Logs", "Live")
"""Suffixes of the logical names of a function's resources."""


@dataclass(frozen=True, slots=True)
class AwsFunction:
    """One Lambda function. `logical` is its name in a template, `archive` the code, at `key` in a bucket or directory;
    `settings` are Runtime, Handler, MemorySize and Timeout, by Lambda's names. `reserved` and `warm` 0: none."""

    name: str
    logical: str
    digest: str
    archive: bytes
    key: str
    settings: dict[str, Any]
    architecture: str
    retention_days: int
    reserved: int
    warm: int

    @property
    def description(self) -> str:
        return DESCRIPTION_PREFIX + self.digest

    @property
    def log_group(self) -> str:
        return f"/aws/lambda/{self.name}"


def aws_functions(packages: Sequence[Package], settings: AwsSettings) -> tuple[AwsFunction, ...]:
    """The functions as `rollart rewards deploy` would create them: the same archives under the same names, so that a
    run finds them deployed. Errors of `serverless` for settings that Lambda does not support; SpecError for names that
    are equal in a template."""
    found = tuple(_aws_function(package, settings) for package in packages)
    _check_logical_names({p.spec.name: f.logical for p, f in zip(packages, found, strict=True)})
    return found


def _check_logical_names(logical: Mapping[str, str]) -> None:
    taken = dict.fromkeys(map(str.lower, RESERVED_LOGICAL_NAMES), "a resource of another kind")
    for name, own in logical.items():
        us = f"function '{name}'"
        for part in LOGICAL_NAME_SUFFIXES:
            other = taken.setdefault((own + part).lower(), us)
            if other != us:
                raise SpecError(
                    f"{us} would be '{own + part}' in a template, as {other} (rule: letters and digits tell names "
                    "apart, case does not)",
                    remedy="rename the function",
                )


def _aws_function(package: Package, settings: AwsSettings) -> AwsFunction:
    spec, name = package.spec, settings.function_name(package.spec.name)
    wanted = function_configuration(spec, settings)
    archive = bundle(package, settings)
    return AwsFunction(
        name=name,
        logical="".join(part.capitalize() for part in re.split(r"[^A-Za-z0-9]+", spec.name)),
        digest=package.version,
        archive=archive,
        key=f"functions/{name}/{hashlib.sha256(archive).hexdigest()[:32]}.zip",
        settings=wanted,
        architecture=settings.architecture,
        retention_days=settings.log_retention_days,
        reserved=spec.concurrency if settings.reserve_concurrency else 0,
        warm=spec.warm,
    )


def archive_files(found: Sequence[AwsFunction]) -> dict[str, bytes]:
    return {function.key: function.archive for function in found}


def assume_lambda() -> dict[str, Any]:
    """The trust policy of the functions' role."""
    statement = {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}
    return {"Version": "2012-10-17", "Statement": [statement]}


def log_statement(log_groups: Sequence[Any]) -> dict[str, Any]:
    """Permits a function to write its own log, and nothing else: no access to accounts, buckets or other functions."""
    return {
        "Sid": "OwnLogs",
        "Effect": "Allow",
        "Action": ["logs:CreateLogStream", "logs:PutLogEvents"],
        "Resource": list(log_groups),
    }


def controller_statements(aliases: Sequence[Any], functions: Sequence[Any], bucket: Any, objects: Any) -> list[Any]:
    """The permissions of a run: to call the functions, if there are any, to verify that they match its packages, to
    keep the run's alias on each, with provisioned concurrency, and to transfer weights."""
    if not functions:
        return _weight_statements(bucket, objects)
    return [
        {"Sid": "Call", "Effect": "Allow", "Action": "lambda:InvokeFunction", "Resource": list(aliases)},
        {
            "Sid": "Look",
            "Effect": "Allow",
            "Action": [
                "lambda:GetFunction",
                "lambda:GetFunctionConcurrency",
                "lambda:GetFunctionConfiguration",
                "lambda:GetProvisionedConcurrencyConfig",
                "lambda:ListAliases",
                "lambda:ListVersionsByFunction",
            ],
            "Resource": [*functions, *aliases],
        },
        {
            "Sid": "OwnAlias",
            "Effect": "Allow",
            "Action": [
                "lambda:CreateAlias",
                "lambda:UpdateAlias",
                "lambda:DeleteAlias",
                "lambda:PutProvisionedConcurrencyConfig",
                "lambda:DeleteProvisionedConcurrencyConfig",
            ],
            "Resource": [*functions, *aliases],
        },
        *_weight_statements(bucket, objects),
    ]


def _weight_statements(bucket: Any, objects: Any) -> list[Any]:
    return [
        {
            "Sid": "Weights",
            "Effect": "Allow",
            "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
            "Resource": objects,
        },
        {"Sid": "ListWeights", "Effect": "Allow", "Action": "s3:ListBucket", "Resource": bucket},
    ]


def transport_statement(bucket: Any, objects: Any) -> dict[str, Any]:
    """Denies unencrypted access to the bucket."""
    return {
        "Sid": "OnlyTls",
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": [bucket, objects],
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }


CFN_VERSION = "2010-09-09"
SAM_TRANSFORM = "AWS::Serverless-2016-10-31"


def cloudformation(
    name: str, functions: Sequence[AwsFunction], *, role_arn: str = "", bucket: str = ""
) -> RenderedFiles:
    """`storage.yaml` makes the bucket (named `bucket`), which must hold the code before `functions.yaml` can be
    deployed."""
    template: dict[str, Any] = {
        "AWSTemplateFormatVersion": CFN_VERSION,
        "Description": f"Reward functions of rollart cluster {name}.",
        "Parameters": {
            "Bucket": {"Type": "String", "Description": "Bucket of the storage stack: the archives are there."}
        },
    }
    role = _cfn_role(functions, role_arn)
    resources = dict(role)
    for function in functions:
        resources |= _lambda_resources(function, _role_ref(role_arn))
    ref: Any = {"Ref": "Bucket"}
    arn = {"Fn::Sub": "arn:${AWS::Partition}:s3:::${Bucket}"}
    objects = {"Fn::Sub": "arn:${AWS::Partition}:s3:::${Bucket}/*"}
    resources["ControllerPolicy"] = _controller_policy(functions, arn, objects)
    template |= {"Resources": resources, "Outputs": _outputs(functions, ref)}
    storage = {
        "AWSTemplateFormatVersion": CFN_VERSION,
        "Description": f"Weights, artefacts and code of rollart cluster {name}.",
        "Resources": _cfn_bucket(bucket),
        "Outputs": {"Bucket": {"Value": {"Ref": "Bucket"}}},
    }
    about = f"Rendered by `rollart infra render --target cfn` for cluster {name}: change the spec, not this."
    files = {
        "storage.yaml": yaml_text(storage, about=about),
        "functions.yaml": yaml_text(template, about=about),
        **archive_files(functions),
    }
    return RenderedFiles(files, _cfn_steps(name, code=bool(functions)))


def sam(name: str, functions: Sequence[AwsFunction], *, role_arn: str = "", bucket: str = "") -> RenderedFiles:
    """`template.yaml` alone: SAM's client uploads the archives, to a bucket of its own."""
    resources = _cfn_bucket(bucket) | _cfn_role(functions, role_arn)
    for function in functions:
        resources |= _sam_resources(function, _role_ref(role_arn))
    arn = {"Fn::GetAtt": ["Bucket", "Arn"]}
    resources["ControllerPolicy"] = _controller_policy(functions, arn, {"Fn::Sub": "${Bucket.Arn}/*"})
    template = {
        "AWSTemplateFormatVersion": CFN_VERSION,
        "Transform": SAM_TRANSFORM,
        "Description": f"Reward functions, weights and artefacts of rollart cluster {name}.",
        "Resources": resources,
        "Outputs": _outputs(functions, {"Ref": "Bucket"}),
    }
    about = f"Rendered by `rollart infra render --target sam` for cluster {name}: change the spec, not this."
    files = {"template.yaml": yaml_text(template, about=about), **archive_files(functions)}
    step = f"sam deploy --template-file template.yaml --stack-name {name} --resolve-s3 --capabilities CAPABILITY_IAM"
    return RenderedFiles(files, (step,))


def _cfn_steps(name: str, *, code: bool) -> tuple[str, ...]:
    deploy = "aws cloudformation deploy --template-file"
    bucket = (
        f"$(aws cloudformation describe-stacks --stack-name {name}-storage "
        "--query 'Stacks[0].Outputs[0].OutputValue' --output text)"
    )
    return (
        f"{deploy} storage.yaml --stack-name {name}-storage",
        f"BUCKET={bucket}",
        *(("aws s3 cp functions s3://$BUCKET/functions --recursive",) if code else ()),
        f"{deploy} functions.yaml --stack-name {name}-functions --parameter-overrides Bucket=$BUCKET "
        "--capabilities CAPABILITY_IAM",
    )


def _cfn_bucket(name: str) -> dict[str, Any]:
    """The bucket outlives its stack, since it holds the weights of runs. Unfinished uploads are removed after a day.
    `name` '': AWS chooses the name."""
    abort = {"Id": "AbortUploads", "Status": "Enabled", "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}
    encryption = [{"ServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]
    blocked = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")
    arn, objects = {"Fn::GetAtt": ["Bucket", "Arn"]}, {"Fn::Sub": "${Bucket.Arn}/*"}
    return {
        "Bucket": {
            "Type": "AWS::S3::Bucket",
            "DeletionPolicy": "Retain",
            "UpdateReplacePolicy": "Retain",
            "Properties": {
                **({"BucketName": name} if name else {}),
                "BucketEncryption": {"ServerSideEncryptionConfiguration": encryption},
                "OwnershipControls": {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]},
                "PublicAccessBlockConfiguration": dict.fromkeys(blocked, True),
                "LifecycleConfiguration": {"Rules": [abort]},
            },
        },
        "BucketPolicy": {
            "Type": "AWS::S3::BucketPolicy",
            "Properties": {
                "Bucket": {"Ref": "Bucket"},
                "PolicyDocument": {"Version": "2012-10-17", "Statement": [transport_statement(arn, objects)]},
            },
        },
    }


def _cfn_role(functions: Sequence[AwsFunction], role_arn: str) -> dict[str, Any]:
    if role_arn or not functions:
        return {}
    groups = [{"Fn::GetAtt": [f"{f.logical}Logs", "Arn"]} for f in functions]
    policy = {"Version": "2012-10-17", "Statement": [log_statement(groups)]}
    return {
        "FunctionsRole": {
            "Type": "AWS::IAM::Role",
            "Properties": {
                "AssumeRolePolicyDocument": assume_lambda(),
                "Policies": [{"PolicyName": "own-logs", "PolicyDocument": policy}],
            },
        }
    }


def _role_ref(role_arn: str) -> Any:
    return role_arn or {"Fn::GetAtt": ["FunctionsRole", "Arn"]}


def _logs(function: AwsFunction) -> dict[str, Any]:
    return {
        f"{function.logical}Logs": {
            "Type": "AWS::Logs::LogGroup",
            "DeletionPolicy": "Delete",
            "UpdateReplacePolicy": "Retain",
            "Properties": {"LogGroupName": function.log_group, "RetentionInDays": function.retention_days},
        }
    }


def _lambda_resources(function: AwsFunction, role: Any) -> dict[str, Any]:
    """The function, a version that stays when the next one is deployed (for rollbacks), and the alias that a run
    calls."""
    logical = function.logical
    version = f"{logical}V{function.digest[:12]}"
    alias: dict[str, Any] = {
        "FunctionName": {"Ref": logical},
        "Name": ALIAS,
        "FunctionVersion": {"Fn::GetAtt": [version, "Version"]},
    }
    if function.warm:
        alias["ProvisionedConcurrencyConfig"] = {"ProvisionedConcurrentExecutions": function.warm}
    body = {
        "FunctionName": function.name,
        "Description": function.description,
        "PackageType": "Zip",
        "Code": {"S3Bucket": {"Ref": "Bucket"}, "S3Key": function.key},
        **function.settings,
        "Architectures": [function.architecture],
        "Role": role,
        "Tags": [{"Key": DIGEST_TAG, "Value": function.digest}],
    }
    if function.reserved:
        body["ReservedConcurrentExecutions"] = function.reserved
    return {
        **_logs(function),
        logical: {"Type": "AWS::Lambda::Function", "DependsOn": f"{logical}Logs", "Properties": body},
        version: {
            "Type": "AWS::Lambda::Version",
            "DeletionPolicy": "Retain",
            "UpdateReplacePolicy": "Retain",
            "Properties": {"FunctionName": {"Ref": logical}, "Description": function.description},
        },
        f"{logical}Live": {"Type": "AWS::Lambda::Alias", "Properties": alias},
    }


def _sam_resources(function: AwsFunction, role: Any) -> dict[str, Any]:
    """SAM makes the version and its alias."""
    body = {
        "FunctionName": function.name,
        "Description": function.description,
        "PackageType": "Zip",
        "CodeUri": function.key,
        **function.settings,
        "Architectures": [function.architecture],
        "Role": role,
        "Tags": {DIGEST_TAG: function.digest},
        "AutoPublishAlias": ALIAS,
        "VersionDescription": function.description,
    }
    if function.reserved:
        body["ReservedConcurrentExecutions"] = function.reserved
    if function.warm:
        body["ProvisionedConcurrencyConfig"] = {"ProvisionedConcurrentExecutions": function.warm}
    logical = function.logical
    resource = {"Type": "AWS::Serverless::Function", "DependsOn": f"{logical}Logs", "Properties": body}
    return {**_logs(function), logical: resource}


def _controller_policy(functions: Sequence[AwsFunction], bucket: Any, objects: Any) -> dict[str, Any]:
    """The permissions of the controller and the engines: attach the policy to their role."""
    arns = [{"Fn::GetAtt": [f.logical, "Arn"]} for f in functions]
    aliases = [{"Fn::Sub": f"${{{f.logical}.Arn}}:*"} for f in functions]
    return {
        "Type": "AWS::IAM::ManagedPolicy",
        "Properties": {
            "Description": "A rollart run: calls its functions, moves its weights.",
            "PolicyDocument": {
                "Version": "2012-10-17",
                "Statement": controller_statements(aliases, arns, bucket, objects),
            },
        },
    }


def _outputs(functions: Sequence[AwsFunction], bucket: Any) -> dict[str, Any]:
    found = {f"{f.logical}Arn": {"Value": {"Fn::GetAtt": [f.logical, "Arn"]}} for f in functions}
    return {"Bucket": {"Value": bucket}, **found, "ControllerPolicy": {"Value": {"Ref": "ControllerPolicy"}}}


def terraform(
    name: str, functions: Sequence[AwsFunction], *, region: str, role_arn: str = "", bucket: str = ""
) -> RenderedFiles:
    """`main.tf.json` and the archives that it uploads. `region` '': taken from the provider's environment; `bucket`
    names the bucket."""
    resources: dict[str, dict[str, Any]] = {}
    _terraform_bucket(resources, name, bucket)
    role = role_arn or (_terraform_role(resources, name, functions) if functions else "")
    for function in functions:
        _terraform_function(resources, function, role)
    arn = "${aws_s3_bucket.weights.arn}"
    labels = [f"aws_lambda_function.{_terraform_label(f)}.arn" for f in functions]
    statements = controller_statements([f"${{{a}}}:*" for a in labels], [f"${{{a}}}" for a in labels], arn, f"{arn}/*")
    _terraform_add(
        resources,
        "aws_iam_policy",
        "controller",
        {
            "name_prefix": f"{name}-controller-",
            "description": "A rollart run: calls its functions, moves its weights.",
            "policy": _terraform_document(statements),
        },
    )
    main = {
        "//": f"Rendered by `rollart infra render --target terraform` for cluster {name}: change the spec, not this.",
        "terraform": {
            "required_version": ">= 1.6.0",
            "required_providers": {"aws": {"source": "hashicorp/aws", "version": ">= 5.40.0, < 7.0.0"}},
        },
        "provider": {"aws": {"region": region} if region else {}},
        "resource": resources,
        "output": {
            "bucket": {"value": "${aws_s3_bucket.weights.bucket}"},
            "controller_policy": {"value": "${aws_iam_policy.controller.arn}"},
        },
    }
    return RenderedFiles(
        {"main.tf.json": json_text(main), **archive_files(functions)}, ("terraform init && terraform plan",)
    )


def _terraform_add(resources: dict[str, dict[str, Any]], kind: str, label: str, body: dict[str, Any]) -> None:
    resources.setdefault(kind, {})[label] = body


def _terraform_document(statements: Sequence[Any]) -> str:
    """A policy is JSON in a text; Terraform substitutes `${...}` in it."""
    import json

    return json.dumps({"Version": "2012-10-17", "Statement": list(statements)})


def _terraform_label(function: AwsFunction) -> str:
    """Terraform's names begin with a letter or an underscore."""
    label = function.logical.lower()
    return f"_{label}" if label[:1].isdigit() else label


def _terraform_bucket(resources: dict[str, dict[str, Any]], name: str, bucket_name: str) -> None:
    bucket_ref = {"bucket": "${aws_s3_bucket.weights.id}"}
    arn = "${aws_s3_bucket.weights.arn}"
    named = {"bucket": bucket_name} if bucket_name else {"bucket_prefix": f"{name[:30]}-"}
    _terraform_add(resources, "aws_s3_bucket", "weights", {**named, "force_destroy": False})
    _terraform_add(
        resources,
        "aws_s3_bucket_public_access_block",
        "weights",
        bucket_ref
        | {
            "block_public_acls": True,
            "block_public_policy": True,
            "ignore_public_acls": True,
            "restrict_public_buckets": True,
        },
    )
    _terraform_add(
        resources,
        "aws_s3_bucket_ownership_controls",
        "weights",
        bucket_ref | {"rule": {"object_ownership": "BucketOwnerEnforced"}},
    )
    _terraform_add(
        resources,
        "aws_s3_bucket_server_side_encryption_configuration",
        "weights",
        bucket_ref | {"rule": {"apply_server_side_encryption_by_default": {"sse_algorithm": "AES256"}}},
    )
    _terraform_add(
        resources,
        "aws_s3_bucket_lifecycle_configuration",
        "weights",
        bucket_ref
        | {
            "rule": {
                "id": "abort-uploads",
                "status": "Enabled",
                "filter": {},
                "abort_incomplete_multipart_upload": {"days_after_initiation": 1},
            }
        },
    )
    policy = _terraform_document([transport_statement(arn, f"{arn}/*")])
    _terraform_add(resources, "aws_s3_bucket_policy", "weights", bucket_ref | {"policy": policy})


def _terraform_role(resources: dict[str, dict[str, Any]], name: str, functions: Sequence[AwsFunction]) -> str:
    groups = [f"${{aws_cloudwatch_log_group.{_terraform_label(f)}.arn}}:*" for f in functions]
    _terraform_add(
        resources,
        "aws_iam_role",
        "functions",
        {
            "name_prefix": f"{name[:26]}-functions-",
            "assume_role_policy": _terraform_document(assume_lambda()["Statement"]),
        },
    )
    _terraform_add(
        resources,
        "aws_iam_role_policy",
        "own_logs",
        {
            "name": "own-logs",
            "role": "${aws_iam_role.functions.id}",
            "policy": _terraform_document([log_statement(groups)]),
        },
    )
    return "${aws_iam_role.functions.arn}"


def _terraform_function(resources: dict[str, dict[str, Any]], function: AwsFunction, role: str) -> None:
    label = _terraform_label(function)
    group = {"name": function.log_group, "retention_in_days": function.retention_days}
    _terraform_add(resources, "aws_cloudwatch_log_group", label, group)
    file = f"${{path.module}}/{function.key}"
    body: dict[str, Any] = {
        "function_name": function.name,
        "description": function.description,
        "package_type": "Zip",
        "filename": file,
        "source_code_hash": f'${{filebase64sha256("{file}")}}',
        "runtime": function.settings["Runtime"],
        "handler": function.settings["Handler"],
        "memory_size": function.settings["MemorySize"],
        "timeout": function.settings["Timeout"],
        "architectures": [function.architecture],
        "role": role,
        "publish": True,
        "tags": {DIGEST_TAG: function.digest},
        "depends_on": [f"aws_cloudwatch_log_group.{label}"],
    }
    if function.reserved:
        body["reserved_concurrent_executions"] = function.reserved
    _terraform_add(resources, "aws_lambda_function", label, body)
    function_ref = f"aws_lambda_function.{label}"
    _terraform_add(
        resources,
        "aws_lambda_alias",
        label,
        {
            "name": ALIAS,
            "function_name": f"${{{function_ref}.function_name}}",
            "function_version": f"${{{function_ref}.version}}",
        },
    )
    if function.warm:
        _terraform_add(
            resources,
            "aws_lambda_provisioned_concurrency_config",
            label,
            {
                "function_name": f"${{{function_ref}.function_name}}",
                "qualifier": f"${{aws_lambda_alias.{label}.name}}",
                "provisioned_concurrent_executions": function.warm,
            },
        )
