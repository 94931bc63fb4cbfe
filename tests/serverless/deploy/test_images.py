"""Container images of functions: the build context, the user's Dockerfile, versions, and the lock of a target."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless.deploy.images import IMAGE_BYTES, SizeEstimate, build_context, check_image_size, find_engine
from serverless.deploy.package import Package, build
from serverless.deploy.requirements import TORCH_CPU, Wheel, WheelTarget, index_urls, lock, resolve
from serverless.errors import IndexUnreachable, PackageError, SpecInvalid
from serverless.spec import FunctionSpec
from tests.serverless.deploy.wheels import write_wheel

HADOLINT = shutil.which(
    "hadolint", path=f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
)


def packed(root: pathlib.Path, **settings: Any) -> Package:
    (root / "f.py").write_text("def f(sample):\n    return 1.0\n")
    return build(FunctionSpec.model_validate({"name": "f", "source": "f.py", "handler": "f", **settings}), base=root)


def dockerfile(root: pathlib.Path, text: str, **files: str) -> dict[str, str]:
    (root / "Dockerfile").write_text(text)
    for name, content in files.items():
        (root / name).write_text(content)
    return {"dockerfile": "Dockerfile"}


def test_a_context_has_the_image_the_lock_and_the_package(tmp_path: pathlib.Path) -> None:
    image = {"base": "python:3.12-slim", "system": ["libgl1", "ffmpeg=7:5.1.6-0+deb12u1"]}
    one = packed(tmp_path, image=image, requirements=("pytest==8.3.0",))
    context = build_context(one, python="3.12", further={"rollart_version": one.version.encode()})
    lines = context.files["Dockerfile"].decode().splitlines()
    assert lines[0] == "FROM python:3.12-slim"
    assert "--no-install-recommends ffmpeg=7:5.1.6-0+deb12u1 libgl1 " in lines[2]
    assert lines[-2:] == ['ENTRYPOINT ["python", "-m", "awslambdaric"]', 'CMD ["rollart_handler.handler"]']
    assert "pytest==8.3.0\nawslambdaric==" in context.files[".rollart/requirements.txt"].decode()
    assert context.files[".rollart/package/function/f.py"] == one.files["function/f.py"]
    assert context.files[".rollart/package/rollart_version"].decode() == one.version


def test_equal_packages_have_equal_tags_and_architectures_do_not_share_one(tmp_path: pathlib.Path) -> None:
    one, again = (packed(tmp_path, image={"system": ["libgl1"]}) for _ in range(2))
    assert build_context(one, python="3.12").tag == build_context(again, python="3.12").tag
    assert build_context(one, python="3.12").tag != build_context(one, python="3.12", architecture="arm64").tag
    assert build_context(one, python="3.12").tag != build_context(one, python="3.13").tag


def test_the_image_is_part_of_the_version_and_its_absence_is_not(tmp_path: pathlib.Path) -> None:
    plain = packed(tmp_path)
    assert "image" not in plain.spec.identity()
    assert "index_urls" not in plain.spec.identity()
    versions = {plain.version}
    for image in ({}, {"system": ["libgl1"]}, {"base": "python:3.12"}):
        versions.add(packed(tmp_path, image=image).version)
    assert len(versions) == 4


def test_a_dockerfile_counts_by_its_content_and_that_of_the_files_it_copies(tmp_path: pathlib.Path) -> None:
    text = "FROM debian AS build\nUSER nobody\nFROM python:3.12-slim\nCOPY --chown=0 \\\n  a*.txt sub /data/\n"
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/deep.txt").write_text("deep")
    image = dockerfile(tmp_path, text, **{"a1.txt": "one", "a2.txt": "two", "unused.txt": "x"})
    one = packed(tmp_path, image=image)
    context = build_context(one, python="3.12")
    assert {"a1.txt", "a2.txt", "sub/deep.txt"} <= context.files.keys()
    assert "unused.txt" not in context.files
    assert context.files["Dockerfile"].decode().startswith(text)
    assert not any(path.startswith(".rollart/package/image") for path in context.files)
    (tmp_path / "unused.txt").write_text("y")
    assert packed(tmp_path, image=image).version == one.version
    (tmp_path / "a2.txt").write_text("other")
    assert packed(tmp_path, image=image).version != one.version


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("FROM python\nCOPY missing.txt /\n", "copies missing.txt, and there is no such file"),
        ("FROM python\nCOPY ../secret /\n", "from outside its directory"),
        ("FROM python\nUSER 1000\n", "ends as user 1000"),
        ("FROM python\nCOPY <<EOF /x\nEOF\n", "here-document"),
        ("# nothing\n", "has no FROM"),
    ],
)
def test_a_dockerfile_that_cannot_be_built_is_refused(tmp_path: pathlib.Path, text: str, match: str) -> None:
    with pytest.raises(PackageError, match=match):
        packed(tmp_path, image=dockerfile(tmp_path, text))


def test_files_of_environment_variables_are_never_packed(tmp_path: pathlib.Path) -> None:
    """A Dockerfile that copies its directory would pack the secrets of the `.env` beside it."""
    (tmp_path / "app").mkdir()
    for name in (".env", ".env.local", "app/.env", "app/kept.txt"):
        (tmp_path / name).write_text("JUDGE_API_KEY=sk-0123456789")
    (tmp_path / "app/kept.txt").write_text("kept")
    one = packed(tmp_path, image=dockerfile(tmp_path, "FROM debian\nCOPY . /app\n"))
    assert "image/context/app/kept.txt" in one.files
    assert not any(b"sk-0123456789" in data for data in one.files.values())
    with pytest.raises(PackageError, match=r"copies \.env, which is never packed"):
        packed(tmp_path, image=dockerfile(tmp_path, "FROM debian\nCOPY .env /app/\n"))


def test_copies_from_other_stages_and_urls_need_no_file(tmp_path: pathlib.Path) -> None:
    text = "FROM a AS b\nFROM python\nCOPY --from=b /x /x\nADD https://example.org/y /y\nUSER 0\n"
    assert packed(tmp_path, image=dockerfile(tmp_path, text)).version


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"image": {"dockerfile": "D", "system": ["x"]}}, "dockerfile replaces base and system"),
        ({"image": {"system": ["x; rm -rf /"]}}, "image.system"),
        ({"image": {"base": "a b"}}, "image.base"),
        ({"index_urls": ["https://me:hunter2@example.org/simple"]}, "a URL has credentials"),
        ({"index_urls": ["example.org"]}, "not the URL of a package index"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path: pathlib.Path, settings: dict[str, Any], match: str) -> None:
    options = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    text = f"from rollart import reward\n\n\n@reward({options})\ndef f(sample): ...\n"
    (tmp_path / "g.py").write_text(text)
    with pytest.raises(SpecInvalid, match=match) as error:
        build(FunctionSpec(name="g", source="g.py"), base=tmp_path)
    assert "hunter2" not in str(error.value)


def test_a_pin_is_a_public_version(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build here is torch's own version for the target; the CUDA libraries of a CUDA build are that build's."""
    installed = {"torch": "2.13.0+cpu", "ours": "1.0+g12ab", "cuda-torch": "2.0", "nvidia-cublas": "13.1"}
    needs = {"torch": [], "ours": [], "cuda-torch": ["nvidia-cublas==13.1"], "nvidia-cublas": []}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", needs.__getitem__)
    assert lock(["torch"], tmp_path).pins == ("torch==2.13.0",)
    assert lock(["torch==2.13.0+cu130"], tmp_path).pins == ("torch==2.13.0",)
    assert lock(["cuda-torch"], tmp_path).pins == ("cuda-torch==2.0",)
    assert lock(["cuda-torch", "nvidia-cublas"], tmp_path).pins == ("cuda-torch==2.0", "nvidia-cublas==13.1")
    assert lock(["ours"], tmp_path).unpinned == ("ours==1.0+g12ab",)
    local = packed(tmp_path, requirements=("ours",), image={})
    with pytest.raises(PackageError, match=r"ours==1.0\+g12ab: a build of this machine"):
        build_context(local, python="3.12")


