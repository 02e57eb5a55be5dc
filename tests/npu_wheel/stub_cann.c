/* A CANN without hardware, as far as torch_npu 2.13 needs one to be imported and to move memory.
 *
 * Device memory is host memory, a stream is done as soon as it is asked, and nothing computes: the kernels that
 * the tests need are registered from Python. Every other function that torch_npu links to does nothing and
 * returns 0; run.py lists their names in noops.h, as the dynamic linker wants all of them at once.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define OK 0
#define NOOP(name) long name(void) { return OK; }
#include "noops.h"
/* Looked up by name, and missed if they are not there: */
NOOP(aclrtSetDeviceSatMode)
NOOP(aclrtCtxSetSysParamOpt)
NOOP(aclrtSynchronizeStreamWithTimeout)
NOOP(aclrtDestroyStreamForce)
NOOP(aclrtSynchronizeDeviceWithTimeout)
NOOP(aclrtSetOpExecuteTimeOut)
NOOP(aclrtGetSysParamOpt)
NOOP(aclrtSetSysParamOpt)
NOOP(aclSetCompileopt)

static _Thread_local int32_t current_device;
static _Thread_local void *current_context = (void *)1;

/* Device */
int aclrtGetDeviceCount(uint32_t *count) { *count = 1; return OK; }
int aclrtGetDevice(int32_t *device) { *device = current_device; return OK; }
int aclrtSetDevice(int32_t device) { current_device = device; return OK; }
int aclrtGetCurrentContext(void **context) { *context = current_context; return OK; }
int aclrtSetCurrentContext(void *context) { current_context = context; return OK; }
const char *aclrtGetSocName(void) { return "Ascend910B1"; }
const char *aclGetRecentErrMsg(void) { return ""; }
int aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch) {
    *major = 1, *minor = 0, *patch = 0;
    return OK;
}
int aclGetDeviceCapability(uint32_t device, int kind, int64_t *value) { *value = 20; return OK; }
int aclrtGetMemInfo(int kind, size_t *available, size_t *total) {
    *available = *total = (size_t)1 << 33;
    return OK;
}
size_t aclGetCompileoptSize(int option) { return 2; }
int aclGetCompileopt(int option, char *value, size_t size) {
    strncpy(value, "0", size);
    return OK;
}

/* Memory */
static int allocate(void **memory, size_t size) { return posix_memalign(memory, 512, size ? size : 512); }
int aclrtMalloc(void **memory, size_t size, int policy) { return allocate(memory, size); }
int aclrtMallocAlign32(void **memory, size_t size, int policy) { return allocate(memory, size); }
int aclrtMallocWithCfg(void **memory, size_t size, int policy, void *config) { return allocate(memory, size); }
int aclrtMallocHost(void **memory, size_t size) { return allocate(memory, size); }
int aclrtMallocHostWithCfg(void **memory, uint64_t size, void *config) { return allocate(memory, size); }
int aclrtFree(void *memory) { free(memory); return OK; }
int aclrtFreeHost(void *memory) { free(memory); return OK; }
int aclrtPointerGetAttributes(const void *pointer, void *attributes) { memset(attributes, 0, 64); return OK; }

static int copy(void *to, const void *from, size_t size) { memcpy(to, from, size); return OK; }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) { return copy(to, from, size); }
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    return copy(to, from, size);
}
int aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    return copy(to, from, size);
}
int aclrtMemset(void *memory, size_t room, int32_t value, size_t size) { memset(memory, value, size); return OK; }
int aclrtMemsetAsync(void *memory, size_t room, int32_t value, size_t size, void *stream) {
    memset(memory, value, size);
    return OK;
}

/* Streams and events: handles that are not null, and always done */
static int make(void **handle) { *handle = malloc(16); return *handle ? OK : 1; }
static int done(int32_t *status) { *status = 1; return OK; }
int aclrtCreateStream(void **stream) { return make(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) { return make(stream); }
int aclrtCreateEvent(void **event) { return make(event); }
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { return make(event); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return make(event); }
int aclrtGetStreamId(void *stream, int32_t *id) { return done(id); }
int aclrtStreamQuery(void *stream, int32_t *status) { return done(status); }
int aclrtQueryEventStatus(void *event, int32_t *status) { return done(status); }
int aclrtQueryEventWaitStatus(void *event, int32_t *status) { return done(status); }
