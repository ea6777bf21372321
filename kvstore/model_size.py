"""What a token of a model costs in a store, from the model's config.json alone.

vLLM sorts layers into KV groups whose blocks have equal sizes; a store's slot holds one block of
one group. tests/engine/test_size.py compares this arithmetic with vLLM's own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvstore.config import read_file
from kvstore.core.errors import ConfigError, NotSupported
from kvstore.core.layout import ALIGNMENT
from kvstore.core.limits import CHUNK_MAX, LAYERS_MAX
from kvstore.core.types import window_rule
from kvstore.units import one_line, shown, sized, wrong

CONFIG = "config.json"
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")  # of a model with images
BLOCK_SIZE = 16
BLOCK_SIZE_CPU = 128
BLOCK_SIZE_LATENT_AND_STATES = 128
"""vLLM's defaults, on a GPU and on a CPU; the least for latent attention beside states."""
NUMBER_MAX = 1 << 24  # of heads, dimensions, tokens of a window and the like
BYTES_OF = {
    "auto": 2,  # vLLM takes 16 bits for models of 32, too
    "bfloat16": 2, "float16": 2, "float32": 4,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
STATE_DTYPES = ("auto", "bfloat16", "float16", "float32")

FULL, LATENT, STATES = "full attention", "latent attention", "recurrent states"
WINDOW = "sliding window"
# Names of layers in `layer_types`; what is in a hybrid_override_pattern.
LAYER_TYPES = {
    "full_attention": FULL, "attention": FULL, "sliding_attention": WINDOW,
    "linear_attention": STATES, "mamba": STATES,
}  # fmt: skip
PATTERN = {"M": STATES, "*": FULL, "-": "", "E": ""}
# One layer of so many is a full one, where config.json does not say which.
WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
# These say that some layers are of a kind that this module does not know, or no engine is served.
UNKNOWN = (
    "attention_chunk_size", "attn_type_list", "block_configs", "compress_ratios", "conv_L_cache",
    "global_head_dim", "index_topk", "linear_attn_config",
)  # fmt: skip
HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")


class Group(msgspec.Struct, frozen=True):
    """KV groups of one kind. layers: in each."""

    kind: str
    count: int
    layers: int
    window: int | None = None

    def session_blocks(self, blocks: int, block_tokens: int) -> int:
        """Count the blocks of each group that a hit of so many blocks needs."""
        if self.kind == STATES:
            return min(1, blocks)
        if self.window is not None:
            return min(blocks, window_rule(self.window, block_tokens).trailing or blocks)
        return blocks


class ModelSize(msgspec.Struct, frozen=True):
    """How large a model's blocks are. engine_bytes: of one engine block of one group."""

    model: str
    block_tokens: int
    engine_bytes: int
    chunk: int
    groups: tuple[Group, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block of one group in a store: a slot."""
        return -(-self.engine_bytes * self.chunk // ALIGNMENT) * ALIGNMENT

    @property
    def blocks(self) -> int:
        """Count the blocks of all groups for the same tokens."""
        return sum(group.count for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """Return what one token costs if the blocks of all groups are stored."""
        return -(-self.slot_bytes * self.blocks // self.block_tokens)

    def in_blocks_of(self, block_tokens: int) -> ModelSize:
        """Return the same with larger blocks, a multiple of the engine's."""
        chunk = block_tokens * self.chunk // self.block_tokens
        if chunk > CHUNK_MAX:
            raise ConfigError(
                f"block_tokens: expected up to {CHUNK_MAX} engine blocks, found {chunk}"
            )
        return msgspec.structs.replace(self, block_tokens=block_tokens, chunk=chunk)

    def held(self, tier: str, capacity_bytes: int, extent_bytes: int, tokens: int = 0) -> TierSize:
        """Say what a tier holds that is cut into extents, and these into slots.

        tokens: of a prompt. Raises ConfigError for extents that are too small for a block.
        """
        if extent_bytes < self.slot_bytes:
            raise ConfigError(
                f"{tier}: expected an extent of at least {sized(self.slot_bytes)}, a block of"
                f" {self.model}, found {sized(extent_bytes)}; a store would refuse the model: make"
                " the capacity or the extent larger"
            )
        slots = capacity_bytes // extent_bytes * (extent_bytes // self.slot_bytes)
        blocks = tokens // self.block_tokens
        needed = sum(
            group.count * group.session_blocks(blocks, self.block_tokens) for group in self.groups
        )
        return TierSize(
            tier,
            capacity_bytes,
            slots // self.blocks * self.block_tokens,
            slots // max(1, self.blocks * blocks),
            slots // max(1, needed),
        )

    def describe(self) -> str:
        """Say it in one line."""
        groups = ", ".join(
            f"{group.count} x {group.layers} layers of {group.kind}" for group in self.groups
        )
        return f"{sized(self.token_bytes)} a token in blocks of {self.block_tokens}: {groups}"


class TierSize(msgspec.Struct, frozen=True):
    """What a tier holds: tokens, and prompts, with all their blocks or those that a hit needs."""

    tier: str
    capacity_bytes: int
    tokens: int
    sessions: int
    sessions_needed: int


class SizeReport(msgspec.Struct, frozen=True):
    """What `kvstore size` prints."""

    model: str
    block_tokens: int
    block_bytes: int
    token_bytes: int
    groups: tuple[Group, ...]
    session_tokens: int
    tiers: tuple[TierSize, ...]


def report(size: ModelSize, tiers: Mapping[str, tuple[int, int]], tokens: int) -> SizeReport:
    """Say what tiers hold of a model. tiers: capacity and extent by name; tokens: of a prompt."""
    rows = tuple(
        size.held(name, capacity, extent, tokens) for name, (capacity, extent) in tiers.items()
    )
    return SizeReport(
        size.model, size.block_tokens, size.slot_bytes, size.token_bytes, size.groups, tokens, rows
    )


def show(found: SizeReport) -> None:
    """Print it as tables."""
    from kvstore.printing import output, table  # noqa: PLC0415 - not where nothing is printed

    token, block = sized(found.token_bytes), sized(found.block_bytes)
    blocks = found.session_tokens // found.block_tokens
    groups = table("groups>", "layers>", f"blocks for {found.session_tokens:,} tokens>", "kind")
    for group in found.groups:
        needed = group.session_blocks(blocks, found.block_tokens)
        groups.add_row(str(group.count), str(group.layers), f"{needed:,}", group.kind)
    tiers = table(
        "tier", "capacity>", "tokens>", "prompts>", "prompts, if only with what hits need>"
    )
    for row in found.tiers:
        counts = (f"{count:,}" for count in (row.tokens, row.sessions, row.sessions_needed))
        tiers.add_row(row.tier, sized(row.capacity_bytes), *counts)
    console = output()
    console.print(
        f"{found.model}: {token} a token; a block of {found.block_tokens} tokens of one group is"
        f" {block}\n",
        highlight=False,
        markup=False,
    )
    console.print(groups)
    if found.tiers:
        console.print()
        console.print(tiers)


def model_size(
    model: Path,
    dtype: str = "auto",
    state_dtype: str = "auto",
    ranks: int = 1,
    block_tokens: int | None = None,
) -> ModelSize:
    """Read a model's config.json, or the one in a directory.

    dtype: of KV; state_dtype: of recurrent states; ranks: tensor parallel size; block_tokens: the
    engine's block size, None for vLLM's default. Raises ConfigError for a file that cannot be
    read, NotSupported for a model whose layers this module does not know.
    """
    path = model / CONFIG if model.is_dir() else model
    name = path.absolute().parent.name if path.name == CONFIG else path.stem
    return _Config(path, ranks).size(name, dtype, state_dtype, block_tokens)


class _Config:
    """The text model of a config.json, with every number looked at before it is used."""

    def __init__(self, path: Path, ranks: int) -> None:
        self._path = path
        self._ranks = ranks
        whole = _table(path)
        parts = (whole.get(name) for name in TEXT_CONFIGS)
        inner = next((part for part in parts if isinstance(part, dict)), whole)
        self._values: Mapping[str, Any] = inner
        self._type = str(self._values.get("model_type", whole.get("model_type")))
        if whole.get("is_encoder_decoder"):
            raise NotSupported(f"{path}: kvstore does not serve encoder-decoder models")
        for name in UNKNOWN:
            if self._values.get(name):
                raise self._unknown(f"{name} = {shown(self._values[name])}")

    def size(self, model: str, dtype: str, state_dtype: str, block_tokens: int | None) -> ModelSize:
        """Compute the groups as vLLM does."""
        layers = self._layers()
        latent = bool(self._values.get("kv_lora_rank"))
        attends = any(kind != STATES for kind in layers)
        token_bytes = self._token_bytes(latent, BYTES_OF[dtype]) if attends else 0
        block = block_tokens or BLOCK_SIZE
        state_bytes = 0
        if STATES in layers:
            state_bytes = self._state_bytes(4 if dtype == "float32" else 2, state_dtype)
            block = self._aligned(block, state_bytes, token_bytes, latent=latent)
        window = self._number("sliding_window") if WINDOW in layers else None
        names = {FULL: LATENT if latent else FULL, WINDOW: f"{WINDOW} of {window}", STATES: STATES}
        groups = tuple(
            Group(names[kind], count, each, window if kind == WINDOW else None)
            for kind, count, each in _groups(layers)
        )
        # Latent KV is the same on all ranks, and kept once.
        pages = self._ranks if not latent else 1
        largest = max(
            group.layers
            * (state_bytes * self._ranks if group.kind == STATES else token_bytes * block * pages)
            for group in groups
        )
        return ModelSize(model, block, largest, 1, groups)

    def _aligned(self, block: int, state_bytes: int, token_bytes: int, *, latent: bool) -> int:
        """Return the tokens of a block that is at least as large as the states."""
        if not token_bytes:
            return block
        unit = max(block, BLOCK_SIZE_LATENT_AND_STATES) if latent else block
        return unit * -(-state_bytes // (unit * token_bytes))

    def _layers(self) -> Counter[str]:
        """Count the layers of each kind; a layer can be of two."""
        values = self._values
        count = self._number("num_hidden_layers", "n_layer", "num_layers", most=LAYERS_MAX)
        shared = self._number("num_kv_shared_layers", default=0)
        types, pattern = values.get("layer_types"), values.get("hybrid_override_pattern")
        if isinstance(pattern, str):
            kinds = [PATTERN.get(char) for char in pattern]
        elif isinstance(types, list):
            kinds = [LAYER_TYPES.get(str(name)) for name in types]
        elif "full_attention_interval" in values or self._type == "qwen3_next":
            every = self._number("full_attention_interval", default=4)
            kinds = [STATES if (at + 1) % every else FULL for at in range(count)]
        elif "attn_layer_period" in values:
            period = self._number("attn_layer_period")
            offset = self._number("attn_layer_offset", default=0)
            kinds = [FULL if at % period == offset else STATES for at in range(count)]
        elif self._type == "falcon_h1":
            kinds = [FULL, STATES] * count
        elif any(name.startswith(("mamba_", "ssm_")) for name in values) or "state_size" in values:
            raise self._unknown("states in layers that it does not name")
        else:
            kinds = self._windows(count)
        if None in kinds:
            named = types if isinstance(types, list) else [pattern]
            raise self._unknown(f"layers of {shown(', '.join(sorted(set(map(str, named)))))}")
        if shared:
            kinds = kinds[: max(1, len(kinds) - shared)]
        found = Counter(kind for kind in kinds[: 2 * LAYERS_MAX] if kind)
        if not found:
            raise self._unknown("no layers with KV")
        return found

    def _windows(self, count: int) -> list[str | None]:
        """Say which layers of a model without `layer_types` have a window."""
        values = self._values
        if not values.get("sliding_window") or not values.get("use_sliding_window", True):
            return [FULL] * count
        interval = self._number(
            "sliding_window_pattern", default=WINDOW_PATTERNS.get(self._type, 0)
        )
        if interval:
            return [WINDOW if (at + 1) % interval else FULL for at in range(count)]
        full = self._number("max_window_layers", default=0)
        return [FULL if at < full else WINDOW for at in range(count)]

    def _token_bytes(self, latent: bool, value_bytes: int) -> int:  # noqa: FBT001
        """Return the bytes of a token in one layer of one rank."""
        if latent:
            width = self._number("kv_lora_rank") + self._number("qk_rope_head_dim", default=0)
            return width * value_bytes
        queries = self._number("num_attention_heads", "n_head")
        one = self._values.get("multi_query") and not self._values.get("new_decoder_architecture")
        heads = self._number(*HEADS, default=1 if one else queries)
        if heads > 1 and heads % self._ranks and self._ranks % heads:
            raise ConfigError(f"--tp: {wrong(f'a divisor of {heads} KV heads', self._ranks)}")
        whole = self._number("hidden_size", "n_embd") // queries
        size = self._number("head_dim", "attention_head_dim", default=max(1, whole))
        return max(1, heads // self._ranks) * size * 2 * value_bytes

    def _state_bytes(self, value_bytes: int, state_dtype: str) -> int:
        """Return the bytes of one rank's states in one layer: of a convolution, and the rest."""
        own = "float32" if self._type == "nemotron_h" else "auto"
        told = self._values.get("mamba_ssm_cache_dtype", self._values.get("mamba_ssm_dtype", own))
        name = told if state_dtype == "auto" else state_dtype
        rest_bytes = value_bytes if name == "auto" else BYTES_OF.get(str(name), 4)
        channels, width, rest = self._state_shapes()
        return channels // self._ranks * (width - 1) * value_bytes + (
            rest // self._ranks * rest_bytes
        )

    def _state_shapes(self) -> tuple[int, int, int]:
        """Return a convolution's channels and width, and the other state's elements."""
        number, values = self._number, self._values
        if "linear_num_value_heads" in values:
            keys = number("linear_num_key_heads") * number("linear_key_head_dim")
            heads, size = number("linear_num_value_heads"), number("linear_value_head_dim")
            rest = heads * size * number("linear_key_head_dim")
            return 2 * keys + heads * size, number("linear_conv_kernel_dim"), rest
        width = number("mamba_d_conv", "conv_kernel")
        state = number("mamba_d_state", "ssm_state_size")
        if self._type == "jamba":
            inner = number("mamba_expand") * number("hidden_size")
            return inner, width, inner * state
        heads = number("mamba_n_heads", "mamba_num_heads")
        inner = heads * number("mamba_d_head", "mamba_head_dim")
        groups = number("mamba_n_groups", "n_groups")
        if groups % self._ranks:  # each rank has those that its heads use
            groups += self._ranks - groups
        return inner + 2 * groups * state, width, inner * state

    def _number(self, *names: str, default: int | None = None, most: int = NUMBER_MAX) -> int:
        """Return the first of these numbers that is there."""
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            least = 1 if default is None or default else 0
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(
                    f"{self._path} {name}: {wrong(f'a whole number from {least} to {most}', value)}"
                )
            return value
        if default is None:
            raise ConfigError(
                f"{self._path}: expected {' or '.join(names)}, found none; where a model leaves it"
                " to its library's default, add it to a copy of the file"
            )
        return default

    def _unknown(self, what: str) -> NotSupported:
        return NotSupported(
            f"{self._path}: {self._type} has {what}, which this command does not know;"
            " a token takes what vLLM's log has as KV cache memory, divided by its tokens"
        )


def _groups(layers: Mapping[str, int]) -> Sequence[tuple[str, int, int]]:
    """Sort layers into groups as vLLM does: kind, number of groups, layers in each."""
    fewest, most = min(layers.values()), max(layers.values())
    size = most if most < fewest * 1.5 else fewest
    found = []
    for kind, count in layers.items():
        groups = -(-count // size)
        found.append((kind, groups, -(-count // groups)))
    return found


def _table(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(read_file(path).decode("utf-8-sig"))
    except OSError as exc:
        raise ConfigError(
            f"{path}: cannot be read: {exc.strerror}; expected the directory of a model with its"
            f" {CONFIG}"
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(
            f"{path}: expected the config.json of a model, found no JSON: {one_line(str(exc), 200)}"
        ) from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: expected the config.json of a model, found {shown(table)}")
    return table
