"""Where a result comes from: the git revision, and the versions that it depends on. torch is not imported for it."""

import importlib.metadata
import platform
import subprocess
from functools import cache

from recall_lab.files import CONF


@cache
def provenance() -> dict[str, str]:
    """Where a result comes from: the git revision and the versions of recall_lab, Python, torch and numpy."""
    return {
        "git": revision(),
        "version": version("recall_lab"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
    }


def version(package: str) -> str:
    """The installed version of a package, "unknown" where it is not installed (in a bare checkout)."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@cache
def revision() -> str:
    """The checkout's git revision, with a + where files differ from it; "" for an installed package."""
    git = ["git", "-C", str(CONF.parent)]
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", "conf/config.yaml"], capture_output=True)
        if tracked.returncode:
            return ""
        describe = [*git, "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        return subprocess.check_output(describe, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
