/* Calls that change files below a folder, counted; from one of them on, they fail.

   FAIL_BELOW   the folder, as an absolute path
   FAIL_AT      the number of the first call that fails, from 1; 0: none fails
   FAIL_ERRNO   what they fail with: 28 (ENOSPC), 5 (EIO), 30 (EROFS), 122 (EDQUOT), 116 (ESTALE)
   FAIL_COUNT   a file that gets one byte for each call
   FAIL_READS   1: reads are counted and fail in their place; 2: they come short, by half

   gcc -shared -fPIC -o failing_disk.so failing_disk.c -ldl; LD_PRELOAD=failing_disk.so ... */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int reads(void) { const char *kind = getenv("FAIL_READS"); return kind ? atoi(kind) : 0; }

static int fails_now(const char *path) {
    static int seen, log_file = -1;
    const char *below = getenv("FAIL_BELOW"), *at = getenv("FAIL_AT"), *log = getenv("FAIL_COUNT");
    if (!below || strncmp(path, below, strlen(below)) != 0) return 0;
    int now = __sync_add_and_fetch(&seen, 1);
    if (log) {
        ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
        int (*open_real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
        if (log_file < 0) log_file = open_real(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        real(log_file, ".", 1);
    }
    if (!at || atoi(at) == 0 || now < atoi(at)) return 0;
    errno = atoi(getenv("FAIL_ERRNO") ? getenv("FAIL_ERRNO") : "28");
    return 1;
}

static int fails(const char *path) { return reads() ? 0 : fails_now(path); }

static int read_fails(int file) {
    char link[64], path[PATH_MAX];
    if (!reads()) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails_now(path) ? reads() : 0;
}

static int fails_at(int folder, const char *path) {
    char link[64], whole[PATH_MAX * 2];
    if (path && path[0] == '/') return fails(path);
    if (folder == AT_FDCWD) {
        if (!getcwd(whole, PATH_MAX)) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, whole, PATH_MAX - 1);
        if (length < 0) return 0;
        whole[length] = 0;
    }
    if (path) { strcat(whole, "/"); strncat(whole, path, PATH_MAX - 2); }
    return fails(whole);
}

#define REAL(type, name, ...) type (*real)(__VA_ARGS__) = dlsym(RTLD_NEXT, #name)

#define OPEN(name)                                                        \
    int name(const char *path, int flags, ...) {                          \
        va_list more; va_start(more, flags);                              \
        mode_t mode = (flags & O_CREAT) ? va_arg(more, mode_t) : 0;       \
        va_end(more);                                                     \
        if ((flags & O_CREAT) && fails_at(AT_FDCWD, path)) return -1;     \
        REAL(int, name, const char *, int, ...);                          \
        return real(path, flags, mode);                                   \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                      \
    int name(int folder, const char *path, int flags, ...) {              \
        va_list more; va_start(more, flags);                              \
        mode_t mode = (flags & O_CREAT) ? va_arg(more, mode_t) : 0;       \
        va_end(more);                                                     \
        if ((flags & O_CREAT) && fails_at(folder, path)) return -1;       \
        REAL(int, name, int, const char *, int, ...);                     \
        return real(folder, path, flags, mode);                           \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                       \
    FILE *name(const char *path, const char *mode) {                      \
        if (mode[0] != 'r' && fails_at(AT_FDCWD, path)) return NULL;      \
        REAL(FILE *, name, const char *, const char *);                   \
        return real(path, mode);                                          \
    }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int file, const void *data, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    return fails_at(file, NULL) ? -1 : real(file, data, size);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    return fails_at(file, NULL) ? -1 : real(file, parts, count);
}
#define PWRITE(name, offset_type)                                         \
    ssize_t name(int file, const void *data, size_t size, offset_type at) { \
        REAL(ssize_t, name, int, const void *, size_t, offset_type);      \
        return fails_at(file, NULL) ? -1 : real(file, data, size, at);    \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define ON_FILE(name, ...)                                                \
    int name(int file) {                                                  \
        REAL(int, name, int);                                             \
        return fails_at(file, NULL) ? -1 : real(file);                    \
    }
ON_FILE(fsync)
ON_FILE(fdatasync)

#define ON_TWO(name)                                                      \
    int name(const char *from, const char *to) {                          \
        REAL(int, name, const char *, const char *);                      \
        return fails_at(AT_FDCWD, to) ? -1 : real(from, to);              \
    }
ON_TWO(rename)
ON_TWO(link)

int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    return fails_at(AT_FDCWD, path) ? -1 : real(path, mode);
}
int ftruncate(int file, off_t size) {
    REAL(int, ftruncate, int, off_t);
    return fails_at(file, NULL) ? -1 : real(file, size);
}
int ftruncate64(int file, off64_t size) {
    REAL(int, ftruncate64, int, off64_t);
    return fails_at(file, NULL) ? -1 : real(file, size);
}

/* 0: the call goes on as it is; else it fails, or reads half as much */
#define READ(name, offset_type)                                           \
    ssize_t name(int file, void *data, size_t size, offset_type at) {     \
        REAL(ssize_t, name, int, void *, size_t, offset_type);            \
        int how = read_fails(file);                                       \
        return how == 1 ? -1 : real(file, data, how ? size / 2 : size, at); \
    }
READ(pread, off_t)
READ(pread64, off64_t)

#define READV(name, offset_type)                                          \
    ssize_t name(int file, const struct iovec *parts, int count, offset_type at) { \
        REAL(ssize_t, name, int, const struct iovec *, int, offset_type); \
        int how = read_fails(file);                                       \
        return how == 1 ? -1 : real(file, parts, how ? (count + 1) / 2 : count, at); \
    }
READV(preadv, off_t)
READV(preadv64, off64_t)

ssize_t read(int file, void *data, size_t size) {
    REAL(ssize_t, read, int, void *, size_t);
    int how = read_fails(file);
    return how == 1 ? -1 : real(file, data, how ? size / 2 : size);
}
