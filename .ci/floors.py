"""Prints the lower bounds of pyproject.toml as pip constraints, so that the oldest versions allowed can be tested.

torch is left out: its old builds bring gigabytes of CUDA libraries with them.
"""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
for requirement in project["dependencies"] + project["optional-dependencies"]["test"]:
    name, lowest = re.match(r"([\w.-]+)>=([\w.]+)", requirement).groups()
    if name != "torch":
        print(f"{name}=={lowest}")
