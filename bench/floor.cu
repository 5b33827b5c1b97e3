// The floor of putting memory under a KV cache: the raw driver calls, nothing around them. bench/map.py runs it.
//
//   nvcc -O2 -o floor bench/floor.cu -lcuda
//   ./floor <hole|zero|cached> <handles a page> <handle MiB> <total MiB> <whole MiB>
//
// One handle a page is the chunked layout, one handle a buffer and page the per-layer one. `hole`: nothing under what is
// not backed. `zero`: one read-only handle under every part that is not backed. `cached`: the handles are there already
// and are cleared when they are given back. Addresses are reserved for <whole>, memory is put under <total>.
//
// Prints one JSON object: microseconds and driver calls (clearing not counted) to create the range, to back and to
// release <total> page by page and with the fewest calls that cover it at once, and to give the range back.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <vector>

#define CHECK(call)                                                                  \
    do {                                                                             \
        CUresult r = (call);                                                         \
        if (r != CUDA_SUCCESS) {                                                     \
            const char *name = "?";                                                  \
            cuGetErrorName(r, &name);                                                \
            fprintf(stderr, "%s: %s\n", #call, name);                                \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)

static long calls = 0;

#define COUNTED(call)                                                                \
    do {                                                                             \
        calls++;                                                                     \
        CHECK(call);                                                                 \
    } while (0)

template <class Work> static void phase(const char *name, Work work) {
    const long before = calls;
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    printf("\"%s_us\": %.1f, \"%s_calls\": %ld, ", name, took.count(), name, calls - before);
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: %s <hole|zero|cached> <handles a page> <handle MiB> <total MiB> <whole MiB>\n", argv[0]);
        return 2;
    }
    const bool zero = !strcmp(argv[1], "zero"), cached = !strcmp(argv[1], "cached");
    const size_t width = size_t(atol(argv[2])), handle = size_t(atol(argv[3])) << 20;
    const size_t pages = (size_t(atol(argv[4])) << 20) / (width * handle);
    const size_t whole_pages = (size_t(atol(argv[5])) << 20) / (width * handle);
    const size_t span = whole_pages * handle; // addresses of one buffer; of all, where a page is one handle
    const size_t run = pages * handle;        // the part of a span that is backed
    CHECK(cuInit(0));
    CUdevice device;
    CHECK(cuDeviceGet(&device, 0));
    CUcontext context;
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));

    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = 0;
    CUmemAccessDesc both = {}, read = {};
    both.location = read.location = prop.location;
    both.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    read.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;

    CUdeviceptr base = 0;
    CUmemGenericAllocationHandle zeros = 0;
    std::vector<CUmemGenericAllocationHandle> handles(pages * width);
    const auto at = [&](size_t page, size_t buffer) { return base + buffer * span + page * handle; };
    const auto alias = [&](size_t num_pages) {
        for (size_t buffer = 0; buffer < width; buffer++) {
            for (size_t page = 0; page < num_pages; page++)
                COUNTED(cuMemMap(at(page, buffer), handle, 0, zeros, 0));
            COUNTED(cuMemSetAccess(at(0, buffer), num_pages * handle, &read, 1));
        }
    };
    const auto back = [&](size_t page) {
        for (size_t buffer = 0; buffer < width; buffer++) {
            const CUdeviceptr address = at(page, buffer);
            CUmemGenericAllocationHandle &memory = handles[page * width + buffer];
            if (zero)
                COUNTED(cuMemUnmap(address, handle));
            if (!cached)
                COUNTED(cuMemCreate(&memory, handle, &prop, 0));
            COUNTED(cuMemMap(address, handle, 0, memory, 0));
            COUNTED(cuMemSetAccess(address, handle, &both, 1));
        }
    };
    // Before it is unmapped, so that what is kept holds no tenant's bytes.
    const auto clear = [&](size_t page, size_t bytes) {
        for (size_t buffer = 0; buffer < width; buffer++)
            CHECK(cuMemsetD8Async(at(page, buffer), 0, bytes, nullptr));
        CHECK(cuCtxSynchronize());
    };
    const auto release = [&](size_t page) {
        if (cached)
            clear(page, handle);
        for (size_t buffer = 0; buffer < width; buffer++) {
            const CUdeviceptr address = at(page, buffer);
            COUNTED(cuMemUnmap(address, handle));
            if (zero) {
                COUNTED(cuMemMap(address, handle, 0, zeros, 0));
                COUNTED(cuMemSetAccess(address, handle, &read, 1));
            }
            if (!cached)
                COUNTED(cuMemRelease(handles[page * width + buffer]));
        }
    };

    printf("{");
    phase("create", [&] {
        COUNTED(cuMemAddressReserve(&base, width * span, 0, 0, 0));
        if (zero) {
            COUNTED(cuMemCreate(&zeros, handle, &prop, 0));
            alias(whole_pages);
        }
    });
    if (cached)
        for (auto &memory : handles)
            CHECK(cuMemCreate(&memory, handle, &prop, 0));
    back(0); // the driver sets itself up on the first call of each kind
    CHECK(cuCtxSynchronize());
    release(0);

    phase("back", [&] {
        for (size_t page = 0; page < pages; page++)
            back(page);
        CHECK(cuCtxSynchronize());
    });
    phase("release", [&] {
        for (size_t page = 0; page < pages; page++)
            release(page);
    });
    phase("back_one_call", [&] {
        if (!cached)
            for (auto &memory : handles)
                COUNTED(cuMemCreate(&memory, handle, &prop, 0));
        for (size_t buffer = 0; buffer < width; buffer++) {
            if (zero)
                COUNTED(cuMemUnmap(at(0, buffer), run));
            for (size_t page = 0; page < pages; page++)
                COUNTED(cuMemMap(at(page, buffer), handle, 0, handles[page * width + buffer], 0));
            COUNTED(cuMemSetAccess(at(0, buffer), run, &both, 1));
        }
        CHECK(cuCtxSynchronize());
    });
    phase("release_one_call", [&] {
        if (cached)
            clear(0, run);
        for (size_t buffer = 0; buffer < width; buffer++)
            COUNTED(cuMemUnmap(at(0, buffer), run));
        if (zero)
            alias(pages);
        if (!cached)
            for (auto memory : handles)
                COUNTED(cuMemRelease(memory));
    });
    phase("shutdown", [&] {
        if (zero) {
            for (size_t buffer = 0; buffer < width; buffer++)
                COUNTED(cuMemUnmap(at(0, buffer), span));
            COUNTED(cuMemRelease(zeros));
        }
        if (cached)
            for (auto memory : handles)
                COUNTED(cuMemRelease(memory));
        COUNTED(cuMemAddressFree(base, width * span));
    });
    printf("\"units\": %zu, \"backed_bytes\": %zu}\n", pages, width * run);
    return 0;
}
