"""Secrets of functions as their callers know them: the source of each value by provider, and values on this machine.

Values are read when a worker starts or a request is sent, held by nothing that is printed or stored, and never part of
a package. `secret_runtime` has the part inside a function's process.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import pathlib
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field, RootModel, model_validator

from serverless.errors import BackendFailed, CredentialsMissing, PackageError
from serverless.secret_runtime import REFERENCES, Mask
from serverless.spec import FunctionSpec, Settings, Variable

if TYPE_CHECKING:
    from serverless.deploy.package import Package

DOTENV = ".env"

HEADER = "X-Rollart-Secrets"
"""The header of a call that has its secrets: a JSON object of values by name, in base64 with the alphabet of URLs."""

HEADER_BYTES = 64 * 2**10
"""Longest value of that header which our front reads, some 48 KB of values: a file of credentials fits, and a request
cannot fill the front's memory. Other hosts may accept less: nginx 8 KB, Amazon's API Gateway 10 KB of all headers."""

_PART, _LAST_PART = 12, 4
"""Characters of the shortest part of a secret or of the header that is masked in the text of a host, and of one at its
end, where the host or its client may have cut it."""

_ECHO = 600
"""Most characters of a masked text of a host: the search takes some 30 ms with secrets of 48 KB. The rest is cut off.
"""


class SecretSource(Settings):
    """The sources of one secret. A provider without an entry has it under the variable's own name.

    On AWS Lambda it is one of `aws_secret`, `ssm` and `lambda_env`; none is `aws_secret`.
    """

    env: str = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    """Variable of the environment or the `.env` file on this machine: for local workers, `http` and `lambda_env`."""
    aws_secret: str = Field(
        default="", pattern=r"^(arn:[\w-]+:secretsmanager:[^:\s]+:\d{12}:secret:)?[^:\s]*(:[^:\s]+)?$"
    )
    """Name or ARN of a secret of AWS Secrets Manager; `:key` for one key of a JSON object."""
    ssm: str = Field(default="", pattern=r"^(arn:[\w-]+:ssm:[^:\s]+:\d{12}:parameter)?[\w./-]*$")
    """Name or ARN of a SecureString parameter of AWS Systems Manager."""
    lambda_env: bool = False
    """The value is stored in Lambda's encrypted environment at deployment. A new value takes a deployment."""
    modal: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]{0,63}$")
    """Name of a `modal.Secret` that has the variable."""

    @model_validator(mode="after")
    def _one_of_aws(self) -> SecretSource:
        if sum((bool(self.aws_secret), bool(self.ssm), self.lambda_env)) > 1:
            raise ValueError("one of aws_secret, ssm and lambda_env")
        return self


class SecretSources(RootModel[dict[Variable, SecretSource]]):
    """`functions.secrets` of a cluster: the sources by variable."""

    root: dict[Variable, SecretSource] = {}


class SecretMissing(CredentialsMissing):
    """A declared secret has no value where its provider looks for it."""


