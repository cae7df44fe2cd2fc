"""Random keys and values given directly to a mechanism: what its state can hold when nothing has to be learned.

The oracle makes the same Trace as a trained model, so every probe of a trace works on both. Keys and values are unit
vectors, gates are constants, and queries are multiples of keys. For a mechanism that is linear in its query, this
multiple makes a single pair in the state be answered with its own value, whatever scale (such as 1/√d_key) the
mechanism itself applies; a matrix state S then answers a key k with Sᵀk. For others it makes softmax logits β k·q.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from recall_lab.checks import choice, flag, number, require, whole_number
from recall_lab.mixer.base import Mixer, Trace
from recall_lab.mixer.feature_map import FIXED
from recall_lab.mixer.neutral import neutral_fault, number_gates
from recall_lab.shapes import Gates

MAPPED = ("relu", "elu+1", "softplus")
"""Feature maps that can be applied to the keys."""

Keys = Float[np.ndarray, "b n k"]


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """Sequences of n pairs of a key and a value, written once or several times; each position also queries a key.

    The key is drawn uniformly from those written up to that position. Raises ValueError for a setting outside its
    range; the message names the setting, its value and the limit.
    """

    pairs: int | None = None
    """n: number of pairs; their keys differ. null: 8 d_key."""
    d_key: int = 64
    d_value: int | None = None
    """null: d_key."""
    candidates: int = 1024
    """V: number of unit vectors from which the values are drawn and among which an answer is identified."""
    keys: str = "random"
    """Distribution of keys. random: uniform unit vectors; orthogonal: orthonormal ones; correlated: unit vectors with
    mean cosine `cosine`; relu, elu+1, softplus: this map applied to Gaussian vectors, scaled to unit length."""
    cosine: float | int = 0
    """Mean cosine of two keys, for keys=correlated."""
    centered: bool = False
    """Whether the mean key of each sequence is subtracted; keys are then scaled to unit length again."""
    shared_keys: bool = False
    """Whether all sequences have the same keys, which the linear decoder of state_retention needs: it gets no keys."""
    passes: int = 1
    """How many times all pairs are written, always in the same order."""
    overwrites: int = 0
    """Number of randomly chosen keys that are written again after all passes, with another value."""
    sharpness: float | int | None = None
    """β of the softmax logits β k·q of unit keys, for mechanisms that are not linear in the query; null: √d_key."""
    gates: dict[str, float | int] = field(default_factory=dict)
    """Gate name → its value at all positions. Other gates keep the value that the mixer's options fix, or else get
    their neutral value, which writes every pair completely and forgets nothing."""
    reads: int = 4096
    """Least number of pairs in all sequences together: the number of sequences is reads / pairs, rounded up."""

    def __post_init__(self) -> None:
        whole_number("oracle.d_key", self.d_key)
        if self.pairs is None:
            object.__setattr__(self, "pairs", 8 * self.d_key)
        if self.d_value is None:
            object.__setattr__(self, "d_value", self.d_key)
        for name in ("pairs", "d_value", "candidates", "passes", "reads"):
            whole_number(f"oracle.{name}", getattr(self, name))
        whole_number("oracle.overwrites", self.overwrites, 0)
        flag("oracle.centered", self.centered)
        flag("oracle.shared_keys", self.shared_keys)
        choice("oracle.keys", self.keys, ("random", "orthogonal", "correlated", *MAPPED))
        number("oracle.cosine", self.cosine, 0)
        require(self.cosine < 1, f"oracle.cosine={self.cosine}: must be below 1")
        require(
            self.cosine == 0 or self.keys == "correlated",
            f"oracle.cosine={self.cosine} has an effect only with oracle.keys=correlated",
        )
        if self.sharpness is not None:
            number("oracle.sharpness", self.sharpness, above=0)
        for gate, value in self.gates.items():
            fits = isinstance(value, Real) and not isinstance(value, bool) and value == value
            require(fits, f"oracle.gates.{gate}={value!r}: must be a number")
        n = self._pairs
        require(
            self.keys != "orthogonal" or n <= self.d_key,
            f"oracle.pairs={n}: must be at most oracle.d_key={self.d_key} with oracle.keys=orthogonal",
        )
        require(
            self.overwrites <= n, f"oracle.overwrites={self.overwrites}: must be at most oracle.pairs, which is {n}"
        )
        require(
            n + self.overwrites <= self.candidates,
            f"oracle.candidates={self.candidates}: must be at least oracle.pairs={n} plus "
            f"oracle.overwrites={self.overwrites}",
        )

    @property
    def _pairs(self) -> int:
        assert self.pairs is not None  # __post_init__ sets it
        return self.pairs

    @property
    def _d_value(self) -> int:
        assert self.d_value is not None  # __post_init__ sets it
        return self.d_value

    @property
    def length(self) -> int:
        """Number of positions of a sequence: one per write."""
        return self._pairs * self.passes + self.overwrites

    def mixer(self, make: Callable[..., Mixer]) -> Mixer:
        """Makes the mechanism with one head of the oracle's widths; `make` is a mixer class or a partial of one."""
        return make(d_model=self.d_key, d_key=self.d_key, d_value=self._d_value, heads=1, short_conv=0)

    def check(self, mixer: Mixer) -> None:
        """Raises the errors for settings that `trace` names."""
        refuse_ineffective(mixer)
        check_neutral(mixer, self.gates)

    @torch.no_grad()
    def trace(self, mixer: Mixer, rng: np.random.Generator) -> Trace:
        """Draws sequences and runs the mechanism on them, on the device and in the dtype of its weights.

        Raises ValueError for a gate that the mechanism does not have, for an option of the mixer that has no effect
        here, and for a mechanism whose neutral gates are unknown (see `check_neutral`).
        """
        self.check(mixer)
        weight = mixer.q_proj.weight
        sequences = -(-self.reads // self._pairs)
        key, pair, value = self._writes(sequences, rng)
        candidates = _unit(rng.standard_normal((self.candidates, self._d_value)))
        source = self._sources(pair, rng)
        k = np.take_along_axis(key, pair[..., None], axis=1)
        q = self._query_scale(mixer) * np.take_along_axis(k, source[..., None], axis=1)

        def tensor(x: np.ndarray) -> Tensor:
            return torch.from_numpy(x).to(weight)

        hidden = tensor(rng.standard_normal((sequences, self.length, mixer.d_model)))
        gates = number_gates(mixer, hidden, self.gates)
        queries, keys, values = (tensor(x)[:, None] for x in (q, k, candidates[value]))  # b 1 t d each
        o, _ = mixer.parallel(queries, keys, values, gates)
        positions = torch.from_numpy(source).to(weight.device)
        return Trace(mixer, queries, keys, values, gates, o, positions, candidates=tensor(candidates))

    def _query_scale(self, mixer: Mixer) -> float:
        """The factor from a key to its query, measured on one pair at neutral gates (see the top of this file)."""
        key = mixer.q_proj.weight.new_zeros(1, 1, 1, self.d_key)
        key[..., 0] = 1
        hidden = key.new_zeros(1, 1, mixer.d_model)
        gates = number_gates(mixer, hidden, _neutral(mixer, {}))
        once, twice = (_weight(mixer, scale * key, key, gates) for scale in (1, 2))
        if once > 0 and abs(twice - 2 * once) < 1e-4 * once:
            return 1 / once
        sharpness = self.d_key**0.5 if self.sharpness is None else self.sharpness
        return float(sharpness * self.d_key**0.5)

    def _writes(
        self, sequences: int, rng: np.random.Generator
    ) -> tuple[Keys, Int[np.ndarray, "b t"], Int[np.ndarray, "b t"]]:
        """The keys (b n k), and for every position the indices of its key (b t) and of its candidate value (b t)."""
        n = self._pairs
        key = self._keys(1 if self.shared_keys else sequences, rng)
        key = np.broadcast_to(key, (sequences, *key.shape[1:]))
        drawn = rng.random((sequences, self.candidates)).argsort(axis=1)[:, : n + self.overwrites]
        again = rng.random((sequences, n)).argsort(axis=1)[:, : self.overwrites]
        each = np.tile(np.arange(n), (sequences, self.passes))
        value = np.concatenate([np.tile(drawn[:, :n], self.passes), drawn[:, n:]], axis=1)
        return key, np.concatenate([each, again], axis=1), value

    def _keys(self, sequences: int, rng: np.random.Generator) -> Keys:
        x = rng.standard_normal((sequences, self._pairs, self.d_key))
        if self.keys == "orthogonal":
            x = np.linalg.qr(x.swapaxes(1, 2))[0].swapaxes(1, 2)
        elif self.keys == "correlated":
            common = _unit(rng.standard_normal((sequences, 1, self.d_key)))
            x = _unit(x - (x * common).sum(-1, keepdims=True) * common)
            x = self.cosine**0.5 * common + (1 - self.cosine) ** 0.5 * x
        elif self.keys in MAPPED:
            x = FIXED[self.keys](torch.from_numpy(x)).numpy()
        x = _unit(x)
        return _unit(x - x.mean(axis=1, keepdims=True)) if self.centered else x

    def _sources(self, pair: Int[np.ndarray, "b t"], rng: np.random.Generator) -> Int[np.ndarray, "b t"]:
        """For every position t, draws a key among those written up to t: the last position up to t that wrote it."""
        sequences, length = pair.shape
        order = pair.argsort(axis=1, kind="stable")
        ordered = np.take_along_axis(pair, order, axis=1)
        # next_write[s]: the next position that writes the key of position s; `length` where none does.
        next_write = np.full((sequences, length), length)
        later = np.where(ordered[:, 1:] == ordered[:, :-1], order[:, 1:], length)
        np.put_along_axis(next_write, order[:, :-1], later, axis=1)
        position = np.arange(length)
        source = (rng.random((sequences, length)) * np.minimum(position + 1, self._pairs)).astype(np.int64)
        while True:
            after = np.take_along_axis(next_write, source, axis=1)
            if (after > position).all():
                return source
            source = np.where(after <= position, after, source)


def _weight(mixer: Mixer, q: Tensor, k: Tensor, gates: Gates) -> float:
    """The weight of a single pair in the output for a query; q and k are 1 1 1 k."""
    if mixer.linear_in_v:
        return float(mixer.effective_attention(q, k, gates))
    v = k.new_zeros(1, 1, 1, mixer.d_value)
    v[..., 0] = 1
    return float(mixer.parallel(q, k, v, gates)[0][..., 0])


def ineffective_options(mixer_class: type[Mixer]) -> dict[str, str]:
    """Options of the mixer that have no effect with the oracle → the reason, and what to set instead."""
    reason = "the oracle gives queries, keys and values directly to one head of the mechanism"
    found = {f.name: reason for f in fields(Mixer) if f.name != "d_model"}
    found |= {name: f"the oracle sets it; set oracle.{name}" for name in ("d_key", "d_value")}
    gates = " or ".join(f"oracle.gates.{gate}" for gate in mixer_class.neutral_gates) or "oracle.gates"
    found |= dict.fromkeys(mixer_class.position_options, "the oracle measures recall by content, without positions")
    return found | dict.fromkeys(mixer_class.gate_options, f"it only shapes learned gates; set {gates}")


def refuse_ineffective(mixer: Mixer) -> None:
    """Raises ValueError if an option for positions, or one that only shapes learned gates, differs from its default.

    The message names it.
    """
    reasons = ineffective_options(type(mixer))
    default = {option.name: option.default for option in fields(mixer)}
    for name in (*mixer.position_options, *mixer.gate_options):
        if getattr(mixer, name) != default[name]:
            raise ValueError(f"mixer.{name} has no effect with the oracle: {reasons[name]}")


def check_neutral(mixer: Mixer, given: Mapping[str, float | int]) -> None:
    """Raises ValueError for a gate whose neutral value is unknown, unless the gate as computed turns out to be neutral.

    The neutral value is unknown if the gate is neither in `given`, nor fixed by the mixer's options, nor declared in
    the mechanism's neutral_gates. `neutral_fault` then tests it, with all other gates at their neutral values.
    """
    gates = mixer.gates(mixer.q_proj.weight.new_zeros(1, 1, mixer.d_model))
    unknown = [name for name in gates if name not in {*given, *mixer.fixed_gates, *mixer.neutral_gates}]
    if not unknown:
        return
    fault = neutral_fault(mixer, _neutral(mixer, given))
    if not fault:
        return
    name, gate = type(mixer).__name__, unknown[0]
    raise ValueError(
        f"{name} does not declare at which value of {', '.join(unknown)} it writes every pair and forgets nothing, and "
        f"the values that it computes are not such: {fault}. Declare {name}.neutral_gates = {{{gate!r}: …}}, with the "
        f"value nearest to that, or set oracle.gates.{gate}"
    )


def _neutral(mixer: Mixer, given: Mapping[str, float | int]) -> dict[str, float]:
    """Neutral values of all gates of this mixer, also of those that its options fix; else the values in `given`."""
    gates = mixer.gates(mixer.q_proj.weight.new_zeros(1, 1, mixer.d_model))
    return {name: float(x) for name, x in {**given, **mixer.neutral_gates}.items() if name in gates}


def _unit(x: np.ndarray) -> np.ndarray:
    """x scaled to unit length along its last axis."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
