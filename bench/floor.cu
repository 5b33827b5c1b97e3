// The floor of backing memory: the raw driver calls for n handles of one size, nothing around them.
//
//   nvcc -O2 -o floor bench/floor.cu -lcuda && ./floor <handle MiB> <total MiB>
//
// Prints two numbers: microseconds to create, map and open all handles one after the other; microseconds to
// unmap and release them.
#include <chrono>
#include <cstdio>
#include <cstdlib>
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

static double micros(std::chrono::steady_clock::time_point since) {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - since).count();
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s <handle MiB> <total MiB>\n", argv[0]);
        return 2;
    }
    const size_t handle = size_t(atol(argv[1])) << 20, total = size_t(atol(argv[2])) << 20;
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
    CUmemAccessDesc access = {};
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

    CUdeviceptr base;
    CHECK(cuMemAddressReserve(&base, total, 0, 0, 0));
    std::vector<CUmemGenericAllocationHandle> handles(total / handle);
    // One handle first: the driver sets itself up on the first call of each kind.
    CHECK(cuMemCreate(&handles[0], handle, &prop, 0));
    CHECK(cuMemMap(base, handle, 0, handles[0], 0));
    CHECK(cuMemSetAccess(base, handle, &access, 1));
    CHECK(cuMemUnmap(base, handle));
    CHECK(cuMemRelease(handles[0]));
    auto start = std::chrono::steady_clock::now();
    for (size_t i = 0; i < handles.size(); i++) {
        CHECK(cuMemCreate(&handles[i], handle, &prop, 0));
        CHECK(cuMemMap(base + i * handle, handle, 0, handles[i], 0));
        CHECK(cuMemSetAccess(base + i * handle, handle, &access, 1));
    }
    const double back = micros(start);
    start = std::chrono::steady_clock::now();
    for (size_t i = 0; i < handles.size(); i++) {
        CHECK(cuMemUnmap(base + i * handle, handle));
        CHECK(cuMemRelease(handles[i]));
    }
    printf("%.1f %.1f\n", back, micros(start));
    CHECK(cuMemAddressFree(base, total));
    return 0;
}
