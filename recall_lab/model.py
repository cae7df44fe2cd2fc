"""A small sequence model around any mixer: embed, blocks, read out; and `trace`, what its mixers saw."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from recall_lab.mixer.base import Mixer, Trace
from recall_lab.shapes import Hidden, State


class Block(nn.Module):
    """x + mixer(norm x), and, where it has a width, x + mlp(norm x)."""

    def __init__(self, mixer: Mixer, d_model: int, mlp: float | int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=1e-5)
        self.mixer = mixer
        width = int(mlp * d_model)
        self.mlp = (
            nn.Sequential(
                nn.RMSNorm(d_model, eps=1e-5), nn.Linear(d_model, width), nn.GELU(), nn.Linear(width, d_model)
            )
            if width
            else None
        )

    def add(self, x: Hidden, mixed: Hidden) -> Hidden:
        """The block's output, from its input and what its mixer made of it."""
        x = x + mixed
        return x if self.mlp is None else x + self.mlp(x)


class Model(nn.Module):
    """Tokens → logits. Positions are told by the mixers alone: there is no positional embedding.

    vocab    ids of tokens, and classes of the read-out
    mixer    a function of d_model that makes one layer's mixer; given a list of them, the layers take them in turn
    d_model  width between the blocks
    layers   number of blocks
    mlp      width of each block's MLP in units of d_model; 0: none, as recall models learn faster without
    width    numbers of a token that is a vector (answers are then vectors of `vocab` numbers); 0: tokens are ids

    Raises ValueError on impossible sizes.
    """

    def __init__(
        self,
        vocab: int,
        mixer: Callable[..., Mixer] | list[Callable[..., Mixer]],
        d_model: int = 64,
        layers: int = 2,
        mlp: float | int = 0,
        width: int = 0,
    ) -> None:
        super().__init__()
        for name, value, kind in (("d_model", d_model, int), ("layers", layers, int), ("mlp", mlp, int | float)):
            least = 0 if name == "mlp" else 1
            if not isinstance(value, kind) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"model.{name}={value}: {'a whole' if kind is int else 'a'} number of at least {least}"
                )
        self.embed = nn.Linear(width, d_model, bias=False) if width else nn.Embedding(vocab, d_model)
        makers = mixer if isinstance(mixer, list) else [mixer]
        if len(makers) > layers:
            raise ValueError(f"model.layers={layers}: at least one layer for each of the {len(makers)} mixers in turn")
        self.blocks = nn.ModuleList(
            Block(makers[layer % len(makers)](d_model=d_model), d_model, mlp) for layer in range(layers)
        )
        self.norm = nn.RMSNorm(d_model, eps=1e-5)
        self.read_out = nn.Linear(d_model, vocab)

    def enter(self, tokens: Shaped[Tensor, "b t *c"]) -> Hidden:
        """Embeddings; the channels of a place, where tokens have several, are added."""
        x = self.embed(tokens)
        return x.sum(dim=2) if x.dim() == 4 else x

    def forward(
        self, tokens: Shaped[Tensor, "b t *c"], scored: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "... classes"]:
        """Logits b t classes, or, given `scored`, those of the marked places alone (places × classes)."""
        x = self.enter(tokens)
        for block in self.blocks:
            x = block.add(x, block.mixer(block.norm(x))[0])
        return self.read_out(self.norm(x if scored is None else x[scored]))

    def initial_state(self, batch: int = 1) -> list[State]:
        """The state before the first token: one a layer."""
        return [block.mixer.initial_state(batch) for block in self.blocks]

    def prefill(
        self, tokens: Shaped[Tensor, "b t *c"], states: list[State]
    ) -> tuple[Float[Tensor, "b t classes"], list[State]]:
        """A whole segment from the states before it: its logits, and the states behind it."""
        return self._advance(tokens, states, "forward")

    def step(
        self, tokens: Shaped[Tensor, "b 1 *c"], states: list[State]
    ) -> tuple[Float[Tensor, "b 1 classes"], list[State]]:
        """One token from the states before it, by each mixer's recurrence: what decoding runs."""
        return self._advance(tokens, states, "step")

    def _advance(self, tokens: Tensor, states: list[State], how: str) -> tuple[Tensor, list[State]]:
        x, after = self.enter(tokens), []
        for block, state in zip(self.blocks, states, strict=True):
            mixed, state = getattr(block.mixer, how)(block.norm(x), state)
            x = block.add(x, mixed)
            after.append(state)
        return self.read_out(self.norm(x)), after

    def trace(self, tokens: Shaped[Tensor, "b t *c"], source: Int[Tensor, "b t"]) -> list[Trace]:
        """What each layer's mixer saw and gave, in one forward pass; `source` as in a Batch's factors."""
        x, traces = self.enter(tokens), []
        for layer, block in enumerate(self.blocks):
            z = block.norm(x)
            q, k, v, gates, _ = block.mixer.project(z)
            o, _ = block.mixer.parallel(q, k, v, gates)
            traces.append(Trace(block.mixer, q, k, v, gates, o, source, layer))
            x = block.add(x, block.mixer.read_out(o, z))
        return traces

    @torch.no_grad()
    def state_size(self, length: int) -> tuple[int, int]:
        """(elements, bytes) carried from place `length` to the next, all layers together."""
        sizes = [block.mixer.state_size(length) for block in self.blocks]
        return sum(elements for elements, _ in sizes), sum(size for _, size in sizes)


def loss(logits: Float[Tensor, "p classes"], targets: Shaped[Tensor, "p *c"]) -> Float[Tensor, ""]:
    """Cross entropy in nats over the scored places; mean squared error where the answers are vectors."""
    if targets.is_floating_point():
        return F.mse_loss(logits, targets)
    return F.cross_entropy(logits, targets)
