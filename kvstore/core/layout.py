"""All geometry of a slot, computed once, as data: which bytes of a slot belong to whom.

A slot holds one block of one KV group: `blocks_per_chunk` engine blocks of all layers and heads.
Bytes are ordered

    engine block -> layer -> head -> what the engine keeps per head (tokens, K and V)

which is topology-free: a rank with heads 4..7 of 8 owns the second half of each layer's bytes,
whatever tensor-parallel size wrote them, and a rank's run is one whole engine page. (Run lengths
for five real models: docs/decisions/001-slot-order.md.) Where an engine keeps tokens outside of
heads, a page cannot be cut by head; then the ranks' pages follow one another and the
tensor-parallel size is part of the digest. What lies inside a page is copied as it lies, so its
order is part of the digest at every size (PageForm).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvstore.core import limits
from kvstore.core.errors import ConfigError
from kvstore.core.limits import Heads, Name, Text
from kvstore.core.types import BlockKey, GroupRule

FORMAT = 2
ALIGNMENT = 4096
PIECES_MAX = 1 << 14  # of one rank's part of a block
GPUS_MAX = 1024  # of one machine
METADATA_MAX = 1 << 18  # of one rank's agent
TRAIT_DIGITS = 12  # of a digest that is shown as a trait
FORM_MAX = 512  # characters of what is said of a page's form


class PageForm(msgspec.Struct, frozen=True):
    """How the bytes of a layer's page are to be read. It is compared, never taken apart.

    Equal forms with equal sizes are the same bytes, whatever the tensor parallel size and the
    number of blocks were. order: the page's dimensions with their sizes, outermost first, those of
    one element left out; heads that are outermost are counted over all ranks, others over one.
    kernel_tokens: tokens of what the engine's kernels take for a block. content: what is innermost.
    """

    order: Annotated[str, msgspec.Meta(max_length=FORM_MAX)] = ""
    kernel_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)] = 0
    content: Annotated[str, msgspec.Meta(max_length=FORM_MAX)] = ""


ByGroup = msgspec.Meta(max_length=limits.GROUPS_MAX)
Chunk = Annotated[int, msgspec.Meta(ge=1, le=limits.CHUNK_MAX)]
Place = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]  # numbers of engine blocks have 32 bits
Stride = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
PageRuns = Annotated[tuple["PageRun", ...], msgspec.Meta(max_length=PIECES_MAX)]


class LayerGeometry(msgspec.Struct, frozen=True):
    """One layer's page on one rank. page_bytes: bytes of one engine block of this layer."""

    name: Name
    page_bytes: Annotated[int, msgspec.Meta(ge=1, le=limits.PAGE_BYTES_MAX)]
    heads: Heads = 1
    head_first: Annotated[int, msgspec.Meta(ge=0, lt=limits.HEADS_MAX)] = 0
    heads_total: Heads = 1
    head_major: bool = True  # heads are the page's outermost dimension
    form: PageForm = PageForm()

    def __post_init__(self) -> None:
        sizes = (self.page_bytes, self.heads, self.heads_total)
        if min(sizes) < 1 or self.heads_total % self.heads or self.head_first % self.heads:
            raise ValueError(f"heads of {self} do not divide into pages")
        if not 0 <= self.head_first < self.heads_total:
            raise ValueError(f"first head of {self}, expected below {self.heads_total}")


class GroupGeometry(msgspec.Struct, frozen=True):
    """One KV group on one rank; layers in the engine's order."""

    rule: GroupRule
    layers: Annotated[tuple[LayerGeometry, ...], msgspec.Meta(max_length=limits.LAYERS_MAX)]

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            raise ValueError(f"a layer is there twice among {names}")


class RankGeometry(msgspec.Struct, frozen=True):
    """Everything a worker knows about its part of a block.

    identity: whatever else decides the bytes (model, weights, dtype, hash algorithm ...).
    block_tokens: tokens of one block; blocks_per_chunk: engine blocks in it, per group.
    traits: what identity is made of, by name, for people to read.
    unnamed: why the identity does not say all that decides the bytes; "": it does. Blocks of such
    an engine are for itself only, and for as long as it is attached.
    """

    identity: Text
    block_tokens: Annotated[int, msgspec.Meta(ge=1, lt=limits.TOKENS_MAX)]
    blocks_per_chunk: Annotated[tuple[Chunk, ...], ByGroup]
    groups: Annotated[tuple[GroupGeometry, ...], ByGroup]
    traits: Annotated[dict[Name, Text], msgspec.Meta(max_length=limits.TRAITS_MAX)] = {}
    unnamed: Annotated[str, msgspec.Meta(max_length=FORM_MAX)] = ""

    def __post_init__(self) -> None:
        if not self.groups or len(self.groups) != len(self.blocks_per_chunk):
            raise ValueError(
                f"{len(self.blocks_per_chunk)} values of blocks_per_chunk"
                f" for {len(self.groups)} groups"
            )
        if self.layers > limits.LAYERS_MAX:
            raise ValueError(f"{self.layers} layers, expected up to {limits.LAYERS_MAX}")

    @property
    def layers(self) -> int:
        """Count the layers of all groups."""
        return sum(len(group.layers) for group in self.groups)