class Secrets:
    """The sources of a cluster, and the values that this machine has.

    A value is that of the environment, else of the file `.env` in `directory`, which is read again when it has changed.
    With `late`, callers send missing values with their calls (`providers.http_server`).
    """

    def __init__(
        self,
        sources: Mapping[str, SecretSource] | None = None,
        *,
        directory: pathlib.Path | None = None,
        late: bool = False,
    ) -> None:
        self._sources = dict(sources or {})
        self._file = None if directory is None else directory.resolve() / DOTENV
        self._late = late
        self._read: tuple[tuple[int, int, int] | None, dict[str, str]] = (None, {})
        self._unreadable: list[int] = []  # lines of the file

    def source(self, name: str) -> SecretSource:
        return self._sources.get(name, _DEFAULT)

    def require(self, spec: FunctionSpec, *names: str) -> None:
        """Raise `SecretMissing` for a secret of a function that has no value here; `names` in place of all."""
        present = {} if self._late else self.values(spec, *names)
        for name in names or spec.secrets:
            if not self._late and name not in present:
                variable = self.source(name).env or name
                looked = "the environment" if self._file is None else f"the environment nor in {self._file}"
                also = "" if variable == name else f" ({variable} here)"
                lines = ("lines " if self._unreadable[1:] else "line ") + ", ".join(map(str, self._unreadable))
                raise SecretMissing(
                    f"function {spec.name} has no value of the secret {name}{also}: it is "
                    f"{'not in' if self._file is None else 'neither in'} {looked}"
                    + (f", whose {lines} cannot be read (rule: NAME=value)" if self._unreadable else ""),
                    remedy=f"export {variable}=…" + ("" if self._file is None else f", or write it to {DOTENV}"),
                )

    def values(self, spec: FunctionSpec, *names: str) -> dict[str, str]:
        """The values of a function's secrets here, without missing ones; `names` in place of all."""
        found: dict[str, str] = {}
        of_file: Mapping[str, str] | None = None
        for name in names or spec.secrets:
            variable = self.source(name).env or name
            value = os.environ.get(variable)
            if not value:
                of_file = self._of_file() if of_file is None else of_file
                value = of_file.get(variable)
            if value:
                found[name] = value
        return found

    def variables(self, spec: FunctionSpec, given: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment variables of a worker on this machine; `given` are secrets that its caller sent. Raises
        `SecretMissing`."""
        found = {**self.values(spec), **(given or {})}
        if missing := [name for name in spec.secrets if name not in found]:
            self.require(spec, *missing)
        return {**spec.env, **found}

    def stored_in_lambda(self, spec: FunctionSpec) -> tuple[str, ...]:
        """The function's secrets whose values are in Lambda's encrypted environment."""
        return tuple(name for name in spec.secrets if self.source(name).lambda_env)

    def in_modal(self, spec: FunctionSpec) -> dict[str, list[str]]:
        """The variables that a function takes from each `modal.Secret`, by the secret's name."""
        found: dict[str, list[str]] = {}
        for name in spec.secrets:
            found.setdefault(self.source(name).modal or name, []).append(name)
        return found

    def reference(self, name: str) -> dict[str, str]:
        """The reference to a secret on AWS (`secret_runtime`), empty for one in Lambda's encrypted environment."""
        source = self.source(name)
        if source.lambda_env:
            return {}
        if source.ssm:
            return {"ssm": source.ssm}
        parts = (source.aws_secret or name).split(":")
        size = 7 if parts[0] == "arn" else 1
        return {"aws_secret": ":".join(parts[:size]), "key": ":".join(parts[size:])}

    def lambda_variables(self, spec: FunctionSpec, ttl_s: float) -> dict[str, str]:
        """The environment variables of a function on Lambda: plain values, references, and the values of secrets that
        are stored in Lambda's encrypted environment. Raises `SecretMissing`."""
        stored = self.stored_in_lambda(spec)
        if stored:
            self.require(spec, *stored)
        found = {**spec.env, **(self.values(spec, *stored) if stored else {})}
        references = {name: self.reference(name) for name in spec.secrets if name not in stored}
        if references:
            found[REFERENCES] = json.dumps({"ttl_s": ttl_s, "from": references}, sort_keys=True)
        return found

    def _of_file(self) -> Mapping[str, str]:
        """The variables of `.env`, none if there is no such file."""
        if self._file is None:
            return {}
        try:
            state = self._file.stat()
        except OSError:
            self._read, self._unreadable = (None, {}), []
            return {}
        stamp = (state.st_mtime_ns, state.st_size, state.st_ino)
        if self._read[0] != stamp:
            from dotenv.parser import parse_stream  # dotenv_values writes to stderr of lines that it cannot read

            try:
                with self._file.open(encoding="utf-8") as stream:
                    found = list(parse_stream(stream))
            except (OSError, UnicodeDecodeError) as error:
                raise SecretMissing(f"{self._file} cannot be read: {type(error).__name__}") from None
            self._read = (stamp, {one.key: one.value for one in found if one.key and one.value})
            self._unreadable = [one.original.line for one in found if one.error]
        return self._read[1]


_DEFAULT = SecretSource()


def secrets_header(function: str, values: Mapping[str, str]) -> str:
    """The values of a function's secrets as the value of the header `HEADER`. Raises `BackendFailed` above
    `HEADER_BYTES`."""
    header = base64.urlsafe_b64encode(json.dumps(values).encode()).decode()
    if len(header) > HEADER_BYTES:
        raise BackendFailed(
            f"the secrets of function {function} ({', '.join(values)}) make a header {HEADER} of {len(header):,} bytes "
            f"(rule: at most {HEADER_BYTES:,})",
            remedy="shorten them, or store them at the host and take `send_secrets` out of the function's endpoint",
        )
    return header


def given_secrets(header: str) -> dict[str, str]:
    """The values in the header `HEADER` of a request. Raises `ValueError`, without the text, for another form."""
    try:
        found = json.loads(base64.urlsafe_b64decode(header))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"the header {HEADER} is not a JSON object of texts in base64")
    return found


