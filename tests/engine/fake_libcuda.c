/*
 * A libcuda.so.1 that plays the driver of another machine:
 *
 *   FAKE_CUDA_VERSION     what cuDriverGetVersion tells, such as 12060
 *   FAKE_CUDA_INIT        what cuInit returns; 0: success
 *   FAKE_CUDA_DEVICES     name:major:minor:bytes:integrated of each GPU, separated by ;
 *   CUDA_VISIBLE_DEVICES  ordinals, as the driver takes them: an invalid one hides itself and all behind it
 */

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, MOST_DEVICES = 8 };

struct device {
    char name[64];
    int major;
    int minor;
    size_t n_bytes;
    int is_integrated;
};

static struct device devices[MOST_DEVICES];
static int n_devices = -1; /* cuInit was not called */

static const char * setting(const char * name) {
    const char * value = getenv(name);
    return value != NULL ? value : "";
}

static int read_all(struct device * all) {
    int n = 0;
    for (const char * at = setting("FAKE_CUDA_DEVICES"); *at != '\0' && n < MOST_DEVICES;) {
        struct device * each = &all[n];
        if (sscanf(at, "%63[^:]:%d:%d:%zu:%d", each->name, &each->major, &each->minor, &each->n_bytes,
                   &each->is_integrated) != 5) {
            abort();
        }
        n++;
        at += strcspn(at, ";");
        at += *at == ';';
    }
    return n;
}

int cuDriverGetVersion(int * version) {
    *version = atoi(setting("FAKE_CUDA_VERSION"));
    return 0;
}

int cuInit(unsigned flags) {
    const int code = flags != 0 ? INVALID_VALUE : atoi(setting("FAKE_CUDA_INIT"));
    if (code != 0) {
        return code;
    }
    struct device all[MOST_DEVICES];
    const int n = read_all(all);
    const char * visible = getenv("CUDA_VISIBLE_DEVICES");
    n_devices = 0;
    if (visible == NULL) {
        memcpy(devices, all, sizeof(all));
        n_devices = n;
    } else {
        int ordinal;
        int length;
        while (n_devices < MOST_DEVICES && sscanf(visible, "%d%n", &ordinal, &length) == 1 && ordinal >= 0 && ordinal < n) {
            devices[n_devices++] = all[ordinal];
            visible += length;
            visible += *visible == ',';
        }
    }
    return n_devices > 0 ? 0 : NO_DEVICE;
}

int cuDeviceGetCount(int * count) {
    *count = n_devices;
    return n_devices < 0 ? NOT_INITIALIZED : 0;
}

int cuDeviceGet(int * device, int ordinal) {
    *device = ordinal;
    return ordinal < 0 || ordinal >= n_devices ? INVALID_DEVICE : 0;
}

int cuDeviceGetName(char * name, int n_bytes, int device) {
    snprintf(name, (size_t)n_bytes, "%s", devices[device].name);
    return 0;
}

int cuDeviceTotalMem_v2(size_t * n_bytes, int device) {
    *n_bytes = devices[device].n_bytes;
    return 0;
}

int cuDeviceGetAttribute(int * value, int attribute, int device) {
    switch (attribute) {
        case 18:
            *value = devices[device].is_integrated;
            return 0;
        case 75:
            *value = devices[device].major;
            return 0;
        case 76:
            *value = devices[device].minor;
            return 0;
        default:
            return INVALID_VALUE;
    }
}

int cuGetErrorName(int code, const char ** name) {
    switch (code) {
        case 34:
            *name = "CUDA_ERROR_STUB_LIBRARY";
            return 0;
        case NO_DEVICE:
            *name = "CUDA_ERROR_NO_DEVICE";
            return 0;
        case 803:
            *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
            return 0;
        case 999:
            *name = "CUDA_ERROR_UNKNOWN";
            return 0;
        default:
            *name = NULL;
            return INVALID_VALUE;
    }
}
