"""Tests of the architecture: imports go strictly down the levels of the diagram in the README, files and functions stay
small, conf/ mirrors the package, and every `_target_` resolves to the class of its name, with the same defaults."""

import ast
import dataclasses
import importlib
import inspect
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import CONF, config, names
from omegaconf import OmegaConf

from recall_lab.logger.base import Logger
from recall_lab.mixer.layer import Layer
from recall_lab.model import Model
from recall_lab.task.base import Task

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "recall_lab"
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if "golden" not in path.parts)
MECHANISMS = [path for path in FILES if path.parent.name == "mixer" and path.stem in names("mixer")]
WITHOUT_TORCH = (
    "theory",
    "messages",
    "provenance",
    "task",
    "folders",
    "series",
    "families",
    "sweep",
    "search",
    "times",
    "overview",
    "workers",
    "display",
    "results",
    "table_files",
    "claim",
    "fairness",
    "figure",
    "report",
    "cluster",
    "cli",
)
WITH_HYDRA = ("messages", "building", "cli")
MECHANISM_LINES, FILE_LINES = 40, 300


def picture() -> dict[str, int]:
    """Module or folder → its level, from the diagram in the README."""
    (drawn,) = re.findall(r"^recall_lab/ +level\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.S | re.M)
    return {name: int(level) for name, level in re.findall(r"^  (\w+)(?:\.py|/) .* (\d)$", drawn, re.M)}


LEVEL = picture()


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> set[str]:
    """Every module a file imports, also inside its functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def top(path: Path) -> str:
    """The part of the package that a file belongs to: the name that the README's picture shows."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def shared(group: str) -> set[str]:
    """The modules of a folder that its other files may import: base, engines (which have no yaml), style."""
    files = sorted((PACKAGE / group).glob("*.py"))
    if (CONF / group).is_dir():
        return {path.stem for path in files} - set(names(group))
    if group == "figure":
        return {path.stem for path in files if not re.search(r"^def draw\b", path.read_text("utf-8"), re.M)}
    return {"base", "check", "experiments", "rates"} if group == "cli" else {"base"}  # verbs that others build on


def test_readme_diagram_shows_every_module():
    """The diagram writes files as NAME.py and folders as NAME/."""
    there = {path.name for path in PACKAGE.glob("*.py")} | {f"{path.parent.name}/" for path in PACKAGE.glob("*/*.py")}
    drawn = re.findall(r"^  (\w+(?:\.py|/)) .* \d$", (ROOT / "README.md").read_text("utf-8"), re.M)
    assert sorted(drawn) == sorted(there - {"__init__.py"})
    assert len(LEVEL) == len(drawn)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_go_down(path):
    here = top(path)
    for module in imports(path):
        if not module.startswith("recall_lab.") or here == "__init__":
            continue
        _, other, *inner = module.split(".")
        if other == here:
            assert not inner or inner[0] in shared(here), f"imports its sibling {module}"
        elif other in LEVEL:
            assert LEVEL[other] < LEVEL[here], f"imports {module}, which is not on a lower level"


@pytest.mark.parametrize("path", [path for path in FILES if top(path) in WITHOUT_TORCH], ids=relative)
def test_files_that_do_not_import_torch(path):
    assert not any(module.split(".")[0] == "torch" for module in imports(path))


def test_importing_these_files_does_not_import_torch():
    """Nor do the modules that they import import torch. Reports and messages thus appear without delay."""
    paths = [path for path in FILES if top(path) in WITHOUT_TORCH]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_run_imports_only_what_it_needs():
    """Tables, statistics, figures and the compiler take seconds to import. (torch's optimizers import the compiler.)"""
    code = """import sys
from recall_lab import machine, runner
machine.prepare("cpu", 1)
sys.exit(", ".join({"pandas", "scipy", "matplotlib", "seaborn", "jinja2", "torch._dynamo"} & set(sys.modules)) or 0)"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_few_modules_import_hydra():
    knowing = {top(path) for path in FILES if any(m.split(".")[0] in ("hydra", "omegaconf") for m in imports(path))}
    assert knowing <= set(WITH_HYDRA)


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=relative)
def test_files_are_short(path):
    assert len(path.read_text("utf-8").splitlines()) <= FILE_LINES


def test_functions_are_simple():
    """Cyclomatic complexity, as ruff counts it, is limited in pyproject.toml."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "C901", "--output-format", "concise", "."]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def code_lines(path: Path) -> int:
    """Lines that hold code; docstrings, comments and imports are not counted."""
    text = path.read_text("utf-8")
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (constant and isinstance(node.value.value, str)):
            skipped |= set(range(node.lineno, node.end_lineno + 1))
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - skipped)


@pytest.mark.parametrize("path", MECHANISMS, ids=relative)
def test_a_mechanism_is_short(path):
    assert code_lines(path) <= MECHANISM_LINES


