"""What a bounded cache covers: recall with a fixed budget, and the coverage of a sliding window."""

import numpy as np

from recall_lab.theory.base import Numbers


def static_recall(budget: Numbers, n: Numbers, candidates: Numbers = np.inf) -> Numbers:
    """Recall when B of n equiprobable pairs are kept without knowing the query: B/n, plus chance 1/V on the rest."""
    kept = np.minimum(1.0, np.asarray(budget) / np.asarray(n))
    return kept + (1 - kept) / np.asarray(candidates, float)


def window_coverage(distance: Numbers, window: Numbers) -> Numbers:
    """Share of queries whose answer is in the window: mean of [distance < w].

    distance: query position − value position, queries on the last axis. A window of w holds the current token and the
    w − 1 before it.
    """
    return np.mean(np.asarray(distance) < np.asarray(window)[..., None], axis=-1)


def window_reach(window: Numbers, short_conv: Numbers) -> Numbers:
    """Distance below which one layer of sliding-window attention can find a pair: w + c − 2, or 0 for c < 2.

    w: window; c: width of the short convolution. The key is at position p and the value at p + 1; both pass through the
    causal convolution. Position s receives both if p + 1 ≤ s ≤ p + c − 1. The last such position is c − 2 after the
    value and therefore leaves the window c − 2 steps after it. With c = 2 the only such position is that of the value,
    so the reach is w. Without a convolution no position receives both.
    """
    return np.where(np.asarray(short_conv) < 2, 0, np.asarray(window) + np.asarray(short_conv) - 2)
