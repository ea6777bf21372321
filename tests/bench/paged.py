"""A model whose KV is in pages: the least that computes a prompt with torch as engines do.

As in a 7B model: layers, key and query heads and their size, two bytes a number, so attention and
the bytes of a token; chunks that attend to all before them; pages found by a block table, K and V
of new tokens written by a slot mapping. Not as in one: a small hidden size and vocabulary, no
feed-forward part, no positions, random weights, and pages gathered before attention reads them,
which a kernel for paged attention does not. So a prompt is computed in less time than a 7B model
takes, which makes what a hit saves smaller than it is there, and the last token in more.

Nothing here waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

DTYPE = torch.bfloat16
POISON = -0x1111111111111112  # 0xEE in each byte
_SEED = 7


class Shape(msgspec.Struct, frozen=True):
    """Sizes of the model, and of the prompts: 32k tokens, 64 KiB for a layer's page, 4 GiB.

    A prompt has one token more than its blocks, since an engine computes the last one again.
    step_tokens: of a prompt that are computed in one step, a whole number of blocks.
    """

    layers: int = 32
    kv_heads: int = 8
    query_heads: int = 32
    head: int = 128
    hidden: int = 1024
    vocabulary: int = 4096
    block_tokens: int = 16
    prompt_blocks: int = 2048
    step_tokens: int = 8192

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer, K and V."""
        return 2 * self.block_tokens * self.kv_heads * self.head * DTYPE.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.layers * self.page_bytes

    @property
    def whole_tokens(self) -> int:
        """Tokens of a prompt that fill blocks."""
        return self.prompt_blocks * self.block_tokens

    @property
    def prompt_bytes(self) -> int:
        """KV of these tokens."""
        return self.prompt_blocks * self.block_bytes


class _Places(NamedTuple):
    """Where a step's tokens are written (blocks, and places in them), and where all are read."""

    slots: tuple[Tensor, Tensor]
    blocks: Tensor
    end: int


class PagedModel:
    """Weights that follow from a seed, and one tensor of pages for each layer."""

    def __init__(self, shape: Shape, blocks: int, device: torch.device) -> None:
        """blocks: pages of each layer."""
        self.shape = shape
        self.device = device
        made = torch.Generator(device).manual_seed(_SEED)
        queries, keys = shape.query_heads * shape.head, shape.kv_heads * shape.head

        def weight(size: int, to: int) -> Tensor:
            drawn = torch.randn(size, to, generator=made, device=device)
            return drawn.mul_(size**-0.5).to(DTYPE)

        self._embedding = weight(shape.vocabulary, shape.hidden) * shape.vocabulary**0.5
        self._into = [weight(shape.hidden, queries + 2 * keys) for _ in range(shape.layers)]
        self._out = [weight(queries, shape.hidden) for _ in range(shape.layers)]
        self._tokens = weight(shape.hidden, shape.vocabulary)
        size = blocks, 2, shape.block_tokens, shape.kv_heads, shape.head
        self.pages = [torch.zeros(size, dtype=DTYPE, device=device) for _ in range(shape.layers)]
        # Bytes are gathered eight at a time: as numbers of two it takes four times as many loads.
        self._words = [pages.view(blocks, 2, -1).view(torch.int64) for pages in self.pages]
        words = self._words[0].shape[1:]
        odd = torch.randint(-(2**62), 2**62, words, generator=made, device=device)
        self._odd = odd * 2 + 1

    def upload(self, values: list[int]) -> Tensor:
        """Give the device numbers; from pinned memory, as any other copy would wait for it."""
        pinned = self.device.type == "cuda"
        host = torch.tensor(values, dtype=torch.int64, pin_memory=pinned)
        return host.to(self.device, non_blocking=True)

    @torch.no_grad()
    def forward(self, tokens: Tensor, first: int, table: Tensor) -> Tensor:
        """Compute tokens from position `first` on; return how likely each next token is.

        table: the request's blocks, all that the tokens need. KV of those before is in them.
        """
        size, end = self.shape.block_tokens, first + len(tokens)
        at = torch.arange(first, end, device=self.device)
        places = _Places((table[at // size], at % size), table[: -(-end // size)], end)
        hidden = self._embedding[tokens]
        for layer in range(self.shape.layers):
            hidden = hidden + self._attention(layer, hidden, places)
        return _normal(hidden[-1]) @ self._tokens

    def _attention(self, layer: int, hidden: Tensor, places: _Places) -> Tensor:
        shape, count = self.shape, len(hidden)
        mixed = (_normal(hidden) @ self._into[layer]).view(count, -1, shape.head)
        heads = [shape.query_heads, shape.kv_heads, shape.kv_heads]
        query, key, value = torch.split(mixed, heads, dim=1)
        self.pages[layer].select(1, 0)[places.slots] = key
        self.pages[layer].select(1, 1)[places.slots] = value
        seen = self._read(layer, 0, places), self._read(layer, 1, places)
        return _attend(query, *seen).reshape(count, -1) @ self._out[layer]

    def _read(self, layer: int, which: int, places: _Places) -> Tensor:
        """Gather the K or V of all tokens so far: [1, heads, tokens, head]."""
        found = self._words[layer].select(1, which).index_select(0, places.blocks).view(DTYPE)
        tokens = found.view(1, -1, self.shape.kv_heads, self.shape.head)[:, : places.end]
        return tokens.transpose(1, 2)

    @torch.no_grad()
    def fingerprint(self, table: Tensor) -> Tensor:
        """Return a number for each block, which follows from all of its bytes."""
        found = torch.zeros(len(table), dtype=torch.int64, device=self.device)
        for words in self._words:
            found = found * 31 + (words.index_select(0, table) * self._odd).sum((1, 2))
        return found

    @torch.no_grad()
    def poison(self) -> None:
        """Overwrite all pages, so that what is not loaded cannot be right by chance."""
        for words in self._words:
            words.fill_(POISON)


def _normal(hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:])


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Let the last tokens attend to all up to themselves; query: [tokens, heads, head]."""
    count, heads, head = query.shape
    if count == 1:
        # Nothing is hidden from it, so heads that share keys are rows of one query.
        rows = query.view(1, keys.shape[1], -1, head)
        return F.scaled_dot_product_attention(rows, keys, values).view(1, heads, head)
    found = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=causal_lower_right(count, keys.shape[2]),
        enable_gqa=True,
    )
    return found.squeeze(0).transpose(0, 1)