class EchoMask:
    """Masks secrets in the text of a host, which may repeat the header of a request, in whole or cut short."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._mask = Mask(values)
        header = base64.urlsafe_b64encode(json.dumps(dict(values)).encode()).decode()
        self._sources = [header] if values else []
        for value in values.values():
            self._sources += {value, json.dumps(value)[1:-1]}

    def text(self, text: str) -> str:
        """The text, cut to `_ECHO` characters, with `[secret NAME]` for each value and `[secret]` for each longer part
        of a value or of the header."""
        if not self._sources:
            return text
        text = self._mask.text(text)[:_ECHO]
        shown: list[str] = []
        start = 0
        while start < len(text):
            size = self._part_at(text, start)
            shown.append("[secret]" if size else text[start])
            start += size or 1
        return "".join(shown)

    def _part_at(self, text: str, start: int) -> int:
        """Characters of the longest part of a secret that begins here; 0 for none."""
        left = len(text) - start
        if left < _PART:
            cut = left >= _LAST_PART and any(source.startswith(text[start:]) for source in self._sources)
            return left if cut else 0
        longest = 0
        for source in self._sources:
            size = _PART if text[start : start + _PART] in source else 0
            while size and size < left and text[start : start + size + 1] in source:
                size += 1
            longest = max(longest, size)
        return longest


PACKED_CHARACTERS = 8
"""Characters of the shortest value that is looked for in packages. Shorter ones occur in code by chance."""

_OWN_FILES = ("serverless/", "shims/", "rollart_handler.py")
"""Files of a package that are the same in every package."""


def refuse_packed_secrets(package: Package, secrets: Secrets) -> None:
    """Raise `PackageError` if a file of a package contains the value of a secret of its function, as far as this
    machine has the value."""
    for name, value in secrets.values(package.spec).items():
        for path, data in package.files.items():
            if len(value) >= PACKED_CHARACTERS and not path.startswith(_OWN_FILES) and value.encode() in data:
                raise PackageError(
                    f"function {package.spec.name}: the file {path} of its package contains the value of the secret "
                    f"{name} (rule: a value is in no package)",
                    remedy=f"read the environment variable {name} in its place, and replace the secret if the file was "
                    "shared",
                )


def private_url(url: str) -> bool:
    """True if others cannot read what is sent to a URL: it is https, or of this machine."""
    parts = urllib.parse.urlsplit(url)
    try:
        local = ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        local = parts.hostname == "localhost"
    return parts.scheme == "https" or local


def masked(variables: Mapping[str, str], names: tuple[str, ...]) -> Mask:
    """The mask of a worker's secrets among its variables."""
    return Mask({name: variables[name] for name in names if name in variables})
