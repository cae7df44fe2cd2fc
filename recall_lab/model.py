"""A small sequence model around any mixer: embedding, blocks, read-out; and `trace`, what its mixers computed."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from recall_lab.checks import number, require, whole_number
from recall_lab.mixer.layer import AnyTrace, Layer
from recall_lab.shapes import Hidden, State


class Block(nn.Module):
    """x ← x + mixer(norm(x)), then, if there is an MLP, x ← x + mlp(norm(x))."""

    mlp: nn.Sequential | None

    def __init__(self, mixer: Layer, d_model: int, mlp: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=1e-5)
        self.mixer = mixer
        self.mlp = None
        if width := int(mlp * d_model):
            norm = nn.RMSNorm(d_model, eps=1e-5)
            self.mlp = nn.Sequential(norm, nn.Linear(d_model, width), nn.GELU(), nn.Linear(width, d_model))

    def output(self, x: Hidden, mixed: Hidden) -> Hidden:
        """The block's output, from its input x and the output of its mixer."""
        x = x + mixed  # b t m
        return x if self.mlp is None else x + self.mlp(x)


class Model(nn.Module):
    """Tokens → logits. Positions are left to the mixers: there is no positional embedding.

    vocab    number of token ids, and of the classes that are predicted
    mixer    a function that makes one layer's mixer from d_model, or a list of them, which the layers use in turn
    d_model  width of the residual stream
    layers   number of blocks
    mlp      width of each block's MLP, in units of d_model; 0: no MLP, with which recall is learned in fewer steps
    embedding_std  standard deviation of the embedding's initial weights, which are normal with mean 0; None:
             d_model^−½, with which an embedding vector has length 1. The experiment initial_scale compares values
    width    channels of a token in a continuous task, whose output is a vector of `vocab` channels; 0: tokens are ids

    Raises ValueError where a size is impossible.
    """

    def __init__(
        self,
        vocab: int,
        mixer: Callable[..., Layer] | list[Callable[..., Layer]],
        d_model: int = 64,
        layers: int = 2,
        mlp: float = 0,
        embedding_std: float | None = None,
        width: int = 0,
    ) -> None:
        super().__init__()
        whole_number("model.d_model", d_model)
        whole_number("model.layers", layers)
        number("model.mlp", mlp, least=0)
        if embedding_std is not None:
            number("model.embedding_std", embedding_std, above=0)
        makers = mixer if isinstance(mixer, list) else [mixer]
        require(len(makers) <= layers, f"model.layers={layers}: must be at least the number of mixers, {len(makers)}")
        self.embed = nn.Linear(width, d_model, bias=False) if width else nn.Embedding(vocab, d_model)
        nn.init.normal_(self.embed.weight, std=embedding_std or d_model**-0.5)
        blocks = [Block(makers[i % len(makers)](d_model=d_model), d_model, mlp) for i in range(layers)]
        # A ModuleList does not declare the type of its items.
        self.blocks = cast("Sequence[Block]", nn.ModuleList(blocks))
        self.norm = nn.RMSNorm(d_model, eps=1e-5)
        self.read_out = nn.Linear(d_model, vocab)

    def embed_tokens(self, tokens: Shaped[Tensor, "b t *c"]) -> Hidden:
        """The embedding of each position; where a position holds several tokens, the sum of their embeddings."""
        x = self.embed(tokens)
        return x.sum(dim=2) if x.dim() == 4 else x

    def forward(
        self, tokens: Shaped[Tensor, "b t *c"], scored: Int[Tensor, "p"] | None = None
    ) -> Float[Tensor, "... classes"]:
        """Logits (b t classes); given `scored`, indices into the b·t positions, those of these only (p classes)."""
        x = self.embed_tokens(tokens)  # b t m
        for block in self.blocks:
            x = block.output(x, block.mixer(block.norm(x))[0])
        return self.read_out(self.norm(x if scored is None else x.flatten(0, 1)[scored]))

    def initial_state(self, batch: int = 1) -> list[State]:
        """The states before the first token, one per layer."""
        return [block.mixer.initial_state(batch) for block in self.blocks]

    def prefill(
        self, tokens: Shaped[Tensor, "b t *c"], states: list[State]
    ) -> tuple[Float[Tensor, "b t classes"], list[State]]:
        """Logits of a segment that continues from `states`, computed in parallel, and the states after it."""
        return self._advance(tokens, states, lambda mixer, x, state: mixer(x, state))

    def step(
        self, tokens: Shaped[Tensor, "b 1 *c"], states: list[State]
    ) -> tuple[Float[Tensor, "b 1 classes"], list[State]]:
        """Logits of one token that continues from `states`, by each mixer's recurrence; and the states after it."""
        return self._advance(tokens, states, lambda mixer, x, state: mixer.step(x, state))

    def _advance(
        self,
        tokens: Tensor,
        states: list[State],
        mix: Callable[[Layer, Hidden, State], tuple[Hidden, State]],
    ) -> tuple[Tensor, list[State]]:
        x, after = self.embed_tokens(tokens), []  # b t m
        for block, state in zip(self.blocks, states, strict=True):
            mixed, state = mix(block.mixer, block.norm(x), state)
            x = block.output(x, mixed)
            after.append(state)
        return self.read_out(self.norm(x)), after

    def trace(self, tokens: Shaped[Tensor, "b t *c"], source: Int[Tensor, "b t"]) -> list[AnyTrace]:
        """The inputs and outputs of every layer's mechanism in one forward pass.

        source  position of the answer to each query, as in a Batch's factors
        """
        x, traces = self.embed_tokens(tokens), []  # b t m
        for layer, block in enumerate(self.blocks):
            trace, mixed = block.mixer.trace(block.norm(x), source, layer)
            traces.append(trace)
            x = block.output(x, mixed)
        return traces

    @torch.no_grad()
    def state_size(self, length: int) -> tuple[int, int] | None:
        """Elements and bytes of the state after `length` tokens of one sequence, summed over layers; None if that of a
        layer is not known."""
        sizes = [size for block in self.blocks if (size := block.mixer.state_size(length))]
        if len(sizes) < len(self.blocks):
            return None
        return sum(elements for elements, _ in sizes), sum(size for _, size in sizes)
