"""The house: imports go strictly down the floors, siblings do not know each other, conf mirrors the package."""

import ast
import dataclasses
import importlib
from pathlib import Path

import pytest
from conftest import CONF, config, names
from omegaconf import OmegaConf

PACKAGE = Path(__file__).parents[1] / "recall_lab"
FLOOR = {
    "shapes": 0, "checks": 0, "files": 0, "theory": 0, "say": 0,
    "task": 1, "mixer": 1, "results": 1,
    "model": 2, "oracle": 2,
    "train": 3, "probe": 3, "figure": 3,
    "report": 4, "job": 4,
    "run": 5, "catalogue": 6, "__main__": 7, "__init__": 0,
}  # fmt: skip
SHARED = {
    "base",
    "neutral",
    "short_conv",
    "numerics",
    "decay",
    "feature_map",
    "matrix_memory",
    "cache",
    "fenwick",
    "least_squares",
    "taylor_window",
    "decayed_products",
    "channel_decay",
    "slot_merging",
    "style",
}
"""What siblings may import of each other: the base and the engines of their folder, and the style of figures."""
WITHOUT_TORCH = ("figure", "task", "results", "theory", "say", "report", "run", "catalogue", "__main__")
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module a file imports, also inside its functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def place(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    here = ("recall_lab." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for module in imports(path):
        if not module.startswith("recall_lab.") or here == "recall_lab":
            continue
        other = place(module)
        if other == place(here):
            parts = module.split(".")
            assert len(parts) < 3 or parts[2] in SHARED, f"{here} imports its sibling {module}"
        elif other in FLOOR:
            assert FLOOR[other] < FLOOR[place(here)], f"{here} imports {module}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_these_need_no_torch(path):
    if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in WITHOUT_TORCH:
        assert not any(module.split(".")[0] == "torch" for module in imports(path))


def test_only_run_and_its_command_line_know_hydra():
    knowing = {path.stem for path in FILES if any(m.split(".")[0] in ("hydra", "omegaconf") for m in imports(path))}
    assert knowing == {"say", "job", "run", "catalogue"}


@pytest.mark.parametrize("group", ["task", "mixer", "probe"])
def test_conf_mirrors_the_package(group):
    modules = {path.stem for path in (PACKAGE / group).glob("*.py")} - SHARED - {"__init__"}
    assert modules == set(names(group))
    for name in names(group):
        target = OmegaConf.load(CONF / group / f"{name}.yaml")["_target_"]
        assert target.startswith(f"recall_lab.{group}.{name}.")


@pytest.mark.parametrize("name", names("experiment"))
def test_experiments_compose(name):
    assert config(f"experiment={name}").name == name


def test_every_setting_of_a_mixer_is_named_in_its_yaml():
    for name in names("mixer"):
        text = (CONF / "mixer" / f"{name}.yaml").read_text()
        keys = [line for line in text.splitlines() if ":" in line and not line.startswith((" ", "-", "#", "defaults"))]
        assert any(line.startswith("_target_") for line in keys)


@pytest.mark.parametrize("name", names("mixer"))
def test_a_mixer_is_the_same_from_python_and_from_its_yaml(name):
    """What a yaml says is what the class does when nothing is said."""
    chosen = OmegaConf.to_container(config(f"mixer={name}").mixer)
    module, _, kind = chosen["_target_"].rpartition(".")
    made = getattr(importlib.import_module(module), kind)
    if not dataclasses.is_dataclass(made):
        return
    defaults = {field.name: field.default for field in dataclasses.fields(made) if field.name != "d_model"}
    assert {key: value for key, value in chosen.items() if not key.startswith("_")} == defaults
