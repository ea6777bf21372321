/* Runs tiers/gpu/kernel.cu on a CPU: thread blocks and threads become loops. */

typedef struct { unsigned x, y, z, w; } uint4;
static struct { unsigned x; } blockIdx, threadIdx, blockDim, gridDim;
static int misaligned;

#define __device__
#define __global__
#define __launch_bounds__(threads)
#define ALIGNED(p) ((unsigned long long)(p) % sizeof *(p) ? (void)(misaligned = 1) : (void)0)
#define __ldcs(p) (ALIGNED(p), *(p))
#define __stcs(p, v) (ALIGNED(p), (void)(*(p) = (v)))

#include "../../connectors/copies/gpu/kernel.cu"

/* Returns 1 if an access was not at a multiple of its size, which a GPU does not survive. */
int run(const void *tiles, word tile_count, const void *places, word items, int store,
        unsigned blocks, unsigned threads)
{
    misaligned = 0;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            kvstore_move(tiles, tile_count, places, items, store);
    return misaligned;
}
