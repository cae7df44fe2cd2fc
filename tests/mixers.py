"""Helpers for tests of mixers: every mechanism of conf/mixer, some of its options, and comparison of tensors."""

from functools import cache

import pytest
import torch
from conftest import CONF, config, names
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from torch import Tensor

from recall_lab.contract.mixer import relative_error
from recall_lab.mixer.base import Mixer

OPTIONS: dict[str, list[dict]] = {
    "linear": [
        {"feature_map": "elu+1", "normalizer": True},
        {"feature_map": "hedgehog", "normalizer": True},
        {"feature_map": "dpfp"},
        {"feature_map": "taylor"},
    ],
    "gated_linear": [{"decay": "retention", "write": 0.5}, {"decay": 0.9, "write": 1}, {"decay": 1}],
    "delta_rule": [{"allow_neg_eigval": True}],
    "gated_delta_product": [{"householders": 1}, {"householders": 3, "gated": False}],
    "gsa": [{"slots": 5}],
    "hgrn2": [{"lower_bound": 0.9}],
    "gated_delta": [{"allow_neg_eigval": True}],
    "ttt_linear": [{"mini_batch": 1}, {"mini_batch": 7}],
    "based": [{"window": 5}],
    "log_linear": [{"levels": 3}],
    "top_k": [{"budget": 8, "kept": 16}],
    "random_k": [{"budget": 8, "draw_seed": 7}],
    "stickbreaking_attn": [{"remainder": True}],
    "dsa": [{"budget": 9, "index_heads": 2, "index_width": 5}],
    "path_attn": [{"forget": True}],
    "deltaformer": [{"lookup": "key"}],
    "nsa": [{"budget": 20, "block_size": 5, "window": 7}],
}
"""Options with which a mechanism is tested in addition to its defaults."""

MECHANISMS = [name for name in names("mixer") if "_base@" in (CONF / "mixer" / f"{name}.yaml").read_text()]
LINEAR_IN_V = [
    name
    for name in MECHANISMS
    if get_class(OmegaConf.load(CONF / "mixer" / f"{name}.yaml")["_target_"]).linear_in_v  # type: ignore[attr-defined]
]
POSITIONED = [name for name in MECHANISMS if "/cache_base@" in (CONF / "mixer" / f"{name}.yaml").read_text()]
"""The mechanisms whose positions are an option."""
for _name in POSITIONED:
    OPTIONS.setdefault(_name, []).extend({"positions": kind} for kind in ("rotary", "alibi"))
CASES = [(name, options) for name in MECHANISMS for options in [{}, *OPTIONS.get(name, [])]]
every_case = pytest.mark.parametrize(
    ("name", "options"), CASES, ids=["-".join([name, *map(str, options.values())]) for name, options in CASES]
)
every_mechanism = pytest.mark.parametrize("name", MECHANISMS)


@cache
def settings(name: str):
    return config(f"mixer={name}").mixer


def build(name: str, **options) -> Mixer:
    torch.manual_seed(0)
    return instantiate(settings(name))(**{"d_model": 16, "heads": 2} | options)


def close(x: Tensor, y: Tensor, tolerance: float = 1e-10) -> bool:
    return x.shape == y.shape and relative_error(x, y) <= tolerance


def same_state(x: dict[str, Tensor], y: dict[str, Tensor], tolerance: float = 1e-10) -> bool:
    return x.keys() == y.keys() and all(close(x[name], y[name], tolerance) for name in x)
