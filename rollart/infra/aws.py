"""The AWS parts of a cluster as templates: CloudFormation, SAM, and Terraform's JSON.

The parts are a bucket for weights and code, the reward functions of a run, and the permissions of a run. Functions are
described by `serverless.deploy.aws_function`, as `rollart rewards deploy` creates them, so that a run finds them
deployed. No test applies Terraform's JSON: the tests read it and follow its references.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollart.errors import SpecError
from rollart.infra.files import RenderedFiles, header, json_text, refuse_image, yaml_text
from serverless.deploy.aws_function import (
    ALIAS,
    ASSUME_ROLE,
    AwsFunction,
    AwsSettings,
    aws_function,
    log_permission,
    secret_permissions,
)
from serverless.deploy.package import Package
from serverless.providers.payloads import PREFIX
from serverless.secrets import Secrets

CFN_VERSION = "2010-09-09"
SAM_TRANSFORM = "AWS::Serverless-2016-10-31"

RESERVED_LOGICAL_NAMES = ("Bucket", "BucketPolicy", "ControllerPolicy", "FunctionsRole")
"""Logical names of a template's other resources."""

LOGICAL_NAME_SUFFIXES = ("", "Logs", "Live", "Role")
"""Suffixes of the logical names of a function's resources."""

CONTROLLER_DESCRIPTION = "A rollart run: calls its functions, moves its weights."
PUBLIC_ACCESS = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")
"""The kinds of public access to a bucket, all of which are blocked."""


def aws_functions(packages: Sequence[Package], settings: AwsSettings, secrets: Secrets) -> tuple[AwsFunction, ...]:
    """The functions as `rollart rewards deploy` would create them: the same archives under the same names, so that a
    run finds them deployed. Errors of `serverless` for settings that Lambda does not support; SpecError for names that
    are equal in a template, and for secrets whose values would be in it."""
    for package in packages:
        if stored := secrets.stored_in_lambda(package.spec):
            raise SpecError(
                f"the value of the secret {stored[0]} of function '{package.spec.name}' would be in the rendered files "
                "(rule: they hold no values, and functions.secrets has lambda_env)",
                remedy="name an aws_secret or ssm, or deploy the function by `rollart rewards deploy`",
            )
    found = tuple(aws_function(package, settings, secrets) for package in packages)
    taken = dict.fromkeys(map(str.lower, RESERVED_LOGICAL_NAMES), "a resource of another kind")
    for function in found:
        refuse_image(function.package.spec)
        us = f"function '{function.package.spec.name}'"
        for suffix in LOGICAL_NAME_SUFFIXES:
            name = _logical(function) + suffix
            other = taken.setdefault(name.lower(), us)
            if other != us:
                raise SpecError(
                    f"{us} would be '{name}' in a template, as {other} (rule: letters and digits tell names apart, "
                    "case does not)",
                    remedy="rename the function",
                )
    return found


def cloudformation(
    name: str, functions: Sequence[AwsFunction], *, role_arn: str = "", bucket: str = ""
) -> RenderedFiles:
    """`storage.yaml` makes the bucket (named `bucket`), which must hold the code before `functions.yaml` can be
    deployed."""
    parameter = {"Type": "String", "Description": "Bucket of the storage stack: the archives are there."}
    resources, roles = _cfn_roles(functions, role_arn)
    for function in functions:
        resources |= _cfn_function(function, roles[function.name])
    arn = "arn:${AWS::Partition}:s3:::${Bucket}"
    resources["ControllerPolicy"] = _cfn_controller_policy(functions, {"Fn::Sub": arn}, {"Fn::Sub": f"{arn}/*"})
    template = {
        "AWSTemplateFormatVersion": CFN_VERSION,
        "Description": f"Reward functions of rollart cluster {name}.",
        "Parameters": {"Bucket": parameter},
        "Resources": resources,
        "Outputs": _cfn_outputs(functions),
    }
    storage = {
        "AWSTemplateFormatVersion": CFN_VERSION,
        "Description": f"Weights, artefacts and code of rollart cluster {name}.",
        "Resources": _cfn_bucket(bucket),
        "Outputs": {"Bucket": {"Value": {"Ref": "Bucket"}}},
    }
    about = header("cfn", name)
    files = {
        "storage.yaml": yaml_text(storage, about=about),
        "functions.yaml": yaml_text(template, about=about),
        **_archives(functions),
    }
    deploy = "aws cloudformation deploy --template-file"
    stored = (
        f"$(aws cloudformation describe-stacks --stack-name {name}-storage "
        "--query 'Stacks[0].Outputs[0].OutputValue' --output text)"
    )
    steps = (
        f"{deploy} storage.yaml --stack-name {name}-storage",
        f"BUCKET={stored}",
        *(("aws s3 cp functions s3://$BUCKET/functions --recursive",) if functions else ()),
        f"{deploy} functions.yaml --stack-name {name}-functions --parameter-overrides Bucket=$BUCKET "
        "--capabilities CAPABILITY_IAM",
    )
    return RenderedFiles(files, steps)