class LayerRun(msgspec.Struct, frozen=True):
    """Where one layer's page lies inside an engine block's part of a slot."""

    name: str
    offset: int
    length: int
    writes: bool  # False: another rank holds the same heads and writes them


class GroupLayout(msgspec.Struct, frozen=True):
    """One rank's runs in one group; engine block b of a block starts at b * stride."""

    stride: int
    runs: tuple[LayerRun, ...]


class RankLayout(msgspec.Struct, frozen=True):
    """What one rank copies to and from a slot."""

    slot_bytes: int
    groups: tuple[GroupLayout, ...]


class SlotLayout(msgspec.Struct, frozen=True):
    """A namespace's slots; digest: of all that decides the bytes. traits, unnamed: as a rank's."""

    digest: str
    slot_bytes: int
    rules: tuple[GroupRule, ...]
    ranks: tuple[RankLayout, ...]
    traits: dict[str, str]
    unnamed: str = ""

    def of_session(self, number: int) -> SlotLayout:
        """Return the same under a digest that no other session of any store has."""
        return msgspec.structs.replace(self, digest=_digest((self.digest, number)))

    def is_full(self, key: BlockKey, width: int) -> bool:
        """Tell whether a block, named by a hash so wide, is of a group with the full prefix."""
        group = int.from_bytes(key[width : width + 2], "big")
        return group < len(self.rules) and self.rules[group].trailing is None


class PageRun(msgspec.Struct, frozen=True, array_like=True):
    """Where bytes of an engine block's part of a slot are in an engine's own memory.

    Piece i of engine block b: piece_bytes at base + b * block_stride + i * piece_stride. The first
    one is `offset` bytes into the part, the others follow one another there.
    """

    offset: Place
    piece_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    pieces: Annotated[int, msgspec.Meta(ge=1, le=PIECES_MAX)]
    base: Place
    block_stride: Stride
    piece_stride: Stride