@pytest.mark.parametrize(
    "group", [group for group in ("task", "mixer", "probe", "claim", "logger") if (CONF / group).is_dir()]
)
def test_conf_mirrors_the_package(group):
    """Every yaml has a module of the same name; a module without a yaml is imported by others of its folder."""
    modules = {path.stem for path in (PACKAGE / group).glob("*.py")} - {"__init__"}
    assert set(names(group)) <= modules
    imported = set().union(*(imports(path) for path in FILES))
    assert all(f"recall_lab.{group}.{module}" in imported for module in shared(group) - {"__init__"})


def targets(node: Any) -> Iterator[dict[str, Any]]:
    """Every part of a configuration that names a `_target_`."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node
        for value in node.values():
            yield from targets(value)


def resolve(target: str) -> Callable[..., Any]:
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)


def composed(group: str, name: str) -> dict[str, Any]:
    """The configuration of one option of a group."""
    several = group in ("probe", "logger")
    chosen = config(f"{group}=[{name}]" if several else f"{group}={name}")[group]
    return OmegaConf.to_container(chosen[name] if several else chosen, resolve=True)


OPTIONS = [(group, name) for group in ("task", "mixer", "probe", "oracle", "logger") for name in names(group)]


@pytest.mark.parametrize(("group", "name"), [option for option in OPTIONS if option[0] != "oracle"])
def test_target_matches_its_yaml_name(group, name):
    """conf/mixer/delta_rule.yaml names DeltaRule, a Mixer, in recall_lab/mixer/delta_rule.py."""
    target = composed(group, name)["_target_"]
    module, _, made = target.rpartition(".")
    assert module == f"recall_lab.{group}.{name}"
    assert made.lower().replace("_", "") == name.replace("_", "")
    kind = {"task": Task, "mixer": Layer, "logger": Logger}.get(group)
    found = resolve(target)
    assert issubclass(found, kind) if kind and isinstance(found, type) else inspect.isfunction(found)


@pytest.mark.parametrize("path", sorted(set(CONF.glob("*/*/*.yaml")) - set(CONF.glob("hydra/*/*"))), ids=relative)
def test_a_variant_changes_options_of_its_mechanism(path):
    """conf/mixer/delta_rule/neg_eigval.yaml sets options of DeltaRule; it is not another mechanism."""
    group, name = path.relative_to(CONF).parts[:2]
    base, variant = composed(group, name), composed(group, f"{name}/{path.stem}")
    assert variant["_target_"] == base["_target_"]
    assert variant.keys() == base.keys()
    assert variant != base


def defaults(made: Callable[..., Any]) -> dict[str, Any]:
    """Parameter → default, of the parameters that have one; tuples as lists, as yaml has them."""
    found = {p.name: p.default for p in inspect.signature(made).parameters.values() if p.default is not p.empty}
    if dataclasses.is_dataclass(made):
        factories = {f.name: f.default_factory for f in dataclasses.fields(made)}
        found |= {name: make() for name, make in factories.items() if make is not dataclasses.MISSING}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


WITH_DEFAULTS = [CONF / group / f"{name}.yaml" for group, name in OPTIONS if name not in ("hybrid", "module")]
"""Not checked: a hybrid and a module have no defaults, because their parts are mixers and layers."""


@pytest.mark.parametrize("path", (WITH_DEFAULTS))
def test_defaults_are_equal_in_code_and_yaml(path):
    chosen = composed(path.parent.name, path.stem)
    stated = {key: value for key, value in chosen.items() if not key.startswith("_")}
    assert stated == defaults(resolve(chosen["_target_"]))


@pytest.mark.parametrize(("section", "elsewhere"), [("train", ()), ("test", ()), ("model", ("width",))])
def test_defaults_of_the_main_sections_are_equal_in_code_and_yaml(section, elsewhere):
    """Other arguments come from the task."""
    chosen = OmegaConf.to_container(config()[section])
    made = resolve(chosen["_target_"])
    stated = {key: value for key, value in chosen.items() if not key.startswith("_")}
    assert stated == {name: value for name, value in defaults(made).items() if name not in elsewhere}
    assert made is Model or dataclasses.is_dataclass(made)


@pytest.mark.parametrize("name", names("workload"))
def test_every_field_of_a_workload_is_set_by_its_yaml(name):
    """conf/workload/NAME.yaml fills each field from the setting of the same name."""
    chosen = OmegaConf.to_container(OmegaConf.load(CONF / "workload" / f"{name}.yaml"))
    made = resolve(chosen.pop("_target_"))
    assert made.__name__.lower() == name.replace("_", "")
    assert chosen == {field.name: f"${{{field.name}}}" for field in dataclasses.fields(made)}


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=relative)
def test_no_constructor_takes_arbitrary_keywords(path):
    """A misspelt key must fail."""
    arbitrary = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for part in targets(OmegaConf.to_container(OmegaConf.load(path))):
        parameters = inspect.signature(resolve(part["_target_"])).parameters.values()
        assert not [p.name for p in parameters if p.kind in arbitrary], part["_target_"]


@pytest.mark.parametrize("name", names("experiment"))
def test_experiments_compose(name):
    assert config(f"experiment={name}").name == name


def test_the_citation_names_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert OmegaConf.load(ROOT / "CITATION.cff").version == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