def test_torch_is_the_cpu_build_where_there_is_no_gpu(tmp_path: pathlib.Path) -> None:
    wanted = ("torch==2.13.0",)
    assert index_urls(packed(tmp_path, requirements=wanted).spec) == (TORCH_CPU,)
    assert index_urls(packed(tmp_path, requirements=wanted, gpu="L4").spec) == ()
    assert index_urls(packed(tmp_path, requirements=("pytest==8.3.0",)).spec) == ()
    own = packed(tmp_path, requirements=wanted, index_urls=("https://example.org/cu126",), image={})
    assert index_urls(own.spec) == ("https://example.org/cu126",)
    install = build_context(own, python="3.12").files["Dockerfile"].decode()
    assert "--extra-index-url https://example.org/cu126 -r requirements.txt" in install


@given(st.lists(st.tuples(st.integers(0, 10**10), st.booleans()), max_size=6))
def test_an_image_is_refused_only_if_its_wheels_alone_are_above_the_limit(sizes: list[tuple[int, bool]]) -> None:
    one = Package(FunctionSpec(name="f", source="f.py"), "0" * 64, {"a": b"1", "image/context/b": b"22"})
    wheels = [Wheel(f"not-installed-{n}", "1", size * known) for n, (size, known) in enumerate(sizes)]
    estimate = SizeEstimate.of(one, wheels)
    assert estimate.least == 1 + estimate.download <= 1 + sum(size for size, _ in sizes)
    assert estimate.least <= estimate.likely
    assert len(estimate.unknown) == sum(wheel.size == 0 for wheel in wheels)
    if estimate.least > IMAGE_BYTES:
        with pytest.raises(PackageError, match="10 GB"):
            check_image_size(one, estimate)
    else:
        check_image_size(one, estimate)


