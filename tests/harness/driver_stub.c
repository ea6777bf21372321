/* The driver calls that are made through ctypes, typed as cuda.h of CUDA 13 has them. Copies are
   made at once, and 1 (CUDA_ERROR_INVALID_VALUE) is answered for what the driver would refuse. */
#include <stddef.h>
#include <string.h>

typedef unsigned long long CUdeviceptr;
typedef void *CUstream;
typedef void *CUevent;
typedef struct { int type; int id; } CUmemLocation;
typedef struct {
    int srcAccessOrder;
    CUmemLocation srcLocHint, dstLocHint;
    unsigned flags;
} CUmemcpyAttributes;

CUstream last_stream;
CUevent last_event;
int answer;
int last_order;
unsigned last_flags;
int last_mode;

int cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                          CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs,
                          CUstream hStream)
{
    if (!count || numAttrs != 1 || attrsIdxs[0] != 0 || !hStream || attrs->srcLocHint.type
        || attrs->dstLocHint.type)
        return 1;
    last_stream = hStream;
    last_order = attrs->srcAccessOrder;
    last_flags = attrs->flags;
    for (size_t i = 0; i < count; i++)
        memcpy((void *)dsts[i], (void *)srcs[i], sizes[i]);
    return 0;
}

int cuEventRecord(CUevent hEvent, CUstream hStream)
{
    last_event = hEvent;
    last_stream = hStream;
    return answer;
}

int cuEventQuery(CUevent hEvent)
{
    last_event = hEvent;
    return answer;
}

int cuThreadExchangeStreamCaptureMode(int *mode)
{
    int before = last_mode;
    last_mode = *mode;
    *mode = before;
    return answer;
}
