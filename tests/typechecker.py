"""The checker of annotations while tests run: beartype, for which an int is also a float, as it is for mypy."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
