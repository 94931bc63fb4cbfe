"""Packages: the same function is the same bytes and version anywhere, needs nothing there, and is not run here."""

from __future__ import annotations

import asyncio
import io
import json
import pathlib
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from typing import Any

import pytest
from pydantic import ValidationError

from serverless.deploy.handler import adapt, load
from serverless.deploy.package import Package, build, zip_archive
from serverless.errors import PackageError, SpecInvalid
from serverless.pipeline.offload import Offload
from serverless.spec import FunctionSpec
from serverless.types import Item, Outcome, Scored
from serverless.workers.local import LocalBackend, Runtime

SOURCE = """
import rollart
raise SystemExit("nobody may run this here")

@rollart.reward(memory_mb=256, artefacts=("data.txt",), batch={"max_items": 7})
def one(sample): ...

@rollart.reward
async def two(sample): ...

def helper(): ...
"""


def pack(directory: pathlib.Path, text: str = SOURCE, **settings: Any) -> Package:
    (directory / "mine.py").write_text(text)
    (directory / "data.txt").write_text("weights")
    (directory / "bare").mkdir(exist_ok=True)
    (directory / "json").mkdir(exist_ok=True)
    (directory / "json" / "__init__.py").write_text("")
    return build(FunctionSpec(**{"name": "one", "source": "mine.py", **settings}), base=directory)


def test_the_decorators_settings_are_read_and_the_specs_win(tmp_path: pathlib.Path) -> None:
    spec = pack(tmp_path, timeout_s=3.0, memory_mb=1024).spec
    assert (spec.memory_mb, spec.timeout_s, spec.batch.max_items) == (1024, 3.0, 7)
    assert spec.artefacts == (str(tmp_path / "data.txt"),)


def test_a_package_is_the_same_from_any_directory_and_at_any_time(tmp_path: pathlib.Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    one, two = pack(first), pack(second, concurrency=9, keep_alive_s=1.0)
    assert one.version == two.version
    assert zip_archive(one.files) == zip_archive(two.files)
    shutil.copyfile(second / "data.txt", first / "data.txt")
    assert zip_archive(pack(first).files) == zip_archive(one.files)


def test_what_runs_makes_the_version(tmp_path: pathlib.Path) -> None:
    versions = {
        pack(tmp_path).version,
        pack(tmp_path, memory_mb=300).version,
        pack(tmp_path, handler="two").version,
        pack(tmp_path, SOURCE + "#").version,
        pack(tmp_path, name="other", handler="one").version,
    }
    assert len(versions) == 5


def test_a_package_holds_the_handler_the_manifest_the_source_and_the_artefacts(tmp_path: pathlib.Path) -> None:
    (tmp_path / "models" / "deep").mkdir(parents=True)
    (tmp_path / "models" / "deep" / "x.bin").write_bytes(b"\0")
    (tmp_path / "models" / "__pycache__").mkdir()
    (tmp_path / "models" / "__pycache__" / "junk.pyc").write_bytes(b"\0")
    packed = pack(tmp_path, artefacts=("models", "data.txt"))
    with zipfile.ZipFile(io.BytesIO(zip_archive(packed.files))) as archive:
        assert archive.namelist() == [
            "artefacts/data.txt",
            "artefacts/models/deep/x.bin",
            "function/mine.py",
            "rollart_handler.py",
            "rollart_manifest.json",
            "serverless/__init__.py",
            "serverless/calling.py",
            "serverless/declare.py",
            "serverless/errors.py",
            "serverless/output.py",
            "serverless/signatures.py",
            "serverless/types.py",
            "serverless/usage.py",
            "shims/rollart/__init__.py",
        ]
    packed.write(tmp_path / "out")
    assert (tmp_path / "out" / "function" / "mine.py").read_text() == SOURCE


@pytest.mark.parametrize(
    ("settings", "text", "error"),
    [
        ({"source": "none.py"}, SOURCE, "none.py: No such file"),
        ({"source": "no_such.module"}, SOURCE, "no module 'no_such.module'"),
        ({"artefacts": ("none.bin",)}, SOURCE, "none.bin: No such file"),
        ({"artefacts": ("data.txt", "data.txt")}, SOURCE, "two artefacts are called"),
        ({"name": "three"}, SOURCE, "several rewards: one, two"),
        ({}, "from . import x", "mine.py:1: .* cannot import relatively"),
        ({"source": "bare/"}, SOURCE, "a directory without __init__.py"),
        ({"source": "json/"}, SOURCE, "a package cannot be called 'json'"),
    ],
)
def test_what_cannot_be_packed_says_why(
    tmp_path: pathlib.Path, settings: dict[str, Any], text: str, error: str
) -> None:
    with pytest.raises(PackageError, match=error):
        pack(tmp_path, text, **settings)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("@reward(memory_mb=N)\ndef one(s): ...", r"memory_mb=...\) is not a literal"),
        ("def (", "mine.py:1: not Python"),
        ("@reward(memory_mb=3)\ndef one(s): ...", "function one: memory_mb: .*128.*got 3"),
        ("@reward(memory=3)\ndef one(s): ...", "mine.py:1: @reward has no argument 'memory'"),
    ],
)
def test_a_wrong_declaration_is_placed(tmp_path: pathlib.Path, text: str, error: str) -> None:
    with pytest.raises(SpecInvalid, match=error):
        pack(tmp_path, text)


