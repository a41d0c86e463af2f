/* The types of the driver's library that the stand-in speaks: nvml.h, as the binding nvidia-ml-py declares it. */

#ifndef FAKENVML_NVML_H
#define FAKENVML_NVML_H

#include <stdint.h>

typedef enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999,
} nvmlReturn_t;

typedef struct nvmlDevice_st {
    char unused;
} *nvmlDevice_t;

typedef struct {
    unsigned gpu, memory;
} nvmlUtilization_t;

typedef struct {
    uint64_t total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    uint64_t total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned version, sensor;
    int temperature;
} nvmlTemperature_v1_t;

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} nvmlPciInfo_t;

typedef enum { DOUBLE, UINT, ULONG, ULONG_LONG, LONG_LONG, INT, USHORT, VALUE_TYPES } nvmlValueType_t;

typedef struct {
    uint32_t field, scope;
    int64_t timestamp_us, latency_us;
    nvmlValueType_t type;
    nvmlReturn_t code;
    union {
        double d;
        unsigned ui;
        unsigned long ul;
        uint64_t ull;
        int64_t sll;
        int si;
        unsigned short us;
    } value;
} nvmlFieldValue_t;

#define STRUCT_VERSION(type, number) ((unsigned)(sizeof(type) | (number) << 24))

#endif
