/* cuFile without a GPU: what NIXL's GDS plugin links to. CUFILE_STUB says what opening the driver
   does: f fails as without nvidia-fs, a aborts, h hangs, else it works. */
#include <stdlib.h>
#include <unistd.h>

typedef struct { int err; int cu_err; } CUfileError_t;

#define WORKS(name) CUfileError_t name(void) { return (CUfileError_t){0, 0}; }

CUfileError_t cuFileDriverOpen(void)
{
    const char *does = getenv("CUFILE_STUB");
    if (does && *does == 'a')
        abort();
    if (does && *does == 'h')
        sleep(600);
    return (CUfileError_t){does && *does == 'f' ? 5001 : 0, 0};
}

WORKS(cuFileDriverClose)
WORKS(cuFileDriverClose_v2)
WORKS(cuFileHandleRegister)
WORKS(cuFileHandleDeregister)
WORKS(cuFileBufRegister)
WORKS(cuFileBufDeregister)
WORKS(cuFileBatchIOSetUp)
WORKS(cuFileBatchIOSubmit)
WORKS(cuFileBatchIOGetStatus)
WORKS(cuFileBatchIOCancel)
WORKS(cuFileBatchIODestroy)
