"""The AWS parts as Terraform's JSON. No test applies it: the tests read it and follow its references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollart.infra.aws import (
    ALIAS,
    DIGEST_TAG,
    AwsFunction,
    archive_files,
    assume_lambda,
    controller_statements,
    log_statement,
    transport_statement,
)
from rollart.infra.files import RenderedFiles, json_text

__all__ = ["terraform"]


def terraform(
    name: str, functions: Sequence[AwsFunction], *, region: str, role_arn: str = "", bucket: str = ""
) -> RenderedFiles:
    """`main.tf.json` and the archives that it uploads. `region` '': taken from the provider's environment; `bucket`
    names the bucket."""
    resources: dict[str, dict[str, Any]] = {}
    _bucket(resources, name, bucket)
    role = role_arn or (_role(resources, name, functions) if functions else "")
    for function in functions:
        _function(resources, function, role)
    arn = "${aws_s3_bucket.weights.arn}"
    labels = [f"aws_lambda_function.{_label(f)}.arn" for f in functions]
    statements = controller_statements([f"${{{a}}}:*" for a in labels], [f"${{{a}}}" for a in labels], arn, f"{arn}/*")
    _add(
        resources,
        "aws_iam_policy",
        "controller",
        {
            "name_prefix": f"{name}-controller-",
            "description": "A rollart run: calls its functions, moves its weights.",
            "policy": _document(statements),
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


def _add(resources: dict[str, dict[str, Any]], kind: str, label: str, body: dict[str, Any]) -> None:
    resources.setdefault(kind, {})[label] = body


def _document(statements: Sequence[Any]) -> str:
    """A policy is JSON in a text; Terraform substitutes `${...}` in it."""
    import json

    return json.dumps({"Version": "2012-10-17", "Statement": list(statements)})


def _label(function: AwsFunction) -> str:
    """Terraform's names begin with a letter or an underscore."""
    label = function.logical.lower()
    return f"_{label}" if label[:1].isdigit() else label


def _bucket(resources: dict[str, dict[str, Any]], name: str, bucket_name: str) -> None:
    bucket_ref = {"bucket": "${aws_s3_bucket.weights.id}"}
    arn = "${aws_s3_bucket.weights.arn}"
    named = {"bucket": bucket_name} if bucket_name else {"bucket_prefix": f"{name[:30]}-"}
    _add(resources, "aws_s3_bucket", "weights", {**named, "force_destroy": False})
    _add(
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
    _add(
        resources,
        "aws_s3_bucket_ownership_controls",
        "weights",
        bucket_ref | {"rule": {"object_ownership": "BucketOwnerEnforced"}},
    )
    _add(
        resources,
        "aws_s3_bucket_server_side_encryption_configuration",
        "weights",
        bucket_ref | {"rule": {"apply_server_side_encryption_by_default": {"sse_algorithm": "AES256"}}},
    )
    _add(
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
    policy = _document([transport_statement(arn, f"{arn}/*")])
    _add(resources, "aws_s3_bucket_policy", "weights", bucket_ref | {"policy": policy})


def _role(resources: dict[str, dict[str, Any]], name: str, functions: Sequence[AwsFunction]) -> str:
    groups = [f"${{aws_cloudwatch_log_group.{_label(f)}.arn}}:*" for f in functions]
    _add(
        resources,
        "aws_iam_role",
        "functions",
        {
            "name_prefix": f"{name[:26]}-functions-",
            "assume_role_policy": _document(assume_lambda()["Statement"]),
        },
    )
    _add(
        resources,
        "aws_iam_role_policy",
        "own_logs",
        {
            "name": "own-logs",
            "role": "${aws_iam_role.functions.id}",
            "policy": _document([log_statement(groups)]),
        },
    )
    return "${aws_iam_role.functions.arn}"


def _function(resources: dict[str, dict[str, Any]], function: AwsFunction, role: str) -> None:
    label = _label(function)
    group = {"name": function.log_group, "retention_in_days": function.retention_days}
    _add(resources, "aws_cloudwatch_log_group", label, group)
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
    _add(resources, "aws_lambda_function", label, body)
    function_ref = f"aws_lambda_function.{label}"
    _add(
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
        _add(
            resources,
            "aws_lambda_provisioned_concurrency_config",
            label,
            {
                "function_name": f"${{{function_ref}.function_name}}",
                "qualifier": f"${{aws_lambda_alias.{label}.name}}",
                "provisioned_concurrent_executions": function.warm,
            },
        )
