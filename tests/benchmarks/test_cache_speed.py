"""Processor time of the cache policies relative to softmax, on one thread and in float32."""

import math
from collections.abc import Callable

import jaxtyping
import pytest
import torch
from conftest import seconds

from recall_lab.mixer.base import Mixer
from recall_lab.mixer.forgetting import Forgetting
from recall_lab.mixer.heavy_hitter import HeavyHitter
from recall_lab.mixer.merging import Merging
from recall_lab.mixer.sink_window import SinkWindow
from recall_lab.mixer.softmax import Softmax
from recall_lab.mixer.top_k import TopK
from recall_lab.mixer.window import Window


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns off the type and shape checks of the tests, with which users do not run."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


STATIC = [Window, SinkWindow, HeavyHitter, Merging]


def forward(mixer: Mixer, batch: int, length: int) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, 2, length, 32, generator=generator).requires_grad_() for _ in range(3))
    return lambda: mixer.parallel(q, k, v, {})


def decode(mixer: Mixer, past: int) -> Callable[[], object]:
    """Decodes eight tokens from the state after `past` tokens."""
    x = torch.randn(1, 2, past, 32, generator=torch.Generator().manual_seed(0))
    token = x[:, :, :1]
    with torch.no_grad():
        _, filled = mixer.parallel(x, x, x, {})
        filled = {name: part.clone() for name, part in filled.items()}

    @torch.no_grad()
    def run() -> None:
        state = filled
        for _ in range(8):
            _, state = mixer.recurrence(token, token, token, {}, state)

    return run


@pytest.mark.parametrize("policy", STATIC)
def test_a_static_policy_takes_at_most_four_times_softmax(policy):
    softmax, static = seconds(
        forward(Softmax(d_model=64, heads=2), 16, 512), forward(policy(d_model=64, heads=2), 16, 512), times=25
    )
    assert static <= 4 * softmax, f"{static / softmax:.2f} ×"


@pytest.mark.parametrize("policy", STATIC)
def test_a_static_policy_is_linear_in_length(policy):
    mixer = policy(d_model=64, heads=2)
    short, long = seconds(forward(mixer, 1, 2048), forward(mixer, 1, 8192), times=4)
    assert long <= 2.2**2 * short, f"{long / short:.2f} × at four times the length"


@pytest.mark.parametrize("policy", STATIC)
def test_decoding_time_of_a_static_policy_does_not_grow(policy):
    mixer = policy(d_model=64, heads=2)
    short, long = seconds(decode(mixer, 1024), decode(mixer, 32768), times=40)
    assert 0.8 < long / short < 1.25


def test_decoding_from_softmax_grows_linearly():
    mixer = Softmax(d_model=64, heads=2)
    short, long = seconds(decode(mixer, 8192), decode(mixer, 65536), times=10)
    assert 0.8 < math.log(long / short, 8) < 1.35  # at the longer length the processor misses its caches more often


def test_forgetting_takes_at_most_twice_the_time_of_softmax():
    """Forward and backward pass at length 2048."""

    def run(mixer: Mixer, *gates: str) -> Callable[[], object]:
        q, k, v = (torch.randn(16, 2, 2048, 32).requires_grad_() for _ in range(3))
        given = {name: (-torch.rand(16, 2, 2048)).requires_grad_() for name in gates}
        return lambda: mixer.parallel(q, k, v, given)[0].sum().backward()

    softmax, forgetting = seconds(
        run(Softmax(d_model=64, heads=2)), run(Forgetting(d_model=64, heads=2), "log_forget"), times=3
    )
    assert forgetting <= 2 * softmax, f"{forgetting / softmax:.2f} ×"


@pytest.mark.parametrize(("length", "limit"), [(512, 1.7), (4096, 2.5)])
def test_top_k_relative_to_softmax(length, limit):
    """Forward and backward pass."""

    def run(mixer: Mixer) -> Callable[[], object]:
        q, k, v = (torch.randn(16, 2, length, 32).requires_grad_() for _ in range(3))
        return lambda: mixer.parallel(q, k, v, {})[0].sum().backward()

    softmax, top_k = seconds(run(Softmax(d_model=64, heads=2)), run(TopK(d_model=64, heads=2)), times=3)
    assert top_k <= limit * softmax, f"{top_k / softmax:.2f} ×"
