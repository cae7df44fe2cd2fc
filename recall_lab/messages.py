"""What is printed at the terminal: one line per event, one line per error."""

import difflib
import re
import sys
from typing import Any

from hydra.errors import HydraException, InstantiationException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recall_lab.files import CONF, OWN, searched

ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError)
"""Errors that a user may have caused: printed in one line, without a traceback."""


LAUNCHER = "hydra.launcher"
"""The part of Hydra's own settings that conf/ has options of."""

QUOTED = """ "name='größe'" """.strip()


def print_line(line: str) -> None:
    """One line on stdout, unbroken even when several processes print."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def counted(number: int, word: str) -> str:
    """A number with its noun: "1 run", "2 runs"."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def short(value: float) -> str:
    """A number in three significant digits; from 1,000 on, in whole units."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def print_error(message: BaseException | str) -> int:
    """One line on stderr. Returns 2, the exit status of bad input."""
    text = one_line(message) if isinstance(message, BaseException) else message
    sys.stderr.write(f"recall-lab: {text}\n")
    sys.stderr.flush()
    return 2


def one_line(error: BaseException) -> str:
    """The error as one readable line. For a misspelt setting or option, it suggests the right one."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    text = "\n".join(map(str, chain))
    if isinstance(chain[-1], OverrideParseException):
        return (
            f"{chain[-1].override}: cannot be read; a value with spaces, special characters or letters other than a to "
            f"z needs two kinds of quotes: {QUOTED}"
        )
    if missing := re.search(r"Key '.+?' is not in struct\s+full_key: (\S+)", text):
        return no_setting(missing[1])
    if missing := re.search(r"Could not override '(.+?)'", text):
        return no_setting(missing[1])
    if missing := re.search(r"Could not (?:find|load) '(.+?)'", text):
        group, _, option = missing[1].rpartition("/")
        options = sorted({path.stem for folder in searched() for path in (folder / group).glob("*.yaml")})
        return f"there is no {group or 'config'} {option!r}; there are {', '.join(options)}"
    # Hydra wraps what a constructor raised: the innermost error is the cause.
    innermost = chain[-1] if isinstance(error, InstantiationException) else error
    message = str(innermost)
    if isinstance(innermost, OSError) and innermost.strerror:
        where = f"{innermost.filename}: " if innermost.filename else ""
        message = f"{where}{innermost.strerror}"
    if isinstance(innermost, ModuleNotFoundError):
        return f"{' '.join(message.split())}; looked in {_python_path()}"
    kind = type(innermost).__name__
    if not isinstance(innermost, (*ERRORS, RuntimeError, ArithmeticError, TypeError)):
        message = f"{kind}: {message}"  # "'heads'" alone says little, "KeyError: 'heads'" more
    return " ".join(message.split()) or kind


def _python_path() -> str:
    """Where modules of the user's own are looked for, in words."""
    if OWN:
        return f"{OWN[0]} and on the Python path"
    return "the Python path only: --config-dir FOLDER adds a folder of your own"


def no_setting(name: str) -> str:
    """The message for an unknown setting, which suggests the most similar known one."""
    if name.startswith("oracle."):
        return f"{name} has an effect only with oracle=random, which runs a mechanism on random keys and values"
    known = known_settings()
    if name.startswith(f"{LAUNCHER}.") and name in known:
        return f"{name} has no effect with the chosen hydra/launcher: it needs one that has it"
    if name in known:  # of another option of the group: mixer.budget while mixer=softmax
        group, _, option = name.partition(".")
        wanted = (
            f"{group}=[{option.partition('.')[0]}]"
            if group == "probe"
            else f"{'an' if group[0] in 'aeiou' else 'a'} {group} that has it"
        )
        return f"{name} has no effect with the chosen {group}: it needs {wanted}"
    close = difflib.get_close_matches(name, known, n=1)
    return f"there is no setting {name}" + (f"; did you mean {close[0]}?" if close else "")


def known_settings() -> list[str]:
    """Every setting of conf/ and of the user's own folder, as it is written on the command line."""
    known: list[str] = []

    def walk(config: dict[str, Any], prefix: str) -> None:
        for key, value in config.items():
            known.append(f"{prefix}{key}")
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")

    for folder in searched():
        for path in set(folder.rglob("*.yaml")) - {folder / "rates.yaml", folder / "card.yaml"}:
            # conf/GROUP/NAME.yaml is configuration of GROUP, and so is conf/GROUP_base.yaml, which its options include.
            group = path.relative_to(folder).parts[0] if path.parent != folder else path.stem.partition("_base")[0]
            group = LAUNCHER if group == "hydra" else group
            known.append(group)
            if group == "experiment" and folder != CONF:  # what it sets is known from elsewhere, or misspelt
                continue
            content = OmegaConf.to_container(OmegaConf.load(path))
            assert isinstance(content, dict), f"{path} holds no settings"
            settings = {str(key): value for key, value in content.items()}
            walk(settings, "" if group in ("config", "experiment") else f"{group}.")
    return known