def sam(name: str, functions: Sequence[AwsFunction], *, role_arn: str = "", bucket: str = "") -> RenderedFiles:
    """`template.yaml` alone: SAM's client uploads the archives, to a bucket of its own."""
    own_roles, roles = _cfn_roles(functions, role_arn)
    resources = _cfn_bucket(bucket) | own_roles
    for function in functions:
        logical = _logical(function)
        properties = _cfn_properties(function, {"CodeUri": _archive_key(function)}, roles[function.name])
        # SAM makes the version and its alias.
        properties |= {"AutoPublishAlias": ALIAS, "VersionDescription": function.description}
        properties |= _reserved(function) | _provisioned(function)
        resources |= _cfn_logs(function)
        resources[logical] = _cfn("AWS::Serverless::Function", properties, after=f"{logical}Logs")
    arn = {"Fn::GetAtt": ["Bucket", "Arn"]}
    resources["ControllerPolicy"] = _cfn_controller_policy(functions, arn, {"Fn::Sub": "${Bucket.Arn}/*"})
    template = {
        "AWSTemplateFormatVersion": CFN_VERSION,
        "Transform": SAM_TRANSFORM,
        "Description": f"Reward functions, weights and artefacts of rollart cluster {name}.",
        "Resources": resources,
        "Outputs": _cfn_outputs(functions),
    }
    files = {"template.yaml": yaml_text(template, about=header("sam", name)), **_archives(functions)}
    step = f"sam deploy --template-file template.yaml --stack-name {name} --resolve-s3 --capabilities CAPABILITY_IAM"
    return RenderedFiles(files, (step,))


def terraform(
    name: str, functions: Sequence[AwsFunction], *, region: str, role_arn: str = "", bucket: str = ""
) -> RenderedFiles:
    """`main.tf.json` and the archives that it uploads. `region` '': taken from the provider's environment; `bucket`
    names the bucket."""
    parts = _terraform_bucket(name, bucket)
    own_roles, roles = _terraform_roles(name, functions, role_arn)
    parts += own_roles
    for function in functions:
        parts += _terraform_function(function, roles[function.name])
    arn = "${aws_s3_bucket.weights.arn}"
    arns = [f"${{aws_lambda_function.{_terraform_label(f)}.arn}}" for f in functions]
    statements = _controller_statements([f"{a}:*" for a in arns], arns, arn, f"{arn}/*")
    controller = {
        "name_prefix": f"{name}-controller-",
        "description": CONTROLLER_DESCRIPTION,
        "policy": json.dumps(_policy(statements)),
    }
    parts.append(("aws_iam_policy", "controller", controller))
    resources: dict[str, dict[str, Any]] = {}
    for kind, label, body in parts:
        resources.setdefault(kind, {})[label] = body
    main = {
        "//": header("terraform", name),
        "terraform": {
            "required_version": ">= 1.6.0",
            "required_providers": {"aws": {"source": "hashicorp/aws", "version": ">= 5.40.0, < 7.0.0"}},
        },
        "provider": {"aws": {"region": region} if region else {}},
        **({"data": _ACCOUNT} if any(_ACCOUNT_PREFIX in str(part) for part in own_roles) else {}),
        "resource": resources,
        "output": {
            "bucket": {"value": "${aws_s3_bucket.weights.bucket}"},
            "controller_policy": {"value": "${aws_iam_policy.controller.arn}"},
        },
    }
    return RenderedFiles(
        {"main.tf.json": json_text(main), **_archives(functions)}, ("terraform init && terraform plan",)
    )


# For every template language


def _logical(function: AwsFunction) -> str:
    """The name of a function in a template."""
    return "".join(part.capitalize() for part in re.split(r"[^A-Za-z0-9]+", function.package.spec.name))


def _archive_key(function: AwsFunction) -> str:
    """The path of the archive in a bucket or directory."""
    return f"functions/{function.name}/{hashlib.sha256(function.archive).hexdigest()[:32]}.zip"


def _archives(functions: Sequence[AwsFunction]) -> dict[str, bytes]:
    return {_archive_key(function): function.archive for function in functions}


