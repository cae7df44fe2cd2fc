"""Claim 1: what softmax attention and linear attention cost."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from recall_lab.claim.base import Claim, Line, exact, reported, within
from recall_lab.theory import fits

COSTS = ("prefill_flops", "decode_flops", "state_bytes", "prefill_seconds", "decode_seconds")
"""Metrics of the probe cost."""


@dataclass(frozen=True, kw_only=True)
class Cost(Claim):
    """Softmax attention costs O(n²d) for a prefill and O(nd) for a decode step, and its KV cache has O(nd) bytes;
    linear attention costs O(nd²) and O(d²), and its state has O(d²) bytes, at any length n.

    FLOPs are counted for the mechanism alone, from q, k and v on. An exponent is the slope of log cost over log n at
    the largest d_key, for lengths n ≥ 8 d_key, or over log d_key at the largest n.

    Judged is, among linear attention, gated_linear, gla, mamba2, delta_rule, gated_delta, kda and rwkv7, the exponent
    farthest from the claimed one. All others are reported: mesa solves a system of d equations (d³), based has d²
    features, log_linear has log n states. So are times, and the shortest measured length from which a mechanism is
    the faster one.
    """

    matrix_memories: Sequence[str] = ("linear",)
    """The mechanisms that the lines on linear attention are about."""
    softmax: str = "softmax"

    def judge(self, table: pd.DataFrame) -> list[Line]:
        table = table[table["metric"].isin(COSTS)]
        memories = list(self.matrix_memories)
        n, d = "length", "d_key"
        return [
            self._line(table, "softmax: prefill FLOPs over n", [self.softmax], "prefill_flops", n, 2.0, 0.1),
            self._line(table, "matrix memories: prefill FLOPs over n", memories, "prefill_flops", n, 1.0, 0.05),
            self._line(table, "softmax: decode FLOPs over n", [self.softmax], "decode_flops", n, 1.0, 0.05),
            self._line(table, "matrix memories: decode FLOPs over n", memories, "decode_flops", n, 0.0, 0.02),
            self._line(table, "softmax: bytes of state over n", [self.softmax], "state_bytes", n, 1.0, 0.02),
            self._line(table, "matrix memories: bytes of state over n", memories, "state_bytes", n, 0.0, 0.02),
            self._line(table, "matrix memories: decode FLOPs over d", memories, "decode_flops", d, 2.0, 0.1),
            *self._beside(table),
            *(self._faster(table, mixer, step) for mixer in memories for step in ("prefill", "decode")),
        ]

    def _line(
        self, table: pd.DataFrame, name: str, mixers: list[str], metric: str, over: str, target: float, tolerance: float
    ) -> Line:
        found = {mixer: _exponent(table, mixer, metric, over) for mixer in mixers}
        absent = [mixer for mixer, exponent in found.items() if exponent is None]
        if absent:
            return within(name, None, target, tolerance, f"{metric} of {', '.join(absent)}")
        farthest = max((x for x in found.values() if x is not None), key=lambda exponent: abs(exponent - target))
        return within(name, exact(farthest), target, tolerance)

    def _beside(self, table: pd.DataFrame) -> list[Line]:
        """The exponents of every other mechanism."""
        powers = {"prefill": ("prefill_flops", "length"), "decode step": ("decode_flops", "length"),
                  "decode step in d": ("decode_flops", "d_key")}  # fmt: skip
        lines = []
        counted = set(table.loc[table["metric"].isin(["prefill_flops", "decode_flops"]), "mixer"])
        for mixer in sorted(counted - {self.softmax, *self.matrix_memories}):
            found = {name: _exponent(table, mixer, metric, over) for name, (metric, over) in powers.items()}
            text = ", ".join(f"{name} {'not measured' if x is None else f'{x:.2f}'}" for name, x in found.items())
            lines.append(reported(f"{mixer}: exponents of FLOPs", None, text))
        return lines

    def _faster(self, table: pd.DataFrame, mixer: str, step: str) -> Line:
        """The measured length from which on the mechanism takes less time than softmax, at the largest d_key."""
        own, other = (_points(table, each, f"{step}_seconds", "length", 0) for each in (mixer, self.softmax))
        name = f"{mixer}: length from which a {step} is faster than softmax's"
        both = pd.DataFrame({"own": own, "other": other}).dropna()
        slower = both.index[both["own"] >= both["other"]]
        faster = both.index[both.index > slower.max()] if len(slower) else both.index
        if not len(faster):
            return reported(name, None, f"none up to {both.index.max():g}" if len(both) else "not timed")
        shortest = "the shortest measured" if faster.min() == both.index.min() else ""
        return reported(name, exact(float(faster.min())), shortest)


def _points(table: pd.DataFrame, mixer: str, metric: str, over: str, least: int = 8) -> pd.Series:
    """Cost by length (at the largest d_key, n ≥ least · d_key) or by d_key (at the largest length), over all layers."""
    rows = table[(table["mixer"] == mixer) & (table["metric"] == metric) & table["length"].notna()]
    rows = rows[rows["length"] >= least * rows["d_key"]]
    fixed = "d_key" if over == "length" else "length"
    rows = rows[rows[fixed] == rows[fixed].max()]
    return rows.groupby(over)["value"].mean()


def _exponent(table: pd.DataFrame, mixer: str, metric: str, over: str) -> float | None:
    """Slope of log cost over log n or log d_key (`over`: length or d_key); None with fewer than two points."""
    points = _points(table, mixer, metric, over)
    return None if len(points) < 2 else fits.exponent(points.index.to_numpy(float), points.to_numpy(float))[0]
