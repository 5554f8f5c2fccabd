"""The rules of the layout: names that shadow nothing, and imports that run one way."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests import tiny

ROOT = Path(__file__).resolve().parent.parent
SCRIPT_FOLDERS = ("data_gen", "scripts", "train")  # `python FOLDER/x.py` puts FOLDER first on sys.path
PACKAGES = {
    "specvocab_kernels": ROOT / "kernels" / "specvocab_kernels",
    "specvocab_model": ROOT / "specvocab_model",
    "data_gen": ROOT / "data_gen",
    "train": ROOT / "train",
}
# What each package may import of the project, as prefixes of full names.
MAY_IMPORT = {
    "specvocab_kernels": ("specvocab_kernels",),
    "specvocab_model": ("specvocab_kernels", "specvocab_model"),
    "data_gen": ("specvocab_kernels", "specvocab_model", "data_gen"),
    "train": ("specvocab_kernels", "specvocab_model", "data_gen.shards", "data_gen.features", "train"),
}
OURS = (*PACKAGES, "scripts", "tests", "kernels")


# ---- names ----


def normalised(distribution: str) -> str:
    """One spelling for ``PyYAML``, ``hydra_core`` and ``hydra-core>=1.3``."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", distribution).group()).lower()


def dependencies(distribution: str) -> set[str]:
    """``distribution`` and every installed distribution that it needs, extras included, directly or not."""
    found: set[str] = set()
    waiting = [distribution]
    while waiting:
        name = normalised(waiting.pop())
        if name in found:
            continue
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another platform, or of an extra that is not installed
            continue
        found.add(name)
        waiting += requirements
    return found


def dependency_modules() -> set[str]:
    """Top-level names that belong to the standard library or to our dependencies."""
    needed = dependencies("specvocab") - {"specvocab"}
    installed = metadata.packages_distributions().items()
    names = {module for module, owners in installed if any(normalised(owner) in needed for owner in owners)}
    assert {"torch", "transformers", "datasets", "huggingface_hub"} <= names
    return names | set(sys.stdlib_module_names)


def test_no_script_shadows_the_standard_library_or_a_dependency() -> None:
    taken = dependency_modules()
    for folder in SCRIPT_FOLDERS:
        names = {path.stem for path in (ROOT / folder).iterdir() if path.suffix == ".py" or path.is_dir()}
        assert names and not names & taken, f"{folder}/ is first on sys.path when its scripts run; rename these"


@pytest.mark.parametrize("folder", ["data_gen", "train"])
@pytest.mark.parametrize("name", ["datasets", "evaluate", "logging", "tensorboard", "types", "wandb"])
def test_names_that_are_known_to_break(folder: str, name: str) -> None:
    assert not (ROOT / folder / f"{name}.py").exists() and not (ROOT / folder / name).exists()


def test_the_kernels_folder_is_not_a_package() -> None:
    """A top-level package ``kernels`` would be taken for the PyPI package that transformers imports."""
    assert (ROOT / "kernels" / "specvocab_kernels" / "__init__.py").is_file()
    assert not (ROOT / "kernels" / "__init__.py").exists()


# ---- imports that must work ----


def run_python(code: str, *arguments: str) -> str:
    """Run ``code`` in a new interpreter with the checkout's root first on sys.path; returns what it printed."""
    ended = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_transformers_loads_a_model_beside_the_pypi_package_kernels(tmp_path: Path) -> None:
    if not any(distribution.name == "kernels" for distribution in metadata.distributions()):
        pytest.skip("the PyPI package `kernels` is not installed (it comes with the extra `dev`)")
    folder = tiny.tiny_target_folder(tmp_path / "target", "llama")
    code = """
import sys
from pathlib import Path
assert sys.path[0] in ("", str(Path.cwd())) and Path("kernels/specvocab_kernels").is_dir()
import kernels
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(kernels.__file__, model(model.dummy_inputs["input_ids"]).logits.shape[-1], sep="\\n")
"""
    kernels_file, vocab_size = run_python(code, str(folder)).splitlines()
    assert ROOT / "kernels" not in Path(kernels_file).parents
    assert int(vocab_size) == tiny.TOKENIZER_LENGTH + 17


def test_our_kernels_import_and_run_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None  # every import of it fails
import pkgutil
import torch
import specvocab_kernels
operations = [module.name for module in pkgutil.iter_modules(specvocab_kernels.__path__) if module.ispkg]
for operation in operations:
    __import__(f"specvocab_kernels.{operation}")
