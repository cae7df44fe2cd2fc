"""Claim 3: one important token among more and more others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from recall_lab.claim.base import (
    Claim,
    Line,
    at_least,
    at_most,
    contrast,
    exact,
    mean,
    reported,
    unlearned,
    unless,
    within,
)
from recall_lab.claim.compare import missing_points, of, rows_of
from recall_lab.results import REPLICATES
from recall_lab.theory import fits, linear_attention, softmax

SPAN = 16
"""Ratio of the largest to the smallest of the compared lengths."""

KEYS = list(REPLICATES)


@dataclass(frozen=True, kw_only=True)
class Dilution(Claim):
    """With scores [100, 1, …, 1] the important token of linear attention drowns as the number of tokens grows, while
    the exponential of softmax keeps it on top.

    Share means the share of the weight that is on the important token; n is the number of tokens.

    Raw scores, in closed form: at 10,000 tokens the share is at most ½ for linear attention and at least ½ for softmax.

    Random keys, without training. Linear attention: the slope of log share over log n, between n = d_key and 16 d_key,
    is at most −0.8; the width with the flattest slope is judged. Softmax, with logits √d_key q·k for unit q and k: the
    share is within 2 % of theory; the width and octave of n farthest from it are judged. At half of the length at which
    theory gives ½, the half-mass length, the share is at least ½: softmax dilutes as well, exponentially later.

    Trained on one needle in noise: the share at 16 times the longest trained length, divided by the share at that
    length, in the layer and head with the largest share there. This ratio for linear attention minus that for softmax,
    with the kind of positions that is best on validation, is at most −0.3. Both must have learned the task: on
    validation, at least half way from chance to 1 in some cell.
    """

    important: float | int = 100
    """Raw score of the important token."""
    other: float | int = 1
    """Raw score of each other token."""
    tokens: int = 10000
    """Number of tokens at which raw scores are judged."""
    random: str = "random_keys"
    """Experiment on random keys."""
    needle: str = "needle_in_noise"
    """Experiment on trained models."""
    linear: str = "linear"
    softmax: Sequence[str] = ("softmax", "softmax/rotary")
    """Softmax attention, the one without positions first, and with each kind of positions."""

    def judge(self, table: pd.DataFrame) -> list[Line]:
        return [*self._raw(), *self._random(table), *self._trained(table)]

    def _raw(self) -> list[Line]:
        a, b = self.important, self.other
        name = f"raw scores [{a:g}, {b:g}, …, {b:g}], {self.tokens} tokens: share of the important one"
        halves = {"linear attention": a / b + 1, "softmax": 1 + np.exp(float(a - b))}
        return [
            at_most(f"{name}, linear attention", exact(float(linear_attention.raw_share(self.tokens, a, b))), 0.5),
            at_least(f"{name}, softmax", exact(float(softmax.raw_share(self.tokens, a, b))), 0.5),
            *(reported(f"raw scores: tokens at which the share is ½, {who}", exact(n)) for who, n in halves.items()),
        ]

    def _random(self, table: pd.DataFrame) -> list[Line]:
        rows = rows_of(table, self.random, "target_share_by_tokens")
        if len(rows):
            rows = rows[rows["oracle.pairs"] >= SPAN * rows["d_key"]]
        slopes = _worst(_slopes(of(rows, self.linear)), lambda x: x)
        ratios = _worst(_ratios(of(rows, self.softmax[0])), lambda x: abs(x - 1))
        halves = _worst(_halves(of(rows, self.softmax[0])), lambda x: -x)
        share = "target_share_by_tokens with random keys of"
        return [
            at_most(
                f"random keys: slope of log share over log n, linear attention{slopes[1]}",
                mean(slopes[0]), -0.8, f"{share} {self.linear}",
            ),
            within(
                f"random keys: share over theory, softmax{ratios[1]}", mean(ratios[0]), 1.0, 0.02,
                f"{share} {self.softmax[0]}",
            ),
            at_least(
                f"random keys: share at half of the half-mass length, softmax{halves[1]}", mean(halves[0]), 0.5,
                f"{share} {self.softmax[0]}",
            ),
        ]  # fmt: skip

    def _trained(self, table: pd.DataFrame) -> list[Line]:
        shares = rows_of(table, self.needle, "target_share")
        validated = table[(table["experiment"] == self.needle) & (table["split"] == "validation")]
        best = best_on_validation(validated, self.softmax)
        mixers = sorted(shares["mixer"].unique()) if len(shares) else []
        kept = {mixer: _kept(of(shares, mixer), of(validated, mixer)) for mixer in mixers}
        arms = {name: kept.get(name, pd.DataFrame()) for name in (self.linear, best or self.softmax[0])}
        gap = missing_points(arms, [])
        found = None if gap else contrast(*arms.values())
        name = f"needle: share kept at {SPAN} times the trained length, {self.linear} minus {best or 'softmax'}"
        missing = f"target_share on the needle, at the longest trained length and {SPAN} times it, of {gap}"
        beside = [reported(f"needle: share kept, {mixer}", mean(rows)) for mixer, rows in kept.items() if len(rows)]
        obstacle = next(filter(None, (unlearned(of(validated, arm)) for arm in arms)), "")
        return [unless(at_most(name, found, -0.3, missing), obstacle), *beside]


def best_on_validation(validated: pd.DataFrame, mixers: Sequence[str]) -> str | None:
    """The mixer with the highest mean validation accuracy, or the lower loss among equals; None without any scores."""
    scores = {}
    for mixer in mixers:
        own = of(validated, mixer)
        accuracy, loss = (own.loc[own["metric"] == metric, "value"].mean() for metric in ("accuracy", "loss_bits"))
        if accuracy == accuracy:
            scores[mixer] = (accuracy, -loss)
    return max(scores, key=lambda mixer: scores[mixer]) if scores else None


def _between(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with d_key ≤ n ≤ 16 d_key."""
    return rows[(rows["tokens"] >= rows["d_key"]) & (rows["tokens"] <= SPAN * rows["d_key"])]