class RankPages(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of an engine's memory, which its agent serves; runs by group.

    gpu: the number of the GPU that it is on, as its process counts them; None: host memory.
    """

    agent: Annotated[str, msgspec.Meta(max_length=256)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=METADATA_MAX)]
    pages: Annotated[tuple[PageRuns, ...], ByGroup]
    gpu: Annotated[int, msgspec.Meta(ge=0, lt=GPUS_MAX)] | None = None

    def __post_init__(self) -> None:
        pieces = sum(run.pieces for runs in self.pages for run in runs)
        if pieces > PIECES_MAX:
            raise ValueError(f"{pieces} pieces of one block, expected up to {PIECES_MAX}")


class Move(msgspec.Struct, frozen=True):
    """Engine block block_id of a group <-> part `part` of a slot."""

    group: int
    block_id: int
    slot: int
    part: int


def slot_layout(ranks: Sequence[RankGeometry]) -> SlotLayout:
    """Compute the layout of the slots that ranks fill. Raises ConfigError if they do not fit."""
    first = ranks[0]
    layers = sum(rank.layers for rank in ranks)
    if layers > limits.ENGINE_LAYERS_MAX:
        raise ConfigError(
            f"{layers} layers on {len(ranks)} ranks, expected up to {limits.ENGINE_LAYERS_MAX}"
        )
    for number, rank in enumerate(ranks):
        for found, expected, what in (
            (rank.identity, first.identity, "identity"),
            (rank.block_tokens, first.block_tokens, "block_tokens"),
            (rank.blocks_per_chunk, first.blocks_per_chunk, "blocks_per_chunk"),
            ([g.rule for g in rank.groups], [g.rule for g in first.groups], "group rules"),
        ):
            if found != expected:
                raise ConfigError(f"rank {number} has {what} {found!r}, rank 0 has {expected!r}")
    groups = [_group_layouts([rank.groups[g] for rank in ranks]) for g in range(len(first.groups))]
    used = max(
        layouts[0].stride * count
        for (layouts, _), count in zip(groups, first.blocks_per_chunk, strict=True)
    )
    slot_bytes = -(-used // ALIGNMENT) * ALIGNMENT
    if slot_bytes > limits.SLOT_BYTES_MAX:
        raise ConfigError(f"blocks of {slot_bytes} bytes, expected up to {limits.SLOT_BYTES_MAX}")
    orders = [
        (group.rule.trailing, order) for group, (_, order) in zip(first.groups, groups, strict=True)
    ]
    facts = (FORMAT, first.identity, first.block_tokens, first.blocks_per_chunk, orders)
    kinds = (
        "all blocks" if g.rule.trailing is None else f"last {g.rule.trailing}" for g in first.groups
    )
    traits = {
        "block tokens": str(first.block_tokens),
        "engine blocks": ", ".join(map(str, first.blocks_per_chunk)),
        "groups": ", ".join(kinds),
        "slot bytes": str(slot_bytes),
        "layout": _digest((FORMAT, orders))[:TRAIT_DIGITS],
        **_forms(first),
    }
    return SlotLayout(
        _digest(facts),
        slot_bytes,
        tuple(group.rule for group in first.groups),
        tuple(
            RankLayout(slot_bytes, tuple(layouts[rank] for layouts, _ in groups))
            for rank in range(len(ranks))
        ),
        first.traits | traits,
        next((rank.unnamed for rank in ranks if rank.unnamed), ""),
    )


def _forms(rank: RankGeometry) -> dict[str, str]:
    """Say how pages are to be read, for people: the different values, cut short."""
    forms = [layer.form for group in rank.groups for layer in group.layers]
    values = {
        "page order": [form.order for form in forms],
        "kernel block": [str(form.kernel_tokens) for form in forms],
        "page content": [form.content for form in forms],
    }
    told = {name: "; ".join(dict.fromkeys(found))[:FORM_MAX] for name, found in values.items()}
    return told if any(form != PageForm() for form in forms) else {}


def _digest(facts: object) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(facts)).hexdigest()


def _group_layouts(
    ranks: Sequence[GroupGeometry],
) -> tuple[list[GroupLayout], list[tuple[str, int, int, PageForm]]]:
    """Place the layers of all ranks; return a layout per rank, and the order for the digest."""
    names = list(dict.fromkeys(layer.name for group in ranks for layer in group.layers))
    if not names:
        raise ConfigError("a KV group has no layers on any rank, expected at least one")
    by_name = [{layer.name: layer for layer in group.layers} for group in ranks]
    placed: dict[str, tuple[int, list[LayerGeometry | None]]] = {}
    order: list[tuple[str, int, int, PageForm]] = []
    offset = 0
    for name in names:
        holders = [layers.get(name) for layers in by_name]
        whole = _whole_layer(name, [layer for layer in holders if layer is not None])
        placed[name] = (offset, holders)
        sample = next(layer for layer in holders if layer is not None)
        cuts = 0 if sample.head_major else sample.heads_total // sample.heads
        order.append((name, whole, cuts, sample.form))
        offset += whole
    layouts = []
    written: set[tuple[str, int]] = set()
    for rank in range(len(ranks)):
        runs = []
        for name, (start, holders) in placed.items():
            layer = holders[rank]
            if layer is not None:
                begin = start + layer.head_first // layer.heads * layer.page_bytes
                writes = (name, layer.head_first) not in written
                written.add((name, layer.head_first))
                runs.append(LayerRun(name, begin, layer.page_bytes, writes))
        layouts.append(GroupLayout(offset, tuple(runs)))
    return layouts, order


def _whole_layer(name: str, holders: Sequence[LayerGeometry]) -> int:
    """Return the bytes of a layer over all ranks; the ranks must cover its heads exactly."""
    sample = holders[0]
    firsts = {layer.head_first for layer in holders}
    for layer in holders:
        same = msgspec.structs.replace(layer, head_first=sample.head_first)
        if same != sample:
            raise ConfigError(f"ranks disagree about layer {name}: {layer} and {sample}")
    if len(firsts) < sample.heads_total // sample.heads:
        held = [head for first in sorted(firsts) for head in range(first, first + sample.heads)]
        raise ConfigError(
            f"layer {name}: ranks hold heads {held}, expected 0..{sample.heads_total - 1}"
        )
    return sample.page_bytes * (sample.heads_total // sample.heads)
