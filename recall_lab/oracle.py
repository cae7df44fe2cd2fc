"""Random keys and values straight into a mechanism: what its memory can do when nothing has to be learned.

The oracle makes the same Trace as a trained model, so that every probe of a trace works on both. A mechanism gets unit
keys and values, gates by number, and queries that are multiples of keys. These undo whatever scale a mechanism that is
linear in its query puts on it (1/√d_key, mostly): a pair alone in the memory is answered with its own value, so that
a matrix memory answers Sᵀk. Elsewhere keys are asked for with softmax logits β k·q.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recall_lab.checks import require
from recall_lab.mixer.base import Mixer, Trace
from recall_lab.shapes import Gates

NEUTRAL = {
    "log_decay": 0.0,
    "log_forget": 0.0,
    "write": 1.0,
    "beta": 1.0,
    "a": 1.0,
    "level": 1.0,
    "skip": 0.0,
    "ridge": 1e-4,
}
"""The gates at which a mechanism writes every pair whole and forgets none, by the names that mechanisms use."""

KEYS = ("random", "orthogonal", "correlated", "relu", "elu+1", "softplus")
MAPS = {"relu": F.relu, "elu+1": lambda x: F.elu(x) + 1, "softplus": F.softplus}


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """n pairs of a key and a value, written once or several times; every place asks for one written so far.

    Raises ValueError, naming numbers and limit, where the sizes are impossible.
    """

    pairs: int | None = None
    """n: pairs of different keys; 8 d_key where none is given."""
    d_key: int = 64
    d_value: int | None = None
    """As wide as a key where none is given."""
    candidates: int = 1024
    """V: unit vectors of which the values are some and an answer is one."""
    keys: str = "random"
    """random: uniform unit vectors; orthogonal; correlated: of mean cosine `cosine`; relu, elu+1, softplus: that map
    of Gaussian vectors, to unit length."""
    cosine: float | int = 0
    """Mean cosine between two keys, for keys=correlated."""
    centered: bool = False
    """The mean of a sequence's keys taken off, and their length made one again."""
    shared_keys: bool = False
    """The same keys in every sequence (what an agnostic decoder needs), not keys of its own for each."""
    passes: int = 1
    """How often all pairs are written, in the same order."""
    overwrites: int = 0
    """Keys, drawn at random, that are then bound once more, to another value."""
    sharpness: float | int | None = None
    """β of the logits β k·q, for mechanisms that aren't linear in the query; √d_key where none is given."""
    gates: dict[str, float | int] = field(default_factory=dict)
    """Gates by number, the same at every place; those left out write all and forget nothing (NEUTRAL), or, where
    nothing is known of them, are what the mechanism makes of a Gaussian input."""
    reads: int = 4096
    """Pairs read, at least, over all sequences."""

    def __post_init__(self) -> None:
        if self.pairs is None:
            object.__setattr__(self, "pairs", 8 * self.d_key)
        if self.d_value is None:
            object.__setattr__(self, "d_value", self.d_key)
        for name in ("pairs", "d_key", "d_value", "candidates", "passes", "reads"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)}: at least 1")
        require(self.keys in KEYS, f"keys={self.keys!r}: one of {', '.join(KEYS)}")
        require(0 <= self.cosine < 1, f"cosine={self.cosine}: in [0, 1)")
        require(self.cosine == 0 or self.keys == "correlated", f"cosine={self.cosine} is for keys=correlated only")
        require(
            self.keys != "orthogonal" or self.pairs <= self.d_key,
            f"pairs={self.pairs} orthogonal keys do not fit d_key={self.d_key}",
        )
        require(
            0 <= self.overwrites <= self.pairs, f"overwrites={self.overwrites}: between 0 and the pairs={self.pairs}"
        )
        require(
            self.pairs + self.overwrites <= self.candidates,
            f"pairs={self.pairs} and overwrites={self.overwrites} need as many candidates, not {self.candidates}",
        )

    @property
    def length(self) -> int:
        """Places of a sequence: one a write."""
        return self.pairs * self.passes + self.overwrites

    def mixer(self, make: Callable[..., Mixer]) -> Mixer:
        """The mechanism at the oracle's widths, one head; `make` is a config's partial."""
        return make(d_model=self.d_key, d_key=self.d_key, d_value=self.d_value, heads=1, short_conv=0)

    @torch.no_grad()
    def trace(self, mixer: Mixer, rng: np.random.Generator) -> Trace:
        """Draws sequences and runs the mechanism over them, on its device and in its type.

        Raises ValueError for a gate that the mechanism does not have.
        """
        sequences = -(-self.reads // self.pairs)
        key, pair, value = self._writes(sequences, rng)
        candidates = unit(rng.standard_normal((self.candidates, self.d_value)))
        source = self._ask(pair, rng)
        k = np.take_along_axis(key, pair[..., None], axis=1)
        q = self._query_scale(mixer) * np.take_along_axis(k, source[..., None], axis=1)
        weight = mixer.q_proj.weight

        def tensor(x: np.ndarray) -> Tensor:
            return torch.from_numpy(x).to(weight)

        q, k, v = (tensor(x)[:, None] for x in (q, k, candidates[value]))
        gates = self._gates(mixer, tensor(rng.standard_normal((sequences, self.length, mixer.d_model))), self.gates)
        o, _ = mixer.parallel(q, k, v, gates)
        there = torch.from_numpy(source).to(weight.device)
        return Trace(mixer, q, k, v, gates, o, there, candidates=tensor(candidates))

    def _gates(self, mixer: Mixer, hidden: Tensor, given: dict[str, float | int]) -> Gates:
        """The mechanism's gates for hidden, each set to what is given, or else to its neutral number."""
        gates = mixer.gates(hidden)
        for name in given:
            if name not in gates:
                raise ValueError(
                    f"{type(mixer).__name__} has no gate {name!r}; its gates: {', '.join(gates) or 'none'}"
                )
        numbers = NEUTRAL | given
        return {name: torch.full_like(x, numbers[name]) if name in numbers else x for name, x in gates.items()}

    def _query_scale(self, mixer: Mixer) -> float:
        """What a key is multiplied by to ask for it (see the module): measured on one pair, with neutral gates."""
        key = mixer.q_proj.weight.new_zeros(1, 1, 1, self.d_key)
        key[..., 0] = 1
        gates = self._gates(mixer, mixer.q_proj.weight.new_zeros(1, 1, mixer.d_model), {})
        if mixer.linear_in_v:
            once, twice = (float(mixer.effective_attention(scale * key, key, gates)) for scale in (1, 2))
            if once > 0 and abs(twice - 2 * once) < 1e-4 * once:
                return 1 / once
        sharpness = self.d_key**0.5 if self.sharpness is None else self.sharpness
        return sharpness * self.d_key**0.5

    def _writes(self, sequences: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys (b n k), and at every place which of them is written and with which candidate (b t each)."""
        key = self._keys(1 if self.shared_keys else sequences, rng)
        key = np.broadcast_to(key, (sequences, *key.shape[1:]))
        drawn = rng.random((sequences, self.candidates)).argsort(axis=1)[:, : self.pairs + self.overwrites]
        again = rng.random((sequences, self.pairs)).argsort(axis=1)[:, : self.overwrites]
        every = np.tile(np.arange(self.pairs), (sequences, self.passes))
        value = np.concatenate([np.tile(drawn[:, : self.pairs], self.passes), drawn[:, self.pairs :]], axis=1)
        return key, np.concatenate([every, again], axis=1), value

    def _keys(self, sequences: int, rng: np.random.Generator) -> np.ndarray:
        x = rng.standard_normal((sequences, self.pairs, self.d_key))
        if self.keys == "orthogonal":
            x = np.linalg.qr(x.swapaxes(1, 2))[0].swapaxes(1, 2)
        elif self.keys == "correlated":
            common = unit(rng.standard_normal((sequences, 1, self.d_key)))
            x = unit(x - (x * common).sum(-1, keepdims=True) * common)
            x = self.cosine**0.5 * common + (1 - self.cosine) ** 0.5 * x
        elif self.keys in MAPS:
            x = MAPS[self.keys](torch.from_numpy(x)).numpy()
        x = unit(x)
        return unit(x - x.mean(axis=1, keepdims=True)) if self.centered else x

    def _ask(self, pair: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """For every place the last place, itself at the latest, at which some key drawn at random was written."""
        sequences, length = pair.shape
        order = pair.argsort(axis=1, kind="stable")
        ordered = np.take_along_axis(pair, order, axis=1)
        follows = np.full((sequences, length), length)
        later = np.where(ordered[:, 1:] == ordered[:, :-1], order[:, 1:], length)
        np.put_along_axis(follows, order[:, :-1], later, axis=1)
        here = np.arange(length)
        source = (rng.random((sequences, length)) * np.minimum(here + 1, self.pairs)).astype(np.int64)
        while True:
            after = np.take_along_axis(follows, source, axis=1)
            if (after > here).all():
                return source
            source = np.where(after <= here, after, source)


def unit(x: np.ndarray) -> np.ndarray:
    """x at unit length along its last axis."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