def _role_groups(functions: Sequence[AwsFunction]) -> list[tuple[str, list[AwsFunction]]]:
    """The functions of each role, with the role's name in a template."""
    common = [function for function in functions if not function.references]
    own = [(f"{_logical(function)}Role", [function]) for function in functions if function.references]
    return [*([("FunctionsRole", common)] if common else []), *own]


def _policy(statements: Sequence[Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def _controller_statements(aliases: Sequence[Any], functions: Sequence[Any], bucket: Any, objects: Any) -> list[Any]:
    """The permissions of a run: to call the functions, if there are any, to verify that they match its packages, to
    keep the run's alias on each, with provisioned concurrency, and to transfer weights."""
    reads = ["GetFunction", "GetFunctionConcurrency", "GetFunctionConfiguration", "GetProvisionedConcurrencyConfig"]
    reads += ["ListAliases", "ListVersionsByFunction"]
    writes = ["CreateAlias", "UpdateAlias", "DeleteAlias"]
    writes += ["PutProvisionedConcurrencyConfig", "DeleteProvisionedConcurrencyConfig"]
    moves = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")
    both = [*functions, *aliases]
    statements = [
        _allow("Call", "lambda:InvokeFunction", list(aliases)),
        _allow("Look", [f"lambda:{action}" for action in reads], both),
        _allow("OwnAlias", [f"lambda:{action}" for action in writes], both),
    ]
    weights = [_allow("Weights", list(moves), objects), _allow("ListWeights", "s3:ListBucket", bucket)]
    return [*(statements if functions else []), *weights]


def _allow(sid: str, action: str | list[str], resource: Any) -> dict[str, Any]:
    return {"Sid": sid, "Effect": "Allow", "Action": action, "Resource": resource}


def _only_tls(bucket: Any, objects: Any) -> dict[str, Any]:
    """Denies unencrypted access to the bucket."""
    statement = {
        "Sid": "OnlyTls",
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": [bucket, objects],
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }
    return _policy([statement])


# CloudFormation and SAM


def _cfn_bucket(name: str) -> dict[str, Any]:
    """The bucket outlives its stack, since it holds the weights of runs. Unfinished uploads, and payloads of calls
    whose caller was killed, are removed after a day. `name` '': AWS chooses the name."""
    abort = {"Id": "AbortUploads", "Status": "Enabled", "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}
    expire = {"Id": "ExpirePayloads", "Status": "Enabled", "Prefix": PREFIX, "ExpirationInDays": 1}
    encryption = [{"ServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]
    arn, objects = {"Fn::GetAtt": ["Bucket", "Arn"]}, {"Fn::Sub": "${Bucket.Arn}/*"}
    properties = {
        **({"BucketName": name} if name else {}),
        "BucketEncryption": {"ServerSideEncryptionConfiguration": encryption},
        "OwnershipControls": {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]},
        "PublicAccessBlockConfiguration": dict.fromkeys(PUBLIC_ACCESS, True),
        "LifecycleConfiguration": {"Rules": [abort, expire]},
    }
    policy = {"Bucket": {"Ref": "Bucket"}, "PolicyDocument": _only_tls(arn, objects)}
    return {
        "Bucket": _cfn("AWS::S3::Bucket", properties, kept="Retain"),
        "BucketPolicy": _cfn("AWS::S3::BucketPolicy", policy),
    }


def _cfn(kind: str, properties: Mapping[str, Any], *, kept: str = "", after: str = "") -> dict[str, Any]:
    """A resource. `kept`: what becomes of it with its stack; a replaced one is then always kept. `after`: the resource
    that it depends on."""
    policies = {"DeletionPolicy": kept, "UpdateReplacePolicy": "Retain"} if kept else {}
    return {"Type": kind, **policies, **({"DependsOn": after} if after else {}), "Properties": properties}


def _cfn_roles(functions: Sequence[AwsFunction], role_arn: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Roles for the functions, if none is given, and the reference to each function's by its name. Functions without
    secrets have a role in common; each other one has its own, which reads its secrets alone."""
    if role_arn:
        return {}, {function.name: role_arn for function in functions}
    resources: dict[str, Any] = {}
    roles: dict[str, Any] = {}
    for logical, group in _role_groups(functions):
        logs = log_permission([{"Fn::GetAtt": [f"{_logical(f)}Logs", "Arn"]} for f in group])
        policies = [{"PolicyName": "own-logs", "PolicyDocument": _policy([logs])}]
        if group[0].references:
            # AWS makes the ARN of a secret by name, of the stack's account and region.
            statements = secret_permissions(group[0], "arn:${{AWS::Partition}}:{}:${{AWS::Region}}:${{AWS::AccountId}}")
            for statement in statements:
                statement["Resource"] = [{"Fn::Sub": r} if "${" in r else r for r in statement["Resource"]]
            policies.append({"PolicyName": "own-secrets", "PolicyDocument": _policy(statements)})
        properties = {"AssumeRolePolicyDocument": ASSUME_ROLE, "Policies": policies}
        resources[logical] = _cfn("AWS::IAM::Role", properties)
        roles |= {function.name: {"Fn::GetAtt": [logical, "Arn"]} for function in group}
    return resources, roles


def _cfn_properties(function: AwsFunction, code: Mapping[str, Any], role: Any) -> dict[str, Any]:
    """The properties of a function, by CloudFormation's names."""
    return {"KmsKeyArn" if k == "KMSKeyArn" else k: v for k, v in function.properties(code, role).items()}


def _cfn_logs(function: AwsFunction) -> dict[str, Any]:
    properties = {"LogGroupName": function.log_group, "RetentionInDays": function.settings.log_retention_days}
    return {f"{_logical(function)}Logs": _cfn("AWS::Logs::LogGroup", properties, kept="Delete")}


def _cfn_function(function: AwsFunction, role: Any) -> dict[str, Any]:
    """The function, a version that stays when the next one is deployed (for rollbacks), and the alias that a run
    calls."""
    logical = _logical(function)
    version = f"{logical}V{function.package.version[:12]}"
    code = {"S3Bucket": {"Ref": "Bucket"}, "S3Key": _archive_key(function)}
    properties = _cfn_properties(function, {"Code": code}, role)
    properties["Tags"] = [{"Key": key, "Value": value} for key, value in properties["Tags"].items()]
    ref: dict[str, Any] = {"FunctionName": {"Ref": logical}}
    alias = ref | {"Name": ALIAS, "FunctionVersion": {"Fn::GetAtt": [version, "Version"]}}
    return {
        **_cfn_logs(function),
        logical: _cfn("AWS::Lambda::Function", properties | _reserved(function), after=f"{logical}Logs"),
        version: _cfn("AWS::Lambda::Version", ref | {"Description": function.description}, kept="Retain"),
        f"{logical}Live": _cfn("AWS::Lambda::Alias", alias | _provisioned(function)),
    }


def _reserved(function: AwsFunction) -> dict[str, Any]:
    return {"ReservedConcurrentExecutions": function.reserved} if function.reserved else {}


def _provisioned(function: AwsFunction) -> dict[str, Any]:
    warm = function.package.spec.warm
    return {"ProvisionedConcurrencyConfig": {"ProvisionedConcurrentExecutions": warm}} if warm else {}


def _cfn_controller_policy(functions: Sequence[AwsFunction], bucket: Any, objects: Any) -> dict[str, Any]:
    """The permissions of the controller and the engines: attach the policy to their role."""
    arns = [{"Fn::GetAtt": [_logical(f), "Arn"]} for f in functions]
    aliases = [{"Fn::Sub": f"${{{_logical(f)}.Arn}}:*"} for f in functions]
    document = _policy(_controller_statements(aliases, arns, bucket, objects))
    return _cfn("AWS::IAM::ManagedPolicy", {"Description": CONTROLLER_DESCRIPTION, "PolicyDocument": document})


def _cfn_outputs(functions: Sequence[AwsFunction]) -> dict[str, Any]:
    arns = {f"{_logical(f)}Arn": {"Value": {"Fn::GetAtt": [_logical(f), "Arn"]}} for f in functions}
    return {"Bucket": {"Value": {"Ref": "Bucket"}}, **arns, "ControllerPolicy": {"Value": {"Ref": "ControllerPolicy"}}}


# Terraform

_Part = tuple[str, str, dict[str, Any]]
"""Kind, label and body of a resource."""


def _snake(properties: Mapping[str, Any]) -> dict[str, Any]:
    """AWS's names as Terraform writes them."""
    return {re.sub(r"(?<!^)(?=[A-Z])", "_", key).lower(): value for key, value in properties.items()}


def _terraform_literal(text: str) -> str:
    """A text in which Terraform finds no expression."""
    return text.replace("${", "$${").replace("%{", "%%{")


def _terraform_label(function: AwsFunction) -> str:
    """Terraform's names begin with a letter or an underscore."""
    label = _logical(function).lower()
    return f"_{label}" if label[:1].isdigit() else label


def _terraform_bucket(name: str, bucket_name: str) -> list[_Part]:
    arn = "${aws_s3_bucket.weights.arn}"
    named = {"bucket": bucket_name} if bucket_name else {"bucket_prefix": f"{name[:30]}-"}
    abort = {"id": "abort-uploads", "filter": {}, "abort_incomplete_multipart_upload": {"days_after_initiation": 1}}
    expire = {"id": "expire-payloads", "filter": {"prefix": PREFIX}, "expiration": {"days": 1}}
    lifecycle = [rule | {"status": "Enabled"} for rule in (abort, expire)]
    encryption = {"apply_server_side_encryption_by_default": {"sse_algorithm": "AES256"}}
    aspects: dict[str, dict[str, Any]] = {
        "public_access_block": _snake(dict.fromkeys(PUBLIC_ACCESS, True)),
        "ownership_controls": {"rule": {"object_ownership": "BucketOwnerEnforced"}},
        "server_side_encryption_configuration": {"rule": encryption},
        "lifecycle_configuration": {"rule": lifecycle},
        "policy": {"policy": json.dumps(_only_tls(arn, f"{arn}/*"))},
    }
    ref = {"bucket": "${aws_s3_bucket.weights.id}"}
    parts: list[_Part] = [("aws_s3_bucket", "weights", {**named, "force_destroy": False})]
    return parts + [(f"aws_s3_bucket_{kind}", "weights", ref | body) for kind, body in aspects.items()]


_ACCOUNT: dict[str, dict[str, Any]] = {
    kind: {"current": {}} for kind in ("aws_partition", "aws_region", "aws_caller_identity")
}
_ACCOUNT_PREFIX = "data.aws_caller_identity.current"


def _terraform_roles(name: str, functions: Sequence[AwsFunction], role_arn: str) -> tuple[list[_Part], dict[str, str]]:
    """See `_cfn_roles`."""
    if role_arn:
        return [], {function.name: role_arn for function in functions}
    parts: list[_Part] = []
    roles: dict[str, str] = {}
    for _, group in _role_groups(functions):
        own = bool(group[0].references)
        label = _terraform_label(group[0]) if own else "functions"
        role = {"name_prefix": f"{name[:26]}-functions-", "assume_role_policy": json.dumps(ASSUME_ROLE)}
        groups = [f"${{aws_cloudwatch_log_group.{_terraform_label(f)}.arn}}:*" for f in group]
        logs = json.dumps(_policy([log_permission(groups)]))
        ref = f"${{aws_iam_role.{label}.id}}"
        parts.append(("aws_iam_role", label, role))
        named = f"{label}_own_logs" if own else "own_logs"
        parts.append(("aws_iam_role_policy", named, {"name": "own-logs", "role": ref, "policy": logs}))
        if own:
            prefix = "arn:${{data.aws_partition.current.partition}}:{}:${{data.aws_region.current.name}}"
            statements = secret_permissions(group[0], f"{prefix}:${{{{{_ACCOUNT_PREFIX}.account_id}}}}")
            policy = {"name": "own-secrets", "role": ref, "policy": json.dumps(_policy(statements))}
            parts.append(("aws_iam_role_policy", f"{label}_own_secrets", policy))
        roles |= {function.name: f"${{aws_iam_role.{label}.arn}}" for function in group}
    return parts, roles


def _terraform_function(function: AwsFunction, role: str) -> list[_Part]:
    label = _terraform_label(function)
    file = f"${{path.module}}/{_archive_key(function)}"
    code = {"Filename": file, "SourceCodeHash": f'${{filebase64sha256("{file}")}}'}
    properties = function.properties(code, role, Publish=True)
    properties |= {"DependsOn": [f"aws_cloudwatch_log_group.{label}"]} | _reserved(function)
    key = {"kms_key_arn": arn} if (arn := properties.pop("KMSKeyArn", "")) else {}
    if "Environment" in properties:
        variables = properties["Environment"]["Variables"]
        properties["Environment"] = {"variables": {k: _terraform_literal(v) for k, v in variables.items()}}
    group = {"name": function.log_group, "retention_in_days": function.settings.log_retention_days}
    ref = {"function_name": f"${{aws_lambda_function.{label}.function_name}}"}
    alias = {"name": ALIAS, **ref, "function_version": f"${{aws_lambda_function.{label}.version}}"}
    parts: list[_Part] = [
        ("aws_cloudwatch_log_group", label, group),
        ("aws_lambda_function", label, _snake(properties) | key),
        ("aws_lambda_alias", label, alias),
    ]
    if function.package.spec.warm:
        warm = {
            **ref,
            "qualifier": f"${{aws_lambda_alias.{label}.name}}",
            "provisioned_concurrent_executions": function.package.spec.warm,
        }
        parts.append(("aws_lambda_provisioned_concurrency_config", label, warm))
    return parts