def test_an_engine_that_does_not_answer_is_none(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_engine() == (None, "none of docker, podman, buildah is on PATH")
    for name, text in (("docker", "echo 'no daemon' >&2; exit 1"), ("buildah", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
        engine, reason = find_engine()
        assert (engine.name if engine else reason) == ("buildah" if name == "buildah" else "docker: no daemon")


@pytest.mark.slow
@pytest.mark.skipif(HADOLINT is None, reason="not installed: hadolint")
def test_rendered_dockerfiles_pass_the_linter(tmp_path: pathlib.Path) -> None:
    assert HADOLINT is not None
    user = dockerfile(tmp_path, "FROM python:3.12-slim\nCOPY a.txt /data/\n", **{"a.txt": "a"})
    for n, image in enumerate(({}, {"base": "python:3.12", "system": ["libgl1", "git"]}, user)):
        one = packed(tmp_path, image=image, requirements=("torch==2.13.0",))
        build_context(one, python="3.12").write(tmp_path / f"context{n}")
        done = subprocess.run([HADOLINT, str(tmp_path / f"context{n}/Dockerfile")], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("uv") is None, reason="not installed: uv")
def test_wheels_are_those_of_the_target(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python version, machine and markers are the target's, not this machine's; builds come from the function's own
    index, and everything else from the first."""
    main, builds = tmp_path / "main", tmp_path / "builds"
    for tag in (
        "cp312-cp312-manylinux_2_28_x86_64",
        "cp312-cp312-manylinux_2_28_aarch64",
        "cp311-cp311-macosx_11_0_arm64",
    ):
        write_wheel(main, "compiled", "2.0", "", tag=tag)
    markers = ['compiled==2.0; platform_machine=="aarch64"', 'absent; sys_platform=="win32"']
    write_wheel(main, "tiny_torch", "1.0", "", requires=[*markers, 'newer; python_version>="3.12"'])
    write_wheel(main, "newer", "3.0", "")
    write_wheel(builds, "tiny_torch", "1.0+cpu", "", requires=markers[:1])
    write_wheel(builds, "newer", "0.1", "")
    for name, value in {"DEFAULT_INDEX": main.as_uri(), "INDEX": "", "FIND_LINKS": "", "NO_CACHE": "1"}.items():
        monkeypatch.setenv(f"UV_{name}", value)
    one = packed(tmp_path, requirements=("tiny-torch==1.0",))

    def found(*further: pathlib.Path, python: str = "3.12", architecture: str = "x86_64") -> dict[str, str]:
        target = WheelTarget(python, "2_36", architecture, tuple(one.as_uri() for one in further))
        return {wheel.name: wheel.version for wheel in resolve(one.spec, target)}

    assert found() == {"tiny-torch": "1.0", "newer": "3.0"}
    assert found(builds) == {"tiny-torch": "1.0+cpu"}
    assert found(python="3.11") == {"tiny-torch": "1.0"}
    assert found(architecture="arm64") == {"tiny-torch": "1.0", "newer": "3.0", "compiled": "2.0"}
    with pytest.raises(PackageError, match=r"Python 3\.11 on arm64, glibc 2\.36.*compiled"):
        found(python="3.11", architecture="arm64")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(IndexUnreachable, match="requirements") as error:
        found()
    assert error.value.remedy == "check the network and the package indexes"
