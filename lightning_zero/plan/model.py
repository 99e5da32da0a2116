"""A transformer for plans of models that are known by their size only."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HEAD = 128
"""Elements of one attention head."""


class Block(nn.Module):
    """Pre-norm causal attention and a feed-forward network of ``inner`` elements: 4 dim^2 + 2 dim * inner parameters,
    and what norms have.
    """

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.heads = max(1, dim // HEAD)
        self.norm1, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim, False), nn.Linear(dim, dim, False)
        self.norm2, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, inner, False), nn.Linear(inner, dim, False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """A decoder: embedding, ``layers`` blocks, and an output layer of its own.

    Args:
        dim: elements of the residual stream.
        inner: of the feed-forward networks.
        vocabulary: tokens; 0: neither an embedding nor an output layer.
        checkpointed: keep a block's input only, and compute the block again in the backward.
    """

    def __init__(self, layers: int, dim: int, inner: int, vocabulary: int, checkpointed: bool) -> None:
        super().__init__()
        self.dim, self.vocabulary, self.checkpointed = dim, vocabulary, checkpointed
        self.embedding = nn.Embedding(vocabulary, dim) if vocabulary else None
        self.blocks = nn.ModuleList(Block(dim, inner) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False) if vocabulary else None

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss, 0-dim fp32, of predicting ``tokens`` (batch, seq; int64) from themselves."""
        x: Tensor
        x = self.embedding(tokens) if self.embedding else self.norm.weight.new_zeros(*tokens.shape, self.dim)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if self.checkpointed else block(x)
        x = self.norm(x)
        if self.head is None:
            return x.float().mean()
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def inner_size(parameters: float, layers: int, dim: int, vocabulary: int) -> int:
    """The feed-forward networks' size for which a :class:`Transformer` has about so many parameters.

    Raises:
        ValueError: embedding and attention alone have more.
    """
    rest = parameters - 2 * vocabulary * dim - layers * (4 * dim * dim + 4 * dim) - 2 * dim
    inner = round(rest / (2 * layers * dim))
    if inner < 1:
        least = parameters - rest
        raise ValueError(
            f"{parameters:,.0f} parameters are too few for {layers} layers of {dim} with a vocabulary of {vocabulary}:"
            f" embeddings and attention alone have {least:,.0f}. Give other numbers, or vocabulary 0."
        )
    return inner
