/* A HIP runtime without a GPU: two devices whose memory is memfds full of a pattern. It demands of its caller what AMD's own
 * runtime demands (clr/hipamd/src/hip_vm.cpp) and what that one leaves undefined; what breaks a demand is a complaint.
 *
 * The environment variable FAKE_HIP_VERSION replaces its version. */
#define _GNU_SOURCE
#include "hip.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { DEVICES = 2, MAX = 4096 };
static const size_t MINIMUM = 4096, RECOMMENDED = 2 << 20;
static const size_t TOTAL[DEVICES] = {64 << 20, 128 << 20};

struct ihipMemGenericAllocationHandle {
  int device, fd, mappings, live;
  size_t size;
};
struct ihipStream_t {
  int device, live, queued;
  struct { void *ptr; size_t size; int value; } memset[64];
};
struct range { char *ptr; size_t size; };
struct mapping { char *ptr; size_t size; hipMemGenericAllocationHandle_t handle; int access; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ihipMemGenericAllocationHandle handles[MAX];
static struct ihipStream_t streams[16];
static struct range ranges[MAX];
static struct mapping mappings[MAX];
static size_t used[DEVICES];
static int started, complaints;
static __thread int selected;

static struct { char name[64]; int calls, until; hipError_t code; } calls[32];

static int slot(const char *name) {
  int i = 0;
  while (calls[i].name[0] && strcmp(calls[i].name, name)) i++;
  strcpy(calls[i].name, name);
  return i;
}

/* --- what a test asks and orders --- */

/* The call of this name after `more` others fails with `code`, once. */
void fake_fail(const char *name, int more, int code) {
  pthread_mutex_lock(&lock);
  int i = slot(name);
  calls[i].until = more + 1;
  calls[i].code = code;
  pthread_mutex_unlock(&lock);
}

int fake_calls(const char *name) {
  pthread_mutex_lock(&lock);
  int n = calls[slot(name)].calls;
  pthread_mutex_unlock(&lock);
  return n;
}

/* Ranges, handles, mappings, memsets that are queued, complaints. */
void fake_counts(int *out) {
  pthread_mutex_lock(&lock);
  memset(out, 0, 5 * sizeof *out);
  for (int i = 0; i < MAX; i++) {
    out[0] += ranges[i].ptr != NULL;
    out[1] += handles[i].live;
    out[2] += mappings[i].ptr != NULL;
  }
  for (int i = 0; i < 16; i++) out[3] += streams[i].queued;
  out[4] = complaints;
  pthread_mutex_unlock(&lock);
}

/* --- the runtime --- */

static hipError_t complain(const char *call, const char *why) {
  fprintf(stderr, "fake HIP: %s: %s\n", call, why);
  complaints++;
  return hipErrorInvalidValue;
}

/* Every function but the first two begins here: counted, failed where ordered, refused before hipInit. */
static hipError_t enter(const char *call) {
  int i = slot(call);
  calls[i].calls++;
  if (calls[i].until > 0 && --calls[i].until == 0) return calls[i].code;
  if (!started && strcmp(call, "hipInit")) {
    complain(call, "before hipInit");
    return hipErrorNotInitialized;
  }
  return hipSuccess;
}

static int take_lock(void) { return pthread_mutex_lock(&lock); }
static void drop_lock(int *taken) { pthread_mutex_unlock(&lock), (void)taken; }

#define ENTER                                                         \
  __attribute__((cleanup(drop_lock), unused)) int taken = take_lock(); \
  hipError_t refused = enter(__func__);                               \
  if (refused) return refused
#define DEMAND(what) \
  if (!(what)) return complain(__func__, "not " #what)

static int good_prop(const hipMemAllocationProp *prop) {
  return prop && prop->type == hipMemAllocationTypePinned && prop->requestedHandleType == hipMemHandleTypeNone &&
         prop->location.type == hipMemLocationTypeDevice && prop->location.id == selected && !prop->win32HandleMetaData &&
         !prop->allocFlags.compressionType && !prop->allocFlags.gpuDirectRDMACapable && !prop->allocFlags.usage;
}

static struct range *range_of(char *ptr, size_t size) {
  for (int i = 0; i < MAX; i++)
    if (ranges[i].ptr && ptr >= ranges[i].ptr && ptr + size <= ranges[i].ptr + ranges[i].size) return &ranges[i];
  return NULL;
}

/* The first mapping that touches these addresses. */
static struct mapping *mapping_in(char *ptr, size_t size) {
  for (int i = 0; i < MAX; i++)
    if (mappings[i].ptr && ptr < mappings[i].ptr + mappings[i].size && mappings[i].ptr < ptr + size) return &mappings[i];
  return NULL;
}

/* What hipMemSetAccess said of the mapping here; 0 before it was asked. */
int fake_access(void *ptr) {
  pthread_mutex_lock(&lock);
  struct mapping *m = mapping_in(ptr, 1);
  int access = m ? m->access : -1;
  pthread_mutex_unlock(&lock);
  return access;
}

static int memset_queued_at(char *ptr) {
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < streams[i].queued; k++)
      if (streams[i].memset[k].ptr == ptr) return 1;
  return 0;
}

static int whole_mapping(char *ptr, size_t size) {
  struct mapping *m = mapping_in(ptr, size);
  return m && m->ptr == ptr && m->size == size;
}

hipError_t hipRuntimeGetVersion(int *version) {
  const char *given = getenv("FAKE_HIP_VERSION");
  *version = given ? atoi(given) : 70253211;
  return hipSuccess;
}

const char *hipGetErrorName(hipError_t code) {
  switch ((int)code) {
    case hipErrorInvalidValue: return "hipErrorInvalidValue";
    case hipErrorInvalidDevice: return "hipErrorInvalidDevice";
    case hipErrorIllegalState: return "hipErrorIllegalState";
    case 4242: return NULL; /* AMD's own never does so; the header does not promise it */
    default: return "hipErrorUnknown";
  }
}

hipError_t hipInit(unsigned int flags) {
  ENTER;
  DEMAND(flags == 0);
  started = 1;
  return hipSuccess;
}

hipError_t hipGetDevice(int *device) {
  ENTER;
  *device = selected;
  return hipSuccess;
}

hipError_t hipSetDevice(int device) {
  ENTER;
  if (device < 0 || device >= DEVICES) return hipErrorInvalidDevice;
  selected = device;
  return hipSuccess;
}

hipError_t hipDeviceGetUuid(hipUUID *uuid, hipDevice_t device) {
  ENTER;
  if (device < 0 || device >= DEVICES) return hipErrorInvalidDevice;
  memset(uuid->bytes, 0xa0 + device, sizeof uuid->bytes);
  return hipSuccess;
}

hipError_t hipDeviceSynchronize(void) {
  ENTER;
  return hipSuccess;
}

hipError_t hipMemGetInfo(size_t *free, size_t *total) {
  ENTER;
  *total = TOTAL[selected];
  *free = TOTAL[selected] - used[selected];
  return hipSuccess;
}

hipError_t hipMemGetAllocationGranularity(size_t *granularity, const hipMemAllocationProp *prop,
                                          hipMemAllocationGranularity_flags option) {
  ENTER;
  DEMAND(good_prop(prop));
  *granularity = option == hipMemAllocationGranularityRecommended ? RECOMMENDED : MINIMUM;
  return hipSuccess;
}

hipError_t hipMemAddressReserve(void **ptr, size_t size, size_t alignment, void *addr, unsigned long long flags) {
  ENTER;
  DEMAND(size && size % MINIMUM == 0);
  DEMAND(alignment == 0 && addr == NULL && flags == 0);
  int i = 0;
  while (ranges[i].ptr) i++;
  char *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return hipErrorOutOfMemory;
  ranges[i] = (struct range){at, size};
  *ptr = at;
  return hipSuccess;
}

hipError_t hipMemAddressFree(void *ptr, size_t size) {
  ENTER;
  struct range *r = range_of(ptr, size);
  DEMAND(r && r->ptr == ptr && r->size == size);
  DEMAND(!mapping_in(ptr, size));
  munmap(ptr, size);
  *r = (struct range){0};
  return hipSuccess;
}

hipError_t hipMemCreate(hipMemGenericAllocationHandle_t *handle, size_t size, const hipMemAllocationProp *prop,
                        unsigned long long flags) {
  ENTER;
  DEMAND(good_prop(prop));
  DEMAND(size && size % MINIMUM == 0 && flags == 0);
  if (size > TOTAL[selected] - used[selected]) return hipErrorOutOfMemory;
  int i = 0;
  while (handles[i].live) i++;
  int fd = memfd_create("fake_hip", 0);
  DEMAND(fd >= 0 && ftruncate(fd, size) == 0);
  char *bytes = mmap(NULL, size, PROT_WRITE, MAP_SHARED, fd, 0);
  DEMAND(bytes != MAP_FAILED);
  memset(bytes, 0xff, size); /* somebody else's bytes: NaN in every float format */
  munmap(bytes, size);
  handles[i] = (struct ihipMemGenericAllocationHandle){selected, fd, 0, 1, size};
  used[selected] += size;
  *handle = &handles[i];
  return hipSuccess;
}

hipError_t hipMemRelease(hipMemGenericAllocationHandle_t h) {
  ENTER;
  DEMAND(h >= handles && h < handles + MAX && h->live);
  DEMAND(h->mappings == 0);
  DEMAND(h->device == selected);
  close(h->fd);
  used[h->device] -= h->size;
  h->live = 0;
  return hipSuccess;
}

hipError_t hipMemMap(void *ptr, size_t size, size_t offset, hipMemGenericAllocationHandle_t h, unsigned long long flags) {
  ENTER;
  DEMAND(offset == 0 && flags == 0);
  DEMAND(h >= handles && h < handles + MAX && h->live && h->size == size);
  DEMAND(h->device == selected);
  DEMAND(range_of(ptr, size) && !mapping_in(ptr, size));
  int i = 0;
  while (mappings[i].ptr) i++;
  DEMAND(mmap(ptr, size, PROT_NONE, MAP_SHARED | MAP_FIXED, h->fd, 0) == ptr);
  mappings[i] = (struct mapping){ptr, size, h, 0};
  h->mappings++;
  return hipSuccess;
}

hipError_t hipMemSetAccess(void *ptr, size_t size, const hipMemAccessDesc *desc, size_t count) {
  ENTER;
  DEMAND(whole_mapping(ptr, size));
  DEMAND(count == 1 && desc->location.type == hipMemLocationTypeDevice && desc->location.id == selected);
  DEMAND(desc->flags == hipMemAccessFlagsProtRead || desc->flags == hipMemAccessFlagsProtReadWrite);
  struct mapping *m = mapping_in(ptr, size);
  m->access = desc->flags;
  mprotect(ptr, size, m->access == hipMemAccessFlagsProtRead ? PROT_READ : PROT_READ | PROT_WRITE);
  return hipSuccess;
}

hipError_t hipMemUnmap(void *ptr, size_t size) {
  ENTER;
  DEMAND(whole_mapping(ptr, size));
  struct mapping *m = mapping_in(ptr, size);
  DEMAND(m->handle->device == selected);
  DEMAND(!memset_queued_at(ptr));
  mmap(ptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  m->handle->mappings--;
  *m = (struct mapping){0};
  return hipSuccess;
}

hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned int flags) {
  ENTER;
  DEMAND(flags == hipStreamNonBlocking);
  int i = 0;
  while (streams[i].live) i++;
  streams[i] = (struct ihipStream_t){.device = selected, .live = 1};
  *stream = &streams[i];
  return hipSuccess;
}

hipError_t hipMemsetD8Async(hipDeviceptr_t ptr, unsigned char value, size_t size, hipStream_t s) {
  ENTER;
  DEMAND(s >= streams && s < streams + 16 && s->live && s->device == selected);
  DEMAND(whole_mapping(ptr, size) && mapping_in(ptr, size)->access == hipMemAccessFlagsProtReadWrite);
  DEMAND(s->queued < 64);
  s->memset[s->queued].ptr = ptr;
  s->memset[s->queued].size = size;
  s->memset[s->queued++].value = value;
  return hipSuccess;
}

/* Nothing that was queued has happened before. */
hipError_t hipStreamSynchronize(hipStream_t s) {
  ENTER;
  DEMAND(s >= streams && s < streams + 16 && s->live && s->device == selected);
  for (int i = 0; i < s->queued; i++) memset(s->memset[i].ptr, s->memset[i].value, s->memset[i].size);
  s->queued = 0;
  return hipSuccess;
}