@pytest.mark.parametrize(
    "settings",
    [
        {"warm": 5, "concurrency": 4},
        {"memory_mb": 64},
        {"timeout_s": 0},
        {"name": "no spaces"},
        {"cores": 1},
        {"source": "a:b", "handler": "c"},
    ],
)
def test_a_spec_that_breaks_a_rule_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FunctionSpec.model_validate({"name": "f", "source": "f.py", **settings})


def test_every_cost_of_a_version_is_in_its_digest(tmp_path: pathlib.Path) -> None:
    """No path, no time, and nothing that only scales."""
    same = {
        pack(tmp_path).version,
        pack(tmp_path, warm=1, queue=5, batch={"max_items": 3}, preload=("json",), stateless=True).version,
        build(FunctionSpec(name="one", source=str(tmp_path / "mine.py"))).version,
    }
    assert len(same) == 1
    assert str(tmp_path).encode() not in zip_archive(pack(tmp_path).files)


def test_variables_are_in_the_digest_by_name_and_plain_ones_by_value(tmp_path: pathlib.Path) -> None:
    plain = pack(tmp_path)
    assert "env" not in plain.spec.identity()
    assert "secrets" not in plain.spec.identity()
    settings: list[dict[str, Any]] = [
        {"secrets": ("ONE_KEY",)},
        {"secrets": ("OTHER_KEY",)},
        {"secrets": ("ONE_KEY", "OTHER_KEY")},
        {"env": {"MODEL": "a"}},
        {"env": {"MODEL": "b"}},
    ]
    assert len({plain.version, *(pack(tmp_path, **one).version for one in settings)}) == 6
    assert pack(tmp_path, secrets=("OTHER_KEY", "ONE_KEY", "ONE_KEY")).version == pack(tmp_path, **settings[2]).version


def test_plain_variables_of_the_spec_and_the_decorator_are_merged(tmp_path: pathlib.Path) -> None:
    text = "@reward(env={'MODEL': 'a', 'URL': 'u'}, secrets=['JUDGE_KEY'])\ndef f(s): ..."
    packed = pack(tmp_path, text, env={"MODEL": "b"})
    assert packed.spec.env == {"MODEL": "b", "URL": "u"}
    assert packed.spec.secrets == ("JUDGE_KEY",)


