// Gathers engine blocks into slots, or scatters slots into engine blocks. Slots are pinned memory of
// the host, read and written from here, so one launch moves any number of blocks of one KV group.
//
// A thread block takes one tile of one engine block at a time: item i is tile i % tile_count of
// place i / tile_count. connectors/copies/gpu/plan.py makes both tables and has the names of their columns.
//
// No barrier and no shared memory: a C compiler with loops around this file runs it as well, and the
// tests do that.

typedef unsigned long long word;

struct Tile {
    word engine;  // address of these bytes in engine block 0
    word stride;  // from one engine block to the next
    word slot;    // offset in an engine block's part of a slot
    word bytes;
};

struct Place {
    word slot;   // address of the engine block's part of a slot
    word block;  // the engine's id of the block
};

#define IN_FLIGHT 4  // loads of a thread that are under way before its first store

static __device__ void copy_tile(char *to, const char *from, word bytes)
{
    word done = 0;
    if ((((word)to | (word)from) & 15) == 0) {
        const uint4 *source = (const uint4 *)from;
        uint4 *target = (uint4 *)to;
        const word count = bytes / 16;
        const word step = blockDim.x;
        word i = threadIdx.x;
        for (; i + (IN_FLIGHT - 1) * step < count; i += IN_FLIGHT * step) {
            const uint4 a = __ldcs(source + i);
            const uint4 b = __ldcs(source + i + step);
            const uint4 c = __ldcs(source + i + 2 * step);
            const uint4 d = __ldcs(source + i + 3 * step);
            __stcs(target + i, a);
            __stcs(target + i + step, b);
            __stcs(target + i + 2 * step, c);
            __stcs(target + i + 3 * step, d);
        }
        for (; i < count; i += step)
            __stcs(target + i, __ldcs(source + i));
        done = count * 16;
    } else if ((((word)to | (word)from) & 3) == 0) {
        const unsigned *source = (const unsigned *)from;
        unsigned *target = (unsigned *)to;
        const word count = bytes / 4;
        for (word i = threadIdx.x; i < count; i += blockDim.x)
            __stcs(target + i, __ldcs(source + i));
        done = count * 4;
    }
    for (word i = done + threadIdx.x; i < bytes; i += blockDim.x)
        to[i] = from[i];
}

#ifdef __cplusplus
extern "C"
#endif
__global__ void __launch_bounds__(512)
kvstore_move(const struct Tile *tiles, word tile_count, const struct Place *places, word items,
             int store)
{
    struct Place next = {0, 0};
    if (blockIdx.x < items)
        next = places[blockIdx.x / tile_count];
    for (word item = blockIdx.x; item < items; item += gridDim.x) {
        const struct Place place = next;  // read while the item before was under way
        if (item + gridDim.x < items)
            next = places[(item + gridDim.x) / tile_count];
        const struct Tile tile = tiles[item % tile_count];
        char *engine = (char *)(tile.engine + place.block * tile.stride);
        char *slot = (char *)(place.slot + tile.slot);
        if (store)
            copy_tile(slot, engine, tile.bytes);
        else
            copy_tile(engine, slot, tile.bytes);
    }
}
