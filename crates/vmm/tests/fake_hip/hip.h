/* What src/hip/api.rs binds, as C: the same declarations that HIP's own hip_runtime_api.h makes since HIP 5.3, in our words.
 * runtime.c is compiled against it, so that a call from Rust arrives through the layouts and types that C sees here. */
#ifndef FAKE_HIP_H
#define FAKE_HIP_H

#include <stddef.h>

typedef enum {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorOutOfMemory = 2,
  hipErrorNotInitialized = 3,
  hipErrorInvalidDevice = 101,
  hipErrorIllegalState = 401,
} hipError_t;

typedef enum { hipMemAllocationTypePinned = 1 } hipMemAllocationType;
typedef enum { hipMemHandleTypeNone = 0 } hipMemAllocationHandleType;
typedef enum { hipMemLocationTypeDevice = 1 } hipMemLocationType;
typedef enum { hipMemAccessFlagsProtRead = 1, hipMemAccessFlagsProtReadWrite = 3 } hipMemAccessFlags;
typedef enum { hipMemAllocationGranularityMinimum, hipMemAllocationGranularityRecommended } hipMemAllocationGranularity_flags;
enum { hipStreamNonBlocking = 1 };

typedef struct {
  hipMemLocationType type;
  int id;
} hipMemLocation;

typedef struct {
  hipMemLocation location;
  hipMemAccessFlags flags;
} hipMemAccessDesc;

typedef struct {
  hipMemAllocationType type;
  hipMemAllocationHandleType requestedHandleType;
  hipMemLocation location;
  void *win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
  } allocFlags;
} hipMemAllocationProp;

typedef struct ihipMemGenericAllocationHandle *hipMemGenericAllocationHandle_t;
typedef struct ihipStream_t *hipStream_t;
typedef void *hipDeviceptr_t;

hipError_t hipRuntimeGetVersion(int *runtimeVersion);
const char *hipGetErrorName(hipError_t hip_error);
hipError_t hipInit(unsigned int flags);
hipError_t hipGetDevice(int *deviceId);
hipError_t hipSetDevice(int deviceId);
typedef int hipDevice_t;

typedef struct hipUUID_t {
  char bytes[16];
} hipUUID;

hipError_t hipDeviceGetUuid(hipUUID *uuid, hipDevice_t device);
hipError_t hipDeviceSynchronize(void);
hipError_t hipMemGetInfo(size_t *free, size_t *total);
hipError_t hipMemGetAllocationGranularity(size_t *granularity, const hipMemAllocationProp *prop, hipMemAllocationGranularity_flags option);
hipError_t hipMemAddressReserve(void **ptr, size_t size, size_t alignment, void *addr, unsigned long long flags);
hipError_t hipMemAddressFree(void *devPtr, size_t size);
hipError_t hipMemCreate(hipMemGenericAllocationHandle_t *handle, size_t size, const hipMemAllocationProp *prop, unsigned long long flags);
hipError_t hipMemRelease(hipMemGenericAllocationHandle_t handle);
hipError_t hipMemMap(void *ptr, size_t size, size_t offset, hipMemGenericAllocationHandle_t handle, unsigned long long flags);
hipError_t hipMemUnmap(void *ptr, size_t size);
hipError_t hipMemSetAccess(void *ptr, size_t size, const hipMemAccessDesc *desc, size_t count);
hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned int flags);
hipError_t hipStreamSynchronize(hipStream_t stream);
hipError_t hipMemsetD8Async(hipDeviceptr_t dest, unsigned char value, size_t count, hipStream_t stream);

#endif
