"""What is told to the person at the terminal, in one line each; and where the configuration lies."""

import difflib
import re
import sys
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, InstantiationException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

CONF = next(path for path in (Path(__file__).parent / "conf", Path(__file__).parents[1] / "conf") if path.is_dir())
"""The configuration: inside the installed package, or beside it in a checkout."""

ERRORS = (HydraException, OmegaConfBaseException, ValueError, OSError)
"""What a person can have caused: told in one line, without a traceback."""


def say(line: str) -> None:
    """One line for the person at the terminal, whole even when several processes speak."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def complain(error: BaseException) -> int:
    """One line on stderr; gives the exit status."""
    sys.stderr.write(f"recall-lab: {one_line(error)}\n")
    return 2


def one_line(error: BaseException) -> str:
    """The error in one readable line, with the key that was meant where one was misspelt."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    text = "\n".join(map(str, chain))
    if missing := re.search(r"Key '.+?' is not in struct\s+full_key: (\S+)", text):
        return f"there is no setting {missing[1]}{meant(missing[1])}"
    if missing := re.search(r"Could not override '(.+?)'", text):
        return f"there is no setting {missing[1]}{meant(missing[1])}"
    if missing := re.search(r"Could not find '(.+?)'", text):
        group, _, option = missing[1].rpartition("/")
        options = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
        return f"there is no {group or 'config'} {option!r}; there are {', '.join(options)}"
    # Hydra wraps what a constructor raised: the innermost error is the one that says what is wrong.
    return " ".join(str(chain[-1] if isinstance(error, InstantiationException) else error).split())


def meant(word: str) -> str:
    """The setting that a misspelt one comes closest to, as a question; nothing where none is near."""
    known: list[str] = []

    def walk(config: dict[str, Any], prefix: str) -> None:
        for key, value in config.items():
            known.append(f"{prefix}{key}")
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")

    for path in CONF.rglob("*.yaml"):
        # conf/GROUP/NAME.yaml lands under GROUP; so does conf/GROUP_base.yaml, which the options of GROUP take in.
        group = path.relative_to(CONF).parts[0] if path.parent != CONF else path.stem.partition("_base")[0]
        walk(OmegaConf.to_container(OmegaConf.load(path)), "" if group in ("config", "experiment") else f"{group}.")
        known.append(group)
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
