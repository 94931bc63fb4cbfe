"""CloudFormation and SAM templates of the AWS parts: a bucket for weights and code, and the reward functions."""

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
from rollart.infra.files import RenderedFiles, yaml_text

__all__ = ["cloudformation", "sam"]

VERSION = "2010-09-09"
SAM = "AWS::Serverless-2016-10-31"


def cloudformation(
    name: str, functions: Sequence[AwsFunction], *, role_arn: str = "", bucket: str = ""
) -> RenderedFiles:
    """`storage.yaml` makes the bucket (named `bucket`), which must hold the code before `functions.yaml` can be
    deployed."""
    template: dict[str, Any] = {
        "AWSTemplateFormatVersion": VERSION,
        "Description": f"Reward functions of rollart cluster {name}.",
        "Parameters": {
            "Bucket": {"Type": "String", "Description": "Bucket of the storage stack: the archives are there."}
        },
    }
    role = _role(functions, role_arn)
    resources = dict(role)
    for function in functions:
        resources |= _lambda_resources(function, _role_ref(role_arn))
    ref: Any = {"Ref": "Bucket"}
    arn = {"Fn::Sub": "arn:${AWS::Partition}:s3:::${Bucket}"}
    objects = {"Fn::Sub": "arn:${AWS::Partition}:s3:::${Bucket}/*"}
    resources["ControllerPolicy"] = _controller_policy(functions, arn, objects)
    template |= {"Resources": resources, "Outputs": _outputs(functions, ref)}
    storage = {
        "AWSTemplateFormatVersion": VERSION,
        "Description": f"Weights, artefacts and code of rollart cluster {name}.",
        "Resources": _bucket(bucket),
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
    resources = _bucket(bucket) | _role(functions, role_arn)
    for function in functions:
        resources |= _sam_resources(function, _role_ref(role_arn))
    arn = {"Fn::GetAtt": ["Bucket", "Arn"]}
    resources["ControllerPolicy"] = _controller_policy(functions, arn, {"Fn::Sub": "${Bucket.Arn}/*"})
    template = {
        "AWSTemplateFormatVersion": VERSION,
        "Transform": SAM,
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


def _bucket(name: str) -> dict[str, Any]:
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


def _role(functions: Sequence[AwsFunction], role_arn: str) -> dict[str, Any]:
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
