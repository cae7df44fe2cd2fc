"""`recall-lab list`: tasks, mixers, probes, claims, experiments and so on, read from the code and the configuration."""

import ast
import importlib.util
import re
from pathlib import Path

import hydra
from omegaconf import OmegaConf

from recall_lab.checks import require
from recall_lab.cli.base import compose, leading_comment
from recall_lab.files import OWN, searched, use
from recall_lab.messages import ERRORS, one_line

GROUPS = {"task": "tasks", "mixer": "mixers", "probe": "probes", "oracle": "oracles", "optimizer": "optimizers",
          "schedule": "schedules", "logger": "loggers", "experiment": "experiments", "claim": "claims",
          "figure": "figures", "hydra/launcher": "launchers"}  # fmt: skip

CHOSEN = {"claim": "recall-lab claim NAME", "figure": "in every report; recall_lab.plot(NAME, table) from Python"}
"""How the options of a group are chosen, where it is not by group=NAME."""


def listing(group: str | None = None, config_dir: str | None = None) -> str:
    """The options of every group, those in config_dir included, each with the first sentence of its docstring; for a
    single group, all of it.

    Raises ValueError for a group that does not exist.
    """
    if config_dir is not None:
        use(config_dir)
    chosen = {name: word for name, word in GROUPS.items() if group in (None, name, word)}
    require(bool(chosen), f"there is no group {group!r} to list; there are {', '.join(GROUPS.values())}")
    lines = []
    for name, word in chosen.items():
        lines.append(f"{word} ({CHOSEN.get(name, f'{name}=…')})")
        for option, path in options(name).items():
            text = describe(path)
            first, *rest = (text.splitlines() if group else [sentence(text)]) or [""]
            lines.append(f"  {option:<24} {first}")
            if group is not None:
                rest += facts(option, config_dir) if name == "mixer" else []
                lines += [f"  {'':<24} {line}".rstrip() for line in rest] + [""]
        lines.append("")
    return "\n".join(lines).rstrip()


def options(group: str) -> dict[str, Path]:
    """Option → its yaml, or a figure's module, sorted by name; the user's own included."""
    found = {}
    folders, kind = (searched(), "*.yaml") if group != "figure" else ([*OWN, Path(__file__).parents[1]], "*.py")
    for folder in folders:
        for path in (folder / group).rglob(kind):
            if kind == "*.yaml" or re.search(r"^def draw\b", path.read_text("utf-8"), re.M):
                found[path.relative_to(folder / group).with_suffix("").as_posix()] = path
    return dict(sorted(found.items(), key=lambda item: Path(item[0])))


def sentence(text: str) -> str:
    """The first sentence of a docstring or comment, on one line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.?]) (?=[A-Z])", paragraph, maxsplit=1)[0]


def facts(mixer: str, config_dir: str | None = None) -> list[str]:
    """A mixer's family (the engine it uses) and the size of its state, counted by stepping; for a mixer that cannot be
    made, the reason."""
    try:
        config = compose([f"mixer={mixer}"], config_dir)
        make = hydra.utils.instantiate(config.mixer, _convert_="all")
        if isinstance(make, list):
            return []
        made = make(d_model=config.model.d_model)
        size = made.state_size(512)
    except Exception as error:  # a mixer of the user's own may raise anything, and the others are still listed
        return [f"Cannot be made: {one_line(error)}"]
    kind = type(made)
    family = next(base.__module__.rpartition(".")[2] for base in kind.__mro__[1:] if base.__module__ != kind.__module__)
    family = {"matrix_memory": "matrix memory", "cache": "softmax over a cache"}.get(family, "no shared engine")
    if size is None:
        return [f"Family: {family}. State: not known."]
    return [f"Family: {family}. State: {size[0]:,} elements per layer at n=512 and d_model={config.model.d_model}."]


def describe(path: Path) -> str:
    """The docstring of a module, or of a yaml's `_target_`, read without importing it; without one, or for a class of
    torch, the yaml's leading comment. Where it cannot be read, the reason."""
    try:
        if path.suffix == ".py":
            return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        target = OmegaConf.select(OmegaConf.load(path), "_target_")
        if target is None or str(target).startswith("torch."):
            return leading_comment(path)
        module, _, name = str(target).rpartition(".")
        source = importlib.util.find_spec(module)
        if source is None or source.origin is None:
            raise ModuleNotFoundError(f"No module named {module!r}")
        tree = ast.parse(Path(source.origin).read_text(encoding="utf-8"))
    except (*ERRORS, ModuleNotFoundError, SyntaxError) as error:
        return f"{path} cannot be read: {one_line(error)}"
    named = (n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name)
    return next((ast.get_docstring(node) or "" for node in named), "") or leading_comment(path)