@pytest.mark.parametrize(
    "declared",
    ["secrets={'JUDGE_KEY': 'sk-hush'}", "secrets=['sk-hush']", "secrets='sk-hush'", "secrets=[['sk-hush']]"],
)
def test_a_value_in_place_of_a_secret_name_is_not_repeated(tmp_path: pathlib.Path, declared: str) -> None:
    with pytest.raises(SpecInvalid, match="secrets") as refused:
        pack(tmp_path, f"@reward({declared})\ndef f(s): ...")
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("settings", [{"env": {"AWS_REGION": "x"}}, {"secrets": ["PATH"]}, {"env": {"A": "x"}}])
def test_variables_that_a_provider_sets_are_refused(tmp_path: pathlib.Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FunctionSpec.model_validate({"name": "f", "source": "f.py", **settings})


PACKAGE = {
    "__init__.py": "from .judge import score\n",
    "judge.py": (
        "from __future__ import annotations\nimport pathlib\nfrom rollart import reward\nfrom . import words\n"
        "from .deep.limits import LIMIT\n"
        "@reward(memory_mb=300)\ndef score(sample):\n"
        "    text = (pathlib.Path(__file__).parent / 'list.txt').read_text()\n"
        "    return min(LIMIT, words.count(sample.completion, text.split()))\n"
    ),
    "words.py": "def count(text, known):\n    return float(sum(w in known for w in text.split()))\n",
    "deep/__init__.py": "",
    "deep/limits.py": "from ..words import count\nLIMIT = 5.0\n",
    "list.txt": "four four",
    "unused.py": "COUNT = 0\ndef tick():\n    global COUNT\n    COUNT += 1\n",
    "__pycache__/junk.pyc": "",
}


def tree(directory: pathlib.Path) -> pathlib.Path:
    for name, text in PACKAGE.items():
        path = directory / "mypack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def test_a_directory_is_packed_whole_and_a_module_with_what_it_imports(tmp_path: pathlib.Path) -> None:
    whole = build(FunctionSpec(name="score", source="mypack/"), base=tree(tmp_path))
    inside = {name for name in whole.files if name.startswith("function/")}
    assert inside == {f"function/mypack/{name}" for name in PACKAGE if "junk" not in name}
    assert (whole.spec.memory_mb, whole.spec.takes) == (300, "item")
    part = build(FunctionSpec(name="score", source="mypack/deep/limits.py:count", takes="item"), base=tmp_path)
    assert {n for n in part.files if n.startswith("function/")} == {
        "function/mypack/__init__.py",
        "function/mypack/deep/__init__.py",
        "function/mypack/deep/limits.py",
        "function/mypack/judge.py",
        "function/mypack/words.py",
    }


def test_a_package_beside_a_file_comes_along(tmp_path: pathlib.Path) -> None:
    (tree(tmp_path) / "mypack" / "judge.py").write_text("from .deep import limits\nimport beside\n")
    (tmp_path / "beside.py").write_text("")
    packed = pack(tmp_path, "from mypack.judge import score\ndef one(sample): return 1.0\n", handler="one")
    assert {name.removeprefix("function/") for name in packed.files if name.startswith("function/")} == {
        "mine.py",
        "beside.py",
        "mypack/__init__.py",
        "mypack/judge.py",
        "mypack/words.py",
        "mypack/deep/__init__.py",
        "mypack/deep/limits.py",
    }


def test_files_imported_from_beside_a_file_come_along(tmp_path: pathlib.Path) -> None:
    (tmp_path / "beside.py").write_text("import further\n")
    (tmp_path / "further.py").write_text("")
    (tmp_path / "other.py").write_text("")
    packed = pack(tmp_path, "import beside, json\ndef one(sample): return 1.0\n")
    inside = {name for name in packed.files if name.startswith("function/")}
    assert inside == {"function/mine.py", "function/beside.py", "function/further.py"}


@pytest.mark.parametrize(
    ("text", "attribute"),
    [
        ("def one(sample): ...\ndef handler(sample): ...", "one"),
        ("def handler(sample): ...\ndef other(sample): ...", "handler"),
        ("def _helper(x): ...\nasync def compute_score(data_source, solution_str, ground_truth): ...", "compute_score"),
        ("def a(sample): ...\n@reward(name='b')\ndef b(sample): ...", "b"),
    ],
)
def test_the_reward_of_a_source_is_found_without_being_named(tmp_path: pathlib.Path, text: str, attribute: str) -> None:
    assert json.loads(pack(tmp_path, text).files["rollart_manifest.json"])["attribute"] == attribute


def test_a_module_is_packed_by_its_import_path() -> None:
    packed = build(FunctionSpec(name="f", source="tests.serverless.functions.rules:exact_match"))
    assert packed.spec.memory_mb == 128
    assert "function/rules.py" in packed.files
    assert build(FunctionSpec(name="f", source="tests.serverless.functions.rules")).version == packed.version


def test_files_of_environment_variables_are_never_packed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge/__init__.py").write_text(SOURCE)
    (tmp_path / "judge/.env").write_text("JUDGE_API_KEY=sk-0123456789")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/.env.prod").write_text("JUDGE_API_KEY=sk-0123456789")
    (tmp_path / "data/words.txt").write_text("words")
    one = build(FunctionSpec(name="f", source="judge", handler="two", artefacts=("data",)), base=tmp_path)
    assert "artefacts/data/words.txt" in one.files
    assert not any(b"sk-0123456789" in data for data in one.files.values())
    with pytest.raises(PackageError, match="never packed"):
        build(FunctionSpec(name="f", source="judge", handler="two", artefacts=("judge/.env",)), base=tmp_path)


def test_a_class_is_loaded_once_with_its_artefacts(tmp_path: pathlib.Path) -> None:
    class Model:
        loads = 0

        def load(self, artefacts: pathlib.Path) -> None:
            Model.loads += 1
            self.value = float((artefacts / "v").read_text())

        def __call__(self, sample: Any) -> float:
            return self.value

    (tmp_path / "v").write_text("0.25")
    handler = adapt(Model, artefacts=tmp_path)
    event = [{"id": "a", "messages": []}, {"id": "b", "messages": []}]
    assert [a["aggregate_reward_score"] for a in handler(event, None)] == [0.25, 0.25]
    assert Model.loads == 1


def test_requirements_are_locked_with_what_they_require(tmp_path: pathlib.Path) -> None:
    packed = pack(tmp_path, requirements=("pydantic>=2",))
    names = {pin.partition("==")[0]: pin.partition("==")[2] for pin in packed.spec.requirements}
    assert {"pydantic", "pydantic-core", "typing-extensions"} <= names.keys()
    assert names["pydantic"] == metadata.version("pydantic")
    assert packed.files["requirements.txt"].decode().split() == list(packed.spec.requirements)
    manifest = json.loads(packed.files["rollart_manifest.json"])
    assert (manifest["requirements"], manifest["unpinned"]) == (list(packed.spec.requirements), [])
    assert packed.version != pack(tmp_path).version


def test_a_requirements_file_is_taken_as_it_is(tmp_path: pathlib.Path) -> None:
    (tmp_path / "lock.txt").write_text(
        "# pinned\n--index-url https://example.org\n"
        "No.Such_Dist==1.0 \\\n    --hash=sha256:00\nother==2.0 ; python_version < '3'\n"
    )
    assert pack(tmp_path, requirements=("-r lock.txt",)).spec.requirements == ("no-such-dist==1.0",)


@pytest.mark.parametrize(
    ("requirements", "error"),
    [
        (("no such dist",), "is not a requirement"),
        (("x @ https://example.org/x.whl",), "names a URL"),
        (("pydantic<1",), "pydantic<1 is required, but pydantic .* is installed"),
        (("a==1", "a==2"), "a==2 contradicts a==1"),
        (("-r none.txt",), "none.txt: No such file"),
    ],
)
def test_a_lock_that_cannot_be_made_says_why(tmp_path: pathlib.Path, requirements: tuple[str, ...], error: str) -> None:
    with pytest.raises(PackageError, match=error):
        pack(tmp_path, requirements=requirements)


def test_what_is_not_installed_stays_unpinned_and_is_marked(tmp_path: pathlib.Path) -> None:
    packed = pack(tmp_path, requirements=("no-such-dist>=1",))
    assert packed.spec.requirements == ("no-such-dist>=1",)
    assert json.loads(packed.files["rollart_manifest.json"])["unpinned"] == ["no-such-dist>=1"]
    assert packed.warnings == ("no-such-dist>=1 is not installed here, so it is not pinned",)


BARE = """
import json, sys
sys.path[:] = [p for p in sys.path if "site-packages" not in p]
sys.path.insert(0, sys.argv[1])
import rollart_handler
event = json.load(open(sys.argv[2]))
print(json.dumps({
    "answer": rollart_handler.handler(event, None),
    "foreign": sorted(m for m in sys.modules if m.partition(".")[0] in ("pydantic", "msgpack", "numpy")),
    "ours": sorted({m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] in ("serverless", "rollart")}),
}))
"""


@pytest.mark.slow  # a Python process each
@pytest.mark.parametrize("kind", ["file", "package", "async", "class"])
def test_the_unzipped_package_runs_on_a_bare_python(tmp_path: pathlib.Path, kind: str) -> None:
    """No site-packages, no environment, another directory, a read-only copy: only the zip's own content."""
    sources = {
        "file": "from rollart import Sample, Scored, reward\nimport beside\n"
        "@reward\ndef score(sample: Sample):\n    return Scored(beside.ONE, {'n': len(sample.messages)})\n",
        "async": "import asyncio\nasync def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    await asyncio.sleep(0)\n    return {'score': float(ground_truth in solution_str), 'n': 1}\n",
        "class": "import rollart\n@rollart.reward(artefacts=('data.txt',))\nclass score:\n"
        "    def load(self, artefacts):\n        self.text = (artefacts / 'data.txt').read_text()\n"
        "    def __call__(self, completion, parser):\n"
        "        return {'score': float(len(parser.parse_answer(completion).split()) == 1), 'metrics': {'n': 1}}\n",
    }
    (tmp_path / "beside.py").write_text("ONE = 1.0\n")
    (tmp_path / "data.txt").write_text("x")
    if kind == "package":
        packed = build(FunctionSpec(name="score", source="mypack/"), base=tree(tmp_path))
    else:
        (tmp_path / "score.py").write_text(sources[kind])
        packed = build(FunctionSpec(name="score", source="score.py", handler="score"), base=tmp_path)
    out = tmp_path / "elsewhere" / "task"
    with zipfile.ZipFile(io.BytesIO(zip_archive(packed.files))) as archive:
        archive.extractall(out)
    message = [{"role": "assistant", "content": "four"}]
    event = [{"id": k, "messages": message, "reference_answer": "four", "metadata": {}} for k in "ab"]
    (tmp_path / "event.json").write_text(json.dumps(event))
    command = [sys.executable, "-I", "-S", "-B", "-c", BARE, str(out), str(tmp_path / "event.json")]
    done = subprocess.run(command, capture_output=True, text=True, env={}, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert [a["id"] for a in got["answer"]] == ["a", "b"]
    assert [a["aggregate_reward_score"] for a in got["answer"]] == [1.0, 1.0]
    assert got["foreign"] == []
    assert all(file.startswith(str(out)) for file in got["ours"])


@pytest.mark.slow  # real workers
def test_modules_of_an_installed_rollart_are_found(tmp_path: pathlib.Path) -> None:
    """The light `rollart` of a package does not hide the modules of an installed one; it overrides only its own."""
    (tmp_path / "score.py").write_text(
        "import rollart\nfrom rollart import Observation, Sample\nimport rollart.model\n"
        "def score(sample):\n"
        "    return float('shims' in rollart.__file__ and rollart.model.Item is Sample and bool(Observation))\n"
    )
    packed = build(FunctionSpec(name="score", source="score.py"), base=tmp_path)

    async def main() -> Outcome:
        async with LocalBackend() as backend, Offload([packed], backend) as offload:
            return await offload.submit("score", Item("a", ()), 20.0)

    assert asyncio.run(main()) == Scored(1.0)


@pytest.mark.slow  # real workers
@pytest.mark.parametrize("runtime", ["rollart", "awslambdaric"])
def test_the_same_package_runs_under_the_local_backend(tmp_path: pathlib.Path, runtime: Runtime) -> None:
    """Also under AWS's own runtime client, which knows only the name of the handler."""
    if runtime == "awslambdaric":
        pytest.importorskip("awslambdaric")
    packed = build(FunctionSpec(name="score", source="mypack/"), base=tree(tmp_path))
    shutil.rmtree(tmp_path / "mypack")

    async def main() -> Outcome:
        async with LocalBackend(runtime=runtime) as backend, Offload([packed], backend) as offload:
            return await offload.submit("score", Item("a", ({"role": "assistant", "content": "four or five"},)), 20.0)

    assert asyncio.run(main()) == Scored(1.0)


CONFIGURED = """
class Near:
    def __init__(self, *, target, tolerance=0.5):
        self.target, self.tolerance = target, tolerance

    def __call__(self, sample):
        return float(abs(float(sample.completion) - self.target) <= self.tolerance)


def above(sample, *, least):
    return float(float(sample.completion) > least)
"""


def configured(directory: pathlib.Path, handler: str, **arguments: Any) -> Package:
    (directory / "near.py").write_text(CONFIGURED)
    return build(FunctionSpec(name="near", source="near.py", handler=handler, arguments=arguments), base=directory)


@pytest.mark.parametrize(("handler", "arguments"), [("Near", {"target": 3.0}), ("above", {"least": 2})])
def test_arguments_reach_a_class_and_a_function(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, handler: str, arguments: Any
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "rollart_function", None)
    packed = configured(tmp_path, handler, **arguments)
    packed.write(tmp_path / "packed")
    event = [{"id": text, "messages": [{"role": "assistant", "content": text}]} for text in ("3.2", "1")]
    answers = load(tmp_path / "packed")(event, None)
    assert [answer["aggregate_reward_score"] for answer in answers] == [1.0, 0.0]


def test_arguments_are_part_of_the_version_only_where_given(tmp_path: pathlib.Path) -> None:
    packed = [configured(tmp_path, "Near", target=target) for target in (3.0, 3.0, 4.0)]
    assert packed[0].version == packed[1].version != packed[2].version
    assert b"arguments" not in pack(tmp_path).files["rollart_manifest.json"]
    assert "arguments" not in pack(tmp_path).spec.identity()


@pytest.mark.parametrize(
    ("handler", "arguments", "error"),
    [
        ("Near", {"target": 1, "tolerence": 2}, "Near has no argument 'tolerence' .did you mean 'tolerance'"),
        ("Near", {}, "Near needs the argument 'target'"),
        ("above", {"less": 2}, "above has no argument 'less'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    tmp_path: pathlib.Path, handler: str, arguments: Any, error: str
) -> None:
    with pytest.raises(SpecInvalid, match=error):
        configured(tmp_path, handler, **arguments)


def test_a_ready_made_reward_travels_with_what_imports_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from serverless.rewards.math_verify import MathVerify\n\ndef mine(sample):\n    return MathVerify and 1.0\n"
    )
    packed = build(FunctionSpec(name="mine", source="mine.py"), base=tmp_path)
    assert {name for name in packed.files if name.startswith("serverless/rewards")} == {
        "serverless/rewards/__init__.py",
        "serverless/rewards/math_verify.py",
    }
