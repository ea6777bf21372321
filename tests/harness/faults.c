/* Faults for the tests, as a library for LD_PRELOAD: calls on files below a folder fail, are slow,
   or hang. Steered while the process runs, by the file that KVSTORE_FAULTS names: an array of
   struct rule that tests/harness/faults.py has, too; mapped, so it holds for children that inherit the
   variable. Calls go through the C library here: what bypasses it (io_uring, mapped files) is not
   met. Paths relative to the working directory are not met, either. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, READ = 2, WRITE = 4, SYNC = 8, SPACE = 16, META = 32 };
enum { EXTENTS = 1, INDEX = 2, OTHER = 4 };

struct rule {
    volatile uint32_t calls; /* which; 0: no rule */
    uint32_t kinds;          /* of files */
    int32_t error;           /* an errno; 0: none, for what is slow only */
    uint32_t per_million;    /* of the calls */
    uint32_t delay_ms;
    volatile uint32_t hang;   /* until it is 0 */
    volatile uint32_t serial; /* counts uses of this rule; a change releases what hangs */
    volatile uint32_t seen;   /* calls that it is for */
    volatile uint32_t hurt;   /* those that it was applied to */
    volatile uint32_t waiting; /* those that are slow or hang at this moment */
    char prefix[216];        /* of the path, whole names */
};

enum { RULES = 8 };
_Static_assert(sizeof(struct rule) == 256, "tests/harness/faults.py says 256");
static struct rule *rules;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("KVSTORE_FAULTS");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *found = mmap(NULL, RULES * sizeof(struct rule), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (found != MAP_FAILED)
        rules = found;
}

static void pause_ms(unsigned ms) {
    struct timespec left = {ms / 1000, (long)(ms % 1000) * 1000000};
    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

static unsigned kind_of(const char *path) {
    size_t length = strlen(path);
    if (length > 7 && !strcmp(path + length - 7, ".extent"))
        return EXTENTS;
    if (strstr(path, "/index/") || (length > 6 && !strcmp(path + length - 6, "/index")))
        return INDEX;
    return OTHER;
}

static int lucky(uint32_t number, uint32_t per_million) {
    uint64_t x = number * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (x ^ (x >> 31)) % 1000000 >= per_million;
}

/* Apply the rules to a call; return the errno that it fails with, or 0. */
static int apply(const char *path, unsigned call) {
    for (struct rule *rule = rules; rule < rules + RULES; rule++) {
        if (!(rule->calls & call) || !(rule->kinds & kind_of(path)))
            continue;
        size_t length = strlen(rule->prefix);
        if (strncmp(path, rule->prefix, length) || (path[length] && path[length] != '/'))
            continue;
        uint32_t serial = rule->serial;
        uint32_t number = __atomic_fetch_add(&rule->seen, 1, __ATOMIC_SEQ_CST);
        if (lucky(number, rule->per_million))
            continue;
        int error = rule->error;
        __atomic_fetch_add(&rule->hurt, 1, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&rule->waiting, 1, __ATOMIC_SEQ_CST);
        pause_ms(rule->delay_ms);
        while (rule->hang && rule->serial == serial)
            pause_ms(2);
        __atomic_fetch_sub(&rule->waiting, 1, __ATOMIC_SEQ_CST);
        if (error)
            return error;
    }
    return 0;
}

static int armed(void) {
    if (rules)
        for (struct rule *rule = rules; rule < rules + RULES; rule++)
            if (rule->calls)
                return 1;
    return 0;
}

static int on_fd(int fd, unsigned call) {
    char link[64], path[PATH_MAX];
    if (!armed())
        return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length <= 0 || path[0] != '/')
        return 0;
    path[length] = 0;
    return apply(path, call);
}

static int on_path(int folder, const char *name, unsigned call) {
    char link[64], path[PATH_MAX];
    if (!armed() || !name)
        return 0;
    if (name[0] == '/')
        return apply(name, call);
    if (folder == AT_FDCWD)
        return 0;
    if (!name[0])
        return on_fd(folder, call);
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length <= 0 || (size_t)length + strlen(name) + 2 > sizeof path)
        return 0;
    snprintf(path + length, sizeof path - (size_t)length, "/%s", name);
    return apply(path, call);
}

