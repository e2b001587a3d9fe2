/* The calls of the CUDA driver that kvferry makes, over host memory that other processes can map:
 * declared by NVIDIA's own header, so that a wrong type or name does not build or does not load. */
#define _GNU_SOURCE
#include <cuda.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define NUM_DEVICES 3
#define MAX_PIECES 64

struct piece { char *address; size_t size; int fd; int is_owned; };
struct handle { long pid; long fd; size_t size; char magic[8]; };

static struct piece pieces[MAX_PIECES];
static __thread int depth;

/* Allocated or opened, and not given back. */
int fake_cuda_live(int is_owned) {
    int count = 0;
    for (int i = 0; i < MAX_PIECES; i++) count += pieces[i].address && pieces[i].is_owned == is_owned;
    return count;
}

static CUresult add(CUdeviceptr *address, size_t size, int fd, int is_owned) {
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    for (int i = 0; i < MAX_PIECES; i++) {
        if (pieces[i].address) continue;
        char *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
        pieces[i] = (struct piece){mapped, size, fd, is_owned};
        *address = (CUdeviceptr)mapped;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static struct piece *find(CUdeviceptr address) {
    for (int i = 0; i < MAX_PIECES; i++)
        if (pieces[i].address == (char *)address && pieces[i].address) return &pieces[i];
    return NULL;
}

static CUresult drop(CUdeviceptr address, int is_owned) {
    struct piece *piece = find(address);
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    if (!piece || piece->is_owned != is_owned) return CUDA_ERROR_INVALID_VALUE;
    munmap(piece->address, piece->size);
    close(piece->fd);
    piece->address = NULL;
    return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult cuDeviceGetCount(int *count) { *count = NUM_DEVICES; return CUDA_SUCCESS; }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (ordinal < 0 || ordinal >= NUM_DEVICES) return CUDA_ERROR_INVALID_DEVICE;
    *device = 100 + ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memset(uuid->bytes, device, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}

/* The first two reach each other. */
CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    *can = device < 102 && peer < 102;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(long)device;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    if ((long)context < 100) return CUDA_ERROR_INVALID_CONTEXT;
    depth++;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context) { depth--; *context = NULL; return CUDA_SUCCESS; }

CUresult cuMemAlloc(CUdeviceptr *address, size_t size) {
    int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    return add(address, size, fd, 1);
}

CUresult cuMemFree(CUdeviceptr address) { return drop(address, 1); }

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    struct piece *piece = find(address);
    if (!piece) return CUDA_ERROR_INVALID_VALUE;
    *base = (CUdeviceptr)piece->address;
    *size = piece->size;
    return CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address) {
    struct piece *piece = find(address);
    if (!piece || !piece->is_owned) return CUDA_ERROR_INVALID_VALUE;
    struct handle handle = {getpid(), piece->fd, piece->size, "fakecud"};
    memset(out, 0, sizeof *out);
    memcpy(out, &handle, sizeof handle);
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle opaque, unsigned int flags) {
    struct handle handle;
    char path[64];
    memcpy(&handle, &opaque, sizeof handle);
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
    if (memcmp(handle.magic, "fakecud", 8)) return CUDA_ERROR_INVALID_VALUE;
    snprintf(path, sizeof path, "/proc/%ld/fd/%ld", handle.pid, handle.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return CUDA_ERROR_INVALID_HANDLE;
    return add(address, handle.size, fd, 0);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) { return drop(address, 0); }

CUresult cuGetErrorName(CUresult error, const char **name) {
    if (error == CUDA_ERROR_INVALID_VALUE) *name = "CUDA_ERROR_INVALID_VALUE";
    else if (error == CUDA_ERROR_INVALID_CONTEXT) *name = "CUDA_ERROR_INVALID_CONTEXT";
    else if (error == CUDA_ERROR_INVALID_DEVICE) *name = "CUDA_ERROR_INVALID_DEVICE";
    else return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}
