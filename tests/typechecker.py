"""The type checker used while tests run: beartype, set to accept an int where a float is expected, like mypy."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