/* One function in front of the C library's of the same name. */
#define BEFORE(type, name, parameters, arguments, check, failed)                                   \
    type name parameters {                                                                         \
        static type(*real) parameters;                                                             \
        int error = check;                                                                         \
        if (error)                                                                                 \
            return failed;                                                                         \
        if (!real)                                                                                 \
            real = (type(*) parameters)dlsym(RTLD_NEXT, #name);                                    \
        return real arguments;                                                                     \
    }
#define MINUS_1 (errno = error, -1)

/* And the one for large files, whose offsets have the same type here. */
_Static_assert(sizeof(off_t) == sizeof(off64_t), "offsets have 64 bits");
#define BOTH(type, name, parameters, arguments, check, failed)                                     \
    BEFORE(type, name, parameters, arguments, check, failed)                                       \
    BEFORE(type, name##64, parameters, arguments, check, failed)

#define OPENS(name, parameters, arguments, folder)                                                 \
    int name parameters {                                                                          \
        static int(*real) parameters;                                                              \
        mode_t mode = 0;                                                                           \
        if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) {                               \
            va_list more;                                                                          \
            va_start(more, flags);                                                                 \
            mode = va_arg(more, mode_t);                                                           \
            va_end(more);                                                                          \
        }                                                                                          \
        int error = on_path(folder, path, OPEN);                                                   \
        if (error)                                                                                 \
            return MINUS_1;                                                                        \
        if (!real)                                                                                 \
            real = (int(*) parameters)dlsym(RTLD_NEXT, #name);                                     \
        return real arguments;                                                                     \
    }

OPENS(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPENS(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPENS(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)
OPENS(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)
BEFORE(int, __open_2, (const char *path, int flags), (path, flags),
       on_path(AT_FDCWD, path, OPEN), MINUS_1)
BEFORE(int, __open64_2, (const char *path, int flags), (path, flags),
       on_path(AT_FDCWD, path, OPEN), MINUS_1)
BEFORE(DIR *, opendir, (const char *path), (path), on_path(AT_FDCWD, path, OPEN),
       (errno = error, NULL))

#define MOVES(name, memory, call)                                                                  \
    BEFORE(ssize_t, name, (int fd, memory data, size_t size), (fd, data, size), on_fd(fd, call),   \
           MINUS_1)
#define MOVES_AT(name, memory, call)                                                               \
    BOTH(ssize_t, name, (int fd, memory data, size_t size, off_t at), (fd, data, size, at),        \
         on_fd(fd, call), MINUS_1)
#define VECTORS(name, call)                                                                        \
    BOTH(ssize_t, name, (int fd, const struct iovec *pieces, int count, off_t at),                 \
         (fd, pieces, count, at), on_fd(fd, call), MINUS_1)
#define VECTORS_2(name, call)                                                                      \
    BEFORE(ssize_t, name, (int fd, const struct iovec *pieces, int count, off_t at, int flags),    \
           (fd, pieces, count, at, flags), on_fd(fd, call), MINUS_1)

MOVES(read, void *, READ)
MOVES(write, const void *, WRITE)
MOVES_AT(pread, void *, READ)
MOVES_AT(pwrite, const void *, WRITE)
VECTORS(preadv, READ)
VECTORS(pwritev, WRITE)
VECTORS_2(preadv2, READ)
VECTORS_2(preadv64v2, READ)
VECTORS_2(pwritev2, WRITE)
VECTORS_2(pwritev64v2, WRITE)
BEFORE(ssize_t, writev, (int fd, const struct iovec *pieces, int count), (fd, pieces, count),
       on_fd(fd, WRITE), MINUS_1)

BEFORE(int, fsync, (int fd), (fd), on_fd(fd, SYNC), MINUS_1)
BEFORE(int, fdatasync, (int fd), (fd), on_fd(fd, SYNC), MINUS_1)
BEFORE(int, sync_file_range, (int fd, off64_t at, off64_t size, unsigned flags),
       (fd, at, size, flags), on_fd(fd, SYNC), MINUS_1)

BOTH(int, fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size),
     on_fd(fd, SPACE), MINUS_1)
BOTH(int, posix_fallocate, (int fd, off_t at, off_t size), (fd, at, size), on_fd(fd, SPACE), error)
BOTH(int, ftruncate, (int fd, off_t size), (fd, size), on_fd(fd, SPACE), MINUS_1)
BEFORE(int, statvfs, (const char *path, struct statvfs *found), (path, found),
       on_path(AT_FDCWD, path, SPACE), MINUS_1)
BEFORE(int, statvfs64, (const char *path, struct statvfs64 *found), (path, found),
       on_path(AT_FDCWD, path, SPACE), MINUS_1)
BEFORE(int, fstatvfs, (int fd, struct statvfs *found), (fd, found), on_fd(fd, SPACE), MINUS_1)
BEFORE(int, fstatvfs64, (int fd, struct statvfs64 *found), (fd, found), on_fd(fd, SPACE), MINUS_1)

BEFORE(int, unlink, (const char *path), (path), on_path(AT_FDCWD, path, META), MINUS_1)
BEFORE(int, unlinkat, (int at, const char *path, int flags), (at, path, flags),
       on_path(at, path, META), MINUS_1)
BEFORE(int, rename, (const char *from, const char *to), (from, to),
       on_path(AT_FDCWD, from, META), MINUS_1)
BEFORE(int, mkdir, (const char *path, mode_t mode), (path, mode), on_path(AT_FDCWD, path, META),
       MINUS_1)
BEFORE(int, stat, (const char *path, struct stat *found), (path, found),
       on_path(AT_FDCWD, path, META), MINUS_1)
BEFORE(int, stat64, (const char *path, struct stat64 *found), (path, found),
       on_path(AT_FDCWD, path, META), MINUS_1)
BEFORE(int, lstat, (const char *path, struct stat *found), (path, found),
       on_path(AT_FDCWD, path, META), MINUS_1)
BEFORE(int, lstat64, (const char *path, struct stat64 *found), (path, found),
       on_path(AT_FDCWD, path, META), MINUS_1)
BEFORE(int, fstat, (int fd, struct stat *found), (fd, found), on_fd(fd, META), MINUS_1)
BEFORE(int, fstat64, (int fd, struct stat64 *found), (fd, found), on_fd(fd, META), MINUS_1)
BEFORE(int, fstatat, (int at, const char *path, struct stat *found, int flags),
       (at, path, found, flags), on_path(at, path, META), MINUS_1)
BEFORE(int, fstatat64, (int at, const char *path, struct stat64 *found, int flags),
       (at, path, found, flags), on_path(at, path, META), MINUS_1)
