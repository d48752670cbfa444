"""The repository itself: imports point one way, nothing names a machine, and the README is true."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

SCRIPTS = ("prepare", "train", "sample", "compare")
MAY_IMPORT = {
    "model": set(),
    "config": {"config", "model"},
    "data": {"data", "config"},
    "engine": {"engine", "data", "config", "model"},
    "comparison": {"comparison", "engine", "data", "config", "model"},
    "views": {"views", "engine", "data", "config", "model"},
    "interop": {"interop", "engine", "data", "config", "model"},
    "scripts": {"comparison", "views", "engine", "data", "config", "model", "train"},
}
OURS = {"model", "config", "data", "engine", "comparison", "views", "interop", "bench", "tests", *SCRIPTS}


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [REPOSITORY / name for name in listed.stdout.splitlines() if (REPOSITORY / name).exists()]


@pytest.mark.parametrize("layer", list(MAY_IMPORT))
def test_imports_point_one_way(layer: str) -> None:
    paths = {"model": [REPOSITORY / "model.py"], "scripts": [REPOSITORY / f"{name}.py" for name in SCRIPTS]}
    for path in paths.get(layer, sorted((REPOSITORY / layer).glob("*.py"))):
        imported = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
        assert imported & OURS <= MAY_IMPORT[layer], path


def test_no_function_is_longer_than_a_screen() -> None:
    for path in tracked("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "tests" not in path.parts:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
                assert length <= 50, f"{path.name}: {node.name} has {length} lines"


def test_public_functions_and_classes_say_what_they_do() -> None:
    """Methods that fulfil a documented base class need not repeat it."""
    documented_by_the_base = {"constants", "encode_plain", "safe_prefix", "error", "readable", "readinto"}
    for path in tracked("*.py"):
        if "tests" in path.parts:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        members = [m for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef) for m in node.body]
        for node in members:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                overloaded = any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)
                named = ast.get_docstring(node) or overloaded or node.name in documented_by_the_base
                assert named, f"{path.name}: {node.name}"


def test_nothing_that_is_kept_names_a_machine_or_what_is_beside_the_repository() -> None:
    for path in tracked():
        text = path.read_text(encoding="utf-8", errors="ignore")
        for word in ("/work" + "/", "/root" + "/", "../" + "shared", "../" + ".library"):
            assert word not in text, f"{path}: {word}"


README = (REPOSITORY / "README.md").read_text(encoding="utf-8") if (REPOSITORY / "README.md").exists() else ""


def test_the_readme_maps_every_file_of_the_core() -> None:
    for path in tracked("*.py", "config/*.toml"):
        if path.parent.name != "tests" and path.name != "__init__.py":
            name = path.relative_to(REPOSITORY).as_posix()
            assert f"`{path.name}`" in README or f"`{name}`" in README, name


def test_every_command_of_the_readme_is_accepted() -> None:
    """Parsed as the scripts parse them; those that train long are run by hand."""
    from config.command_line import parse
    from config.preparation import PrepareSettings
    from config.schema import CompareSettings, SampleSettings, TrainSettings

    schemas = {
        "prepare.py": PrepareSettings, "train.py": TrainSettings, "sample.py": SampleSettings,
        "compare.py": CompareSettings,
    }  # fmt: skip
    commands = re.findall(r"^python (\w+\.py)(.*)$", README, flags=re.MULTILINE)
    assert len(commands) >= 6
    import shlex

    for name, arguments in commands:
        parse(schemas[name], shlex.split(arguments, comments=True), takes_preset=name == "train.py")


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:^|`)make ([a-z]+)", README, flags=re.MULTILINE))
    assert {"demo", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_ci_runs_exactly_the_test_command_of_the_readme() -> None:
    """After what the tests of the pages need, where it is missing."""
    text = (REPOSITORY / ".ci/run").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[:2] == ["set -eu", 'cd "$(dirname "$0")/.."'] and lines[-1] == "exec make test"
    assert lines[2].startswith("if ! command -v chromium") and lines[-2] == "fi"


def test_every_requirement_has_a_bound_and_says_what_it_is_for() -> None:
    for name in ("requirements.txt", "requirements-dev.txt"):
        for line in (REPOSITORY / name).read_text(encoding="utf-8").splitlines():
            if line and not line.startswith(("#", "-r")):
                assert re.match(r"[\w-]+(==|>=)[\d.]+ +# \S", line), line


def test_the_shakespeare_preset_has_the_shape_of_the_recipe_it_is_compared_with() -> None:
    from config.command_line import parse
    from config.schema import TrainSettings

    preset = parse(TrainSettings, ["shakespeare_char"], takes_preset=True)
    shape = (preset.n_layer, preset.n_head, preset.n_embd, preset.block_size, preset.batch_size)
    assert shape == (4, 4, 128, 64, 12) and preset.gradient_accumulation_steps == 1
    assert preset.max_iters <= 1300 and preset.val_fraction == 0.1 and preset.tokenizer == "char"
