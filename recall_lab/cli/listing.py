"""`recall-lab list`: tasks, mixers, probes, claims, experiments and so on, read from the code and the configuration."""

import ast
import importlib.util
import re
from pathlib import Path

import hydra
from omegaconf import OmegaConf

from recall_lab.checks import require
from recall_lab.cli.base import compose, leading_comment
from recall_lab.files import CONF

GROUPS = {"task": "tasks", "mixer": "mixers", "probe": "probes", "oracle": "oracles", "optimizer": "optimizers",
          "schedule": "schedules", "experiment": "experiments", "claim": "claims"}  # fmt: skip


def listing(group: str | None = None) -> str:
    """The options of every group, each with the first sentence of its docstring; for a single group, all of it.

    Raises ValueError for a group that does not exist.
    """
    chosen = {name: word for name, word in GROUPS.items() if group in (None, name, word)}
    require(bool(chosen), f"there is no group {group!r} to list; there are {', '.join(GROUPS.values())}")
    lines = []
    for name, word in chosen.items():
        lines.append(f"{word} (recall-lab claim NAME)" if name == "claim" else f"{word} ({name}=…)")
        for path in sorted((CONF / name).rglob("*.yaml"), key=lambda path: path.with_suffix("")):
            option = path.relative_to(CONF / name).with_suffix("").as_posix()
            text = describe(path)
            first, *rest = (text.splitlines() if group else [sentence(text)]) or [""]
            lines.append(f"  {option:<24} {first}")
            if group is not None:
                rest += facts(option) if name == "mixer" else []
                lines += [f"  {'':<24} {line}".rstrip() for line in rest] + [""]
        lines.append("")
    return "\n".join(lines).rstrip()


def sentence(text: str) -> str:
    """The first sentence of a docstring or comment, on one line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.?]) (?=[A-Z])", paragraph, maxsplit=1)[0]


def facts(mixer: str) -> list[str]:
    """A mixer's family (the engine it uses) and the size of its state, counted by stepping."""
    config = compose([f"mixer={mixer}"])
    make = hydra.utils.instantiate(config.mixer, _convert_="all")
    if isinstance(make, list):
        return []
    made = make(d_model=config.model.d_model)
    kind = type(made)
    family = next(base.__module__.rpartition(".")[2] for base in kind.__mro__[1:] if base.__module__ != kind.__module__)
    family = {"matrix_memory": "matrix memory", "cache": "softmax over a cache"}.get(family, "no shared engine")
    elements, _ = made.state_size(512)
    return [f"Family: {family}. State: {elements:,} elements per layer at n=512 and d_model={config.model.d_model}."]


def describe(path: Path) -> str:
    """The docstring of a yaml's `_target_`, read without importing it; without one, or for a class of torch, the yaml's
    leading comment."""
    target = OmegaConf.select(OmegaConf.load(path), "_target_")
    if target is None or str(target).startswith("torch."):
        return leading_comment(path)
    module, _, name = target.rpartition(".")
    source = importlib.util.find_spec(module)
    require(source is not None, f"{path}: there is no module {module}")
    tree = ast.parse(Path(str(source and source.origin)).read_text(encoding="utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name)
    return ast.get_docstring(node) or ""
