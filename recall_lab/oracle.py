"""Random keys and values straight into a mechanism: what its memory can do when nothing has to be learned.

The oracle makes the same Trace as a trained model, so that every probe of a trace works on both. A mechanism gets unit
keys and values, gates given by number, and queries that are multiples of keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recall_lab.mixer.base import Mixer, Trace
from recall_lab.task.base import require

KEYS = ("random", "orthogonal", "correlated", "relu", "elu+1", "softplus")
MAPS = {"relu": F.relu, "elu+1": lambda x: F.elu(x) + 1, "softplus": F.softplus}


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """n pairs of a key and a value, written once or several times; every place asks for one written so far.

    Raises ValueError, naming numbers and limit, where the sizes are impossible.
    """

    pairs: int = 64
    """n: pairs of different keys."""
    d_key: int = 64
    d_value: int | None = None
    """As wide as a key where none is given."""
    candidates: int = 1024
    """V: unit vectors of which the values are some and an answer is one."""
    keys: str = "random"
    """random: uniform unit vectors; orthogonal; correlated: of mean cosine `cosine`; relu, elu+1, softplus: that map
    of Gaussian vectors, to unit length."""
    cosine: float = 0.0
    """Mean cosine between two keys, for keys=correlated."""
    centered: bool = False
    """The mean of a sequence's keys taken off, and their length made one again."""
    shared_keys: bool = False
    """The same keys in every sequence (what an agnostic decoder needs), not keys of its own for each."""
    passes: int = 1
    """How often all pairs are written, in the same order."""
    overwrites: int = 0
    """Keys, drawn at random, that are then bound once more, to another value."""
    query_scale: float | None = None
    """What a key is multiplied by to ask for it; √d_key where none is given, which undoes the 1/√d_key of most
    mechanisms, so that a matrix memory answers Sᵀk. β √d_key gives softmax the logits β k·q."""
    gates: dict[str, float] = field(default_factory=dict)
    """Gates by number, the same at every place; those left out are what the mechanism draws from a Gaussian input."""
    reads: int = 4096
    """Pairs read, at least, over all sequences."""

    def __post_init__(self) -> None:
        for name in ("pairs", "d_key", "candidates", "passes", "reads"):
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
        return make(d_model=self.d_key, d_key=self.d_key, d_value=self.d_value or self.d_key, heads=1, short_conv=0)

    @torch.no_grad()
    def trace(self, mixer: Mixer, rng: np.random.Generator) -> Trace:
        """Draws sequences and runs the mechanism over them, on its device and in its type.

        Raises ValueError for a gate that the mechanism does not have.
        """
        sequences = -(-self.reads // self.pairs)
        key, pair, value = self._writes(sequences, rng)
        candidates = unit(rng.standard_normal((self.candidates, self.d_value or self.d_key)))
        source = self._ask(pair, rng)
        k = np.take_along_axis(key, pair[..., None], axis=1)
        scale = self.d_key**0.5 if self.query_scale is None else self.query_scale
        q = scale * np.take_along_axis(k, source[..., None], axis=1)
        weight = mixer.q_proj.weight

        def tensor(x: np.ndarray) -> Tensor:
            return torch.from_numpy(x).to(weight)

        q, k, v = (tensor(x)[:, None] for x in (q, k, candidates[value]))
        hidden = tensor(rng.standard_normal((sequences, self.length, mixer.d_model)))
        gates = mixer.gates(hidden)
        for name, number in self.gates.items():
            if name not in gates:
                known = ", ".join(gates) or "none"
                raise ValueError(f"{type(mixer).__name__} has no gate {name!r}; its gates: {known}")
            gates[name] = torch.full_like(gates[name], number)
        o, _ = mixer.parallel(q, k, v, gates)
        there = torch.from_numpy(source).to(weight.device)
        return Trace(mixer, q, k, v, gates, o, there, candidates=tensor(candidates))

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

    def at(self, **fields: object) -> "Oracle":
        """The same oracle with other sizes."""
        return replace(self, **fields)


def unit(x: np.ndarray) -> np.ndarray:
    """x at unit length along its last axis."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