def _slopes(rows: pd.DataFrame) -> pd.DataFrame:
    """Slope of log share over log n of each replicate and d_key."""
    groups = _between(rows).groupby([*KEYS, "d_key"]) if len(rows) else ()
    return pd.DataFrame(
        [
            (*key, fits.exponent(own["tokens"].to_numpy(float), own["value"].to_numpy(float))[0])
            for key, own in groups
            if own["tokens"].nunique() > 1
        ],
        columns=[*KEYS, "d_key", "value"],
    )


def _ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean share over that of theory, per replicate, d_key and octave of n."""
    if rows.empty:
        return rows
    rows = _between(rows)
    n, d = (rows[name].to_numpy(float) for name in ("tokens", "d_key"))
    theory = softmax.mass(n, d, np.sqrt(d))
    octave = d * 2 ** np.minimum(np.floor(np.log2(n / d)), np.log2(SPAN) - 1)
    rows = rows.assign(value=rows["value"] / theory, octave=octave)
    return rows.groupby([*KEYS, "d_key", "octave"], as_index=False)["value"].mean()


def _halves(rows: pd.DataFrame) -> pd.DataFrame:
    """Share at half of the half-mass length, interpolated in log n, per replicate and d_key."""
    found = []
    for key, own in rows.groupby([*KEYS, "d_key"]) if len(rows) else ():
        n = float(softmax.half_mass(key[-1])) / 2
        own = own.sort_values("tokens")
        if own["tokens"].min() <= n <= own["tokens"].max():
            found.append((*key, float(np.interp(np.log(n), np.log(own["tokens"]), own["value"]))))
    return pd.DataFrame(found, columns=[*KEYS, "d_key", "value"])


def _worst(values: pd.DataFrame, badness: Callable[[np.ndarray], np.ndarray]) -> tuple[pd.DataFrame, str]:
    """The values at the width (and octave) with the largest badness of their mean over replicates; these, in words."""
    if values.empty:
        return values, ""
    where = [name for name in ("d_key", "octave") if name in values]
    means = values.groupby(where)["value"].mean()
    point = means.index[int(np.argmax(badness(means.to_numpy())))]
    point = point if isinstance(point, tuple) else (point,)
    for name, x in zip(where, point, strict=True):
        values = values[values[name] == x]
    words = f", d_key = {point[0]:g}" + (f", n = {point[1]:g} to {2 * point[1]:g}" if len(point) > 1 else "")
    return values, words


def _kept(shares: pd.DataFrame, validated: pd.DataFrame) -> pd.DataFrame:
    """Share at SPAN times the longest trained length, divided by the share at that length; per replicate, with error.

    Both are means over the cells of their length, in the layer and head with the largest share at the trained length.
    """
    trained = validated["task.length"].max()
    found = []
    for key, run in shares.groupby(KEYS):
        near, far = (run[run["task.length"] == length] for length in (trained, SPAN * trained))
        if near.empty or far.empty:
            continue
        layer, head = near.groupby(["layer", "head"])["value"].mean().idxmax()
        parts = [part[(part["layer"] == layer) & (part["head"] == head)] for part in (near, far)]
        before, after = (float(part["value"].mean()) for part in parts)
        errors = [_error(part) for part in parts]
        ratio = after / before
        relative = float(np.hypot(errors[0] / before, errors[1] / max(after, 1e-12)))
        found.append({**dict(zip(KEYS, key, strict=True)), "value": ratio, "error": ratio * relative})
    return pd.DataFrame(found)


def _error(rows: pd.DataFrame) -> float:
    """Standard error of the mean of rows of different cells."""
    return float((rows["error"] ** 2).sum() ** 0.5 / len(rows))
