// Counts the driver calls that reserve, create, map and give back memory in a process that bench/map.py cannot look into.
//
//   cc -O2 -shared -fPIC -o calls.so bench/calls.c -ldl && LD_PRELOAD=./calls.so python ...
//
// Stands before libcuda's functions where a program is linked to them, and hands itself out where it asks dlsym for
// them. A few nanoseconds a call, of a driver call's several hundred or more. One taken by cuGetProcAddress is not seen.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uintptr_t Word; // every argument is an integer or a pointer, five at most: the same registers
typedef int (*Function)(Word, Word, Word, Word, Word);
typedef void *(*Lookup)(void *, const char *);

static long count;

// What was called so far. For ctypes.
long counted_calls(void) { return __atomic_load_n(&count, __ATOMIC_RELAXED); }

static Lookup real_dlsym(void) {
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
    static Lookup found;
    for (size_t i = 0; !found && i < sizeof versions / sizeof *versions; i++)
        found = (Lookup)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    return found;
}

#define COUNTED(name)                                                                \
    int name(Word a, Word b, Word c, Word d, Word e) {                               \
        static Function real;                                                        \
        if (!real)                                                                   \
            real = (Function)real_dlsym()(dlopen("libcuda.so.1", RTLD_LAZY), #name); \
        __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);                             \
        return real(a, b, c, d, e);                                                  \
    }

COUNTED(cuMemAddressReserve)
COUNTED(cuMemAddressFree)
COUNTED(cuMemCreate)
COUNTED(cuMemRelease)
COUNTED(cuMemMap)
COUNTED(cuMemUnmap)
COUNTED(cuMemSetAccess)

#define ROW(name) {#name, name}
static const struct {
    const char *name;
    Function function;
} counted[] = {
    ROW(cuMemAddressReserve), ROW(cuMemAddressFree), ROW(cuMemCreate),    ROW(cuMemRelease),
    ROW(cuMemMap),            ROW(cuMemUnmap),       ROW(cuMemSetAccess),
};

void *dlsym(void *library, const char *name) {
    if (!strncmp(name, "cuMem", 5))
        for (size_t i = 0; i < sizeof counted / sizeof *counted; i++)
            if (!strcmp(name, counted[i].name))
                // Where the library has no such function, the caller is told so.
                return real_dlsym()(library, name) ? (void *)counted[i].function : NULL;
    return real_dlsym()(library, name); // a tail call: RTLD_NEXT looks from its caller's place
}