hidden, weight = torch.ones(2, 4), torch.ones(5, 4)
print(len(operations), specvocab_kernels.gather_dot(hidden, weight, torch.tensor([[0], [4]])).tolist())
"""
    count, result = run_python(code).split(maxsplit=1)
    assert int(count) >= 2
    assert result.strip() == "[[4.0], [4.0]]"


def test_every_command_starts_in_a_new_interpreter() -> None:
    """Other tests call or fork most of them in a process that has imported everything and has the root on sys.path."""
    commands = [*sorted((ROOT / "scripts").glob("*.py")), ROOT / "train" / "main.py", ROOT / "data_gen" / "main.py"]
    assert len(commands) > 15
    code = """
import os, runpy, sys
import torch, transformers  # once, because they take seconds; each command imports the rest itself
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
for command in sys.argv[1:]:
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        print(f"{command} {os.waitstatus_to_exitcode(status)}", flush=True)
        continue
    sys.path[0] = os.path.dirname(command)
    by_hydra = "hydra_main" in open(command).read()
    sys.argv = [command, "--version" if by_hydra else "--help"]  # Hydra composes before it helps
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code = "it went on"
    try:
        runpy.run_path(command, run_name="__main__")
    except SystemExit as stop:
        code = stop.code
    os._exit(code not in (0, None))  # quickly; an exception has the interpreter exit with 1
"""
    assert run_python(code, *map(str, commands)).splitlines() == [f"{command} 0" for command in commands]


# ---- the direction of imports ----


def imported_names(source: str) -> Iterator[str]:
    """Full names of everything that ``source`` imports, at any depth: ``a.b`` for ``from a import b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import: write the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def forbidden_imports(package: str, source: str) -> list[str]:
    """What a file of ``package`` imports against the rules."""
    forbidden = [name for name in imported_names(source) if is_within(name, OURS)]
    forbidden = [name for name in forbidden if not is_within(name, MAY_IMPORT[package])]
    if package == "specvocab_kernels":
        allowed = ("torch", "triton", *PACKAGES, *sys.stdlib_module_names)
        forbidden += [name for name in imported_names(source) if not is_within(name, allowed)]
    return forbidden


@pytest.mark.parametrize(
    ("folders", "extras"),
    [
        ((*PACKAGES.values(), ROOT / "scripts"), ("tune", "sweep", "vllm", "sglang")),
        ((ROOT / "tests",), ("dev", "vllm", "sglang")),
    ],
)
def test_what_is_imported_is_declared(folders: tuple[Path, ...], extras: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {normalised(requirement) for requirement in project["dependencies"]}
    declared |= {normalised(name) for extra in extras for name in project["optional-dependencies"][extra]}
    sources = [file.read_text() for folder in folders for file in folder.rglob("*.py")]
    modules = {name.split(".")[0] for source in sources for name in imported_names(source)}
    modules -= {*sys.stdlib_module_names, *OURS}
    owners = metadata.packages_distributions()
    assert "torch" in modules
    # What is not installed here (vllm, sglang) must bear its distribution's own name.
    assert not {name for name in modules if not declared & {normalised(owner) for owner in owners.get(name, (name,))}}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    files = sorted(PACKAGES[package].rglob("*.py"))
    assert len(files) > 3
    found = {str(file.relative_to(ROOT)): forbidden_imports(package, file.read_text()) for file in files}
    assert not {file: names for file, names in found.items() if names}


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("specvocab_kernels", "import numpy"),
        ("specvocab_kernels", "from specvocab_model.draft import Draft"),
        ("specvocab_model", "def f():\n    from train.loop import train"),
        ("specvocab_model", "import data_gen.shards"),
        ("data_gen", "from train import packing"),
        ("train", "from data_gen.engines import build"),
        ("train", "from data_gen import prompts"),
        ("train", "import scripts.export"),
        ("data_gen", "import kernels"),
    ],
)
def test_a_forbidden_import_is_noticed(package: str, source: str) -> None:
    assert forbidden_imports(package, source)


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("specvocab_kernels", "import os, torch, triton.language as tl"),
        ("train", "from data_gen.shards import read_manifest"),
        ("train", "from data_gen import shards"),
        ("train", "from data_gen.features import FeatureStore"),
        ("data_gen", "from specvocab_model.target import Target"),
    ],
)
def test_an_allowed_import_is_let_through(package: str, source: str) -> None:
    assert not forbidden_imports(package, source)
