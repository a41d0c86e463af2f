/* A stand-in for the driver's libnvidia-ml.so.1 that answers from a state file (state.h) and fails as it says.
 *
 * FAKENVML_STATE names the state file, FAKENVML_CALLS a file that gets one line per call, when it begins:
 * `function gpu thread-id microseconds`: gpu is the N of gpu.N, `-` where a call is about none; microseconds are those
 * of CLOCK_MONOTONIC. A library built with VERSION defined is of that driver version, whatever the state says.
 * One file, although long: a table of the functions that the collectors and the tests call.
 */

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "call.h"
#include "state.h"

enum { MAX_NVLINKS = 36, PCIE_THROUGHPUT_MS = 20 };

/* ---- Sizes, for the test that compares them with the binding's ---- */

/* Return the size of a struct by the name it has in the binding; 0 for another name. */
size_t fakenvml_size(const char *name)
{
    static const struct {
        const char *name;
        size_t size;
    } sizes[] = {
        {"c_nvmlUtilization_t", sizeof(nvmlUtilization_t)},
        {"c_nvmlMemory_t", sizeof(nvmlMemory_t)},
        {"c_nvmlMemory_v2_t", sizeof(nvmlMemory_v2_t)},
        {"c_nvmlTemperature_v1_t", sizeof(nvmlTemperature_v1_t)},
        {"nvmlPciInfo_t", sizeof(nvmlPciInfo_t)},
        {"c_nvmlFieldValue_t", sizeof(nvmlFieldValue_t)},
        {"c_nvmlDevice_t", sizeof(nvmlDevice_t)},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (strcmp(sizes[i].name, name) == 0)
            return sizes[i].size;
    return 0;
}

/* ---- Numbers and texts ---- */

/* Where one number of an answer goes, and which word of which key it is. */
struct output {
    void *target;
    size_t size;
    const char *key;
    int word;
};

#define OUT(pointer, key, word) {(pointer), sizeof *(pointer), (key), (word)}

static void store(const struct output *output, uint64_t number)
{
    if (output->size == sizeof(uint64_t))
        *(uint64_t *)output->target = number;
    else
        *(uint32_t *)output->target = (uint32_t)number;
}

static nvmlReturn_t system_number(const char *function, const struct output *output)
{
    nvmlReturn_t code = enter_system(function);
    char value[VALUE_SIZE];
    uint64_t number;
    if (code != SUCCESS)
        return code;
    if (!state_text(value, "%s", output->key))
        return NOT_SUPPORTED;
    if (!word_number(value, output->word, &number))
        return UNKNOWN;
    store(output, number);
    return SUCCESS;
}

static nvmlReturn_t numbers_of(int gpu, const struct output *outputs, size_t count, bool ones)
{
    for (size_t i = 0; i < count; i++) {
        char value[VALUE_SIZE];
        uint64_t number = UINT64_MAX;
        if (!ones && !state_text(value, "gpu.%d.%s", gpu, outputs[i].key))
            return NOT_SUPPORTED;
        if (!ones && !word_number(value, outputs[i].word, &number))
            return UNKNOWN;
        store(&outputs[i], number);
    }
    return SUCCESS;
}

/* Answer the outputs, unless the arguments are bad: then the code that says so, and a key may be missing. */
static nvmlReturn_t numbers(const char *function, nvmlDevice_t device, nvmlReturn_t arguments,
                            const struct output *outputs, size_t count)
{
    int gpu;
    nvmlReturn_t code = enter(function, device, &gpu);
    if (code == SUCCESS)
        code = arguments;
    return code != SUCCESS ? code : numbers_of(gpu, outputs, count, garbage(function, gpu));
}

#define ANSWER(function, device, arguments, ...)                               \
    numbers(function, device, arguments, (const struct output[]){__VA_ARGS__}, \
            sizeof((const struct output[]){__VA_ARGS__}) / sizeof(struct output))

static nvmlReturn_t give_text(const char *value, char *buffer, unsigned length)
{
    if (strlen(value) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(buffer, value);
    return SUCCESS;
}

static nvmlReturn_t system_text(const char *function, const char *key, char *buffer, unsigned length)
{
    nvmlReturn_t code = enter_system(function);
    char value[VALUE_SIZE];
    if (code != SUCCESS)
        return code;
    return state_text(value, "%s", key) ? give_text(value, buffer, length) : NOT_SUPPORTED;
}

static nvmlReturn_t text(const char *function, nvmlDevice_t device, const char *key, char *buffer, unsigned length)
{
    int gpu;
    nvmlReturn_t code = enter(function, device, &gpu);
    char value[VALUE_SIZE];
    if (code != SUCCESS)
        return code;
    if (garbage(function, gpu)) {
        memset(buffer, 0xff, length);
        return SUCCESS;
    }
    return state_text(value, "gpu.%d.%s", gpu, key) ? give_text(value, buffer, length) : NOT_SUPPORTED;
}

/* ---- The library and the driver ---- */

nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return enter_init("nvmlInitWithFlags");
}

nvmlReturn_t nvmlInit_v2(void)
{
    return enter_init("nvmlInit_v2");
}

nvmlReturn_t nvmlShutdown(void)
{
    return enter_shutdown("nvmlShutdown");
}

const char *nvmlErrorString(nvmlReturn_t code)
{
    static const char *const names[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
        "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires reset", "Blocked by Operating System",
        "Driver/library version mismatch", "In use", "Insufficient Memory", "No data", "vGPU ECC Not Supported",
        "Insufficient Resources", "Frequency Not Supported", "Argument Version Mismatch", "Deprecated", "Not Ready",
        "GPU Not Found", "Invalid State", "Reset Type Not Supported",
    };
    log_call("nvmlErrorString", NO_GPU);
    return (unsigned)code < sizeof names / sizeof *names ? names[code] : "Unknown Error";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length)
{
#ifdef VERSION
    nvmlReturn_t code = enter_system("nvmlSystemGetDriverVersion");
    return code != SUCCESS ? code : give_text(VERSION, version, length);
#else
    return system_text("nvmlSystemGetDriverVersion", "driver.version", version, length);
#endif
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
    return system_text("nvmlSystemGetNVMLVersion", "driver.nvml_version", version, length);
}

#define SYSTEM_NUMBER(function, type, key)                                         \
    nvmlReturn_t function(type *value)                                             \
    {                                                                              \
        return system_number(#function, &(const struct output)OUT(value, key, 0)); \
    }

SYSTEM_NUMBER(nvmlSystemGetCudaDriverVersion, int, "driver.cuda_version")
SYSTEM_NUMBER(nvmlSystemGetCudaDriverVersion_v2, int, "driver.cuda_version")

/* ---- Which GPUs there are ---- */

static int gpu_blocks(void)
{
    uint64_t blocks = state_number(0, "gpu.count");
    return blocks < MAX_GPUS ? (int)blocks : MAX_GPUS;
}

/* Return how many GPUs before this one are enumerated: its NVML index. */
static unsigned index_of(int gpu)
{
    unsigned index = 0;
    for (int other = 0; other < gpu; other++)
        index += !absent(other);
    return index;
}

static int with_index(unsigned index)
{
    for (int gpu = 0; gpu < gpu_blocks(); gpu++)
        if (!absent(gpu) && index_of(gpu) == index)
            return gpu;
    return NO_GPU;
}

static int with_uuid(const char *uuid)
{
    char value[VALUE_SIZE];
    for (int gpu = 0; gpu < gpu_blocks(); gpu++)
        if (!absent(gpu) && state_text(value, "gpu.%d.uuid", gpu) && strcmp(value, uuid) == 0)
            return gpu;
    return NO_GPU;
}

struct address {
    unsigned domain, bus, device;
};

static bool parse_address(const char *bus_id, struct address *address)
{
    return sscanf(bus_id, "%x:%x:%x", &address->domain, &address->bus, &address->device) == 3;
}

static int with_address(const char *bus_id)
{
    char value[VALUE_SIZE];
    struct address wanted, found;
    if (!parse_address(bus_id, &wanted))
        return NO_GPU;
    for (int gpu = 0; gpu < gpu_blocks(); gpu++)
        if (!absent(gpu) && state_text(value, "gpu.%d.pci", gpu) && parse_address(value, &found) &&
            found.domain == wanted.domain && found.bus == wanted.bus && found.device == wanted.device)
            return gpu;
    return NO_GPU;
}

static nvmlReturn_t look_up(const char *function, int gpu, nvmlReturn_t not_found, nvmlDevice_t *device)
{
    nvmlReturn_t code = enter_lookup(function, gpu, not_found);
    if (code == SUCCESS)
        *device = &devices[gpu];
    return code;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    nvmlReturn_t code = enter_system("nvmlDeviceGetCount_v2");
    char value[VALUE_SIZE];
    if (code != SUCCESS)
        return code;
    if (!state_text(value, "gpu.count"))
        return NOT_SUPPORTED;
    *count = index_of(gpu_blocks());
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    return look_up("nvmlDeviceGetHandleByIndex_v2", with_index(index), INVALID_ARGUMENT, device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    return look_up("nvmlDeviceGetHandleByUUID", with_uuid(uuid), NOT_FOUND, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    return look_up("nvmlDeviceGetHandleByPciBusId_v2", with_address(bus_id), NOT_FOUND, device);
}

/* ---- The GPU's facts: most are words of one key ---- */

#define TEXT(function, key)                                                   \
    nvmlReturn_t function(nvmlDevice_t device, char *buffer, unsigned length) \
    {                                                                         \
        return text(#function, device, key, buffer, length);                  \
    }

#define NUMBER(function, type, key, word)                                 \
    nvmlReturn_t function(nvmlDevice_t device, type *value)               \
    {                                                                     \
        return ANSWER(#function, device, SUCCESS, OUT(value, key, word)); \
    }

/* The second number is the second word of the same key, or the first word of another. */
#define PAIR(function, type, first_key, second_key)                                      \
    nvmlReturn_t function(nvmlDevice_t device, type *first, type *second)                \
    {                                                                                    \
        int word = strcmp(first_key, second_key) == 0;                                   \
        return ANSWER(#function, device, SUCCESS, OUT(first, first_key, 0),              \
                      OUT(second, second_key, word));                                    \
    }

TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetSerial, "serial")
TEXT(nvmlDeviceGetVbiosVersion, "vbios")
TEXT(nvmlDeviceGetInforomImageVersion, "inforom")
TEXT(nvmlDeviceGetBoardPartNumber, "part_number")

NUMBER(nvmlDeviceGetBrand, unsigned, "brand", 0)
NUMBER(nvmlDeviceGetArchitecture, unsigned, "architecture", 0)
NUMBER(nvmlDeviceGetMinorNumber, unsigned, "minor", 0)
NUMBER(nvmlDeviceGetNumaNodeId, unsigned, "numa_node", 0)
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, "persistence_mode", 0)
NUMBER(nvmlDeviceGetComputeMode, unsigned, "compute_mode", 0)
NUMBER(nvmlDeviceGetPerformanceState, unsigned, "performance_state", 0)
NUMBER(nvmlDeviceGetVirtualizationMode, unsigned, "virtualization_mode", 0)
NUMBER(nvmlDeviceGetPowerUsage, unsigned, "power_mw", 0)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "power_limit_mw.enforced", 0)
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, "power_limit_mw.requested", 0)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, "power_limit_mw.default", 0)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, uint64_t, "energy_mj", 0)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, uint64_t, "event_reasons", 0)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, uint64_t, "event_reasons", 0)
NUMBER(nvmlDeviceGetSupportedClocksEventReasons, uint64_t, "event_reasons_supported", 0)
NUMBER(nvmlDeviceGetSupportedClocksThrottleReasons, uint64_t, "event_reasons_supported", 0)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, "pcie", 0)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "pcie", 1)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, "pcie", 2)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "pcie", 3)
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, "pcie_replays", 0)

PAIR(nvmlDeviceGetCudaComputeCapability, int, "cuda_capability", "cuda_capability")
PAIR(nvmlDeviceGetMigMode, unsigned, "mig_mode", "mig_mode")
PAIR(nvmlDeviceGetEccMode, unsigned, "ecc_mode", "ecc_mode")
PAIR(nvmlDeviceGetPowerManagementLimitConstraints, unsigned, "power_limit_mw.min", "power_limit_mw.max")

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    return ANSWER("nvmlDeviceGetUtilizationRates", device, SUCCESS, OUT(&rates->gpu, "utilization", 0),
                  OUT(&rates->memory, "utilization", 1));
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *correctable, unsigned *uncorrectable,
                                       unsigned *pending, unsigned *failure)
{
    return ANSWER("nvmlDeviceGetRemappedRows", device, SUCCESS, OUT(correctable, "remapped_rows", 0),
                  OUT(uncorrectable, "remapped_rows", 1), OUT(pending, "remapped_rows", 2),
                  OUT(failure, "remapped_rows", 3));
}

/* The first version of the struct counts what the driver reserves as used. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    uint64_t reserved = 0;
    nvmlReturn_t code = ANSWER("nvmlDeviceGetMemoryInfo", device, SUCCESS, OUT(&memory->total, "memory", 0),
                               OUT(&reserved, "memory", 1), OUT(&memory->free, "memory", 2),
                               OUT(&memory->used, "memory", 3));
    if (code == SUCCESS && memory->used != UINT64_MAX)
        memory->used += reserved;
    return code;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    bool right = memory->version == STRUCT_VERSION(nvmlMemory_v2_t, 2);
    return ANSWER("nvmlDeviceGetMemoryInfo_v2", device, right ? SUCCESS : ARGUMENT_VERSION_MISMATCH,
                  OUT(&memory->total, "memory", 0), OUT(&memory->reserved, "memory", 1),
                  OUT(&memory->free, "memory", 2), OUT(&memory->used, "memory", 3));
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *temperature)
{
    return ANSWER("nvmlDeviceGetTemperature", device, sensor == 0 ? SUCCESS : INVALID_ARGUMENT,
                  OUT(temperature, "temperature", 0));
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *reading)
{
    bool right = reading->version == STRUCT_VERSION(nvmlTemperature_v1_t, 1);
    nvmlReturn_t sensor = reading->sensor == 0 ? SUCCESS : INVALID_ARGUMENT;
    return ANSWER("nvmlDeviceGetTemperatureV", device, right ? sensor : ARGUMENT_VERSION_MISMATCH,
                  OUT(&reading->temperature, "temperature", 0));
}

/* ---- Those whose key depends on an argument ---- */

#define CLOCK(function, stem)                                                                         \
    nvmlReturn_t function(nvmlDevice_t device, unsigned domain, unsigned *clock_mhz)                  \
    {                                                                                                 \
        static const char *const keys[] = {stem ".graphics", stem ".sm", stem ".mem", stem ".video"}; \
        bool known = domain < sizeof keys / sizeof *keys;                                             \
        return ANSWER(#function, device, known ? SUCCESS : INVALID_ARGUMENT,                          \
                      OUT(clock_mhz, known ? keys[domain] : NULL, 0));                                \
    }

CLOCK(nvmlDeviceGetClockInfo, "clock_mhz")
CLOCK(nvmlDeviceGetMaxClockInfo, "clock_max_mhz")

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type, unsigned lifetime, uint64_t *count)
{
    static const char *const keys[2][2] = {
        {"ecc_total.corrected.volatile", "ecc_total.corrected.aggregate"},
        {"ecc_total.uncorrected.volatile", "ecc_total.uncorrected.aggregate"},
    };
    bool known = type < 2 && lifetime < 2;
    return ANSWER("nvmlDeviceGetTotalEccErrors", device, known ? SUCCESS : INVALID_ARGUMENT,
                  OUT(count, known ? keys[type][lifetime] : NULL, 0));
}

static bool has_link(int gpu, unsigned link)
{
    char value[VALUE_SIZE];
    return state_text(value, "gpu.%d.nvlink.%u.state", gpu, link);
}

/* Say of a link that is not there whether the GPU has others. */
static nvmlReturn_t check_link(int gpu, unsigned link)
{
    if (has_link(gpu, link))
        return SUCCESS;
    for (unsigned other = 0; other < MAX_NVLINKS; other++)
        if (has_link(gpu, other))
            return INVALID_ARGUMENT;
    return NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *active)
{
    char key[KEY_SIZE];
    snprintf(key, sizeof key, "nvlink.%u.state", link);
    return ANSWER("nvmlDeviceGetNvLinkState", device, check_link((int)(device - devices), link), OUT(active, key, 0));
}

/* Answers only when the driver has counted for 20 ms. Words: sent, received; KiB/s. */
nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned direction, unsigned *rate)
{
    nvmlReturn_t code = ANSWER("nvmlDeviceGetPcieThroughput", device, direction < 2 ? SUCCESS : INVALID_ARGUMENT,
                               OUT(rate, "pcie_throughput_kib", (int)direction));
    hang(PCIE_THROUGHPUT_MS);
    return code;
}

/* ---- Those that are no words of a key ---- */

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    int gpu;
    nvmlReturn_t code = enter("nvmlDeviceGetIndex", device, &gpu);
    if (code == SUCCESS)
        *index = garbage("nvmlDeviceGetIndex", gpu) ? UINT32_MAX : index_of(gpu);
    return code;
}

static nvmlReturn_t give_pci(int gpu, nvmlPciInfo_t *info)
{
    char value[VALUE_SIZE];
    struct address at;
    if (!state_text(value, "gpu.%d.pci", gpu))
        return NOT_SUPPORTED;
    if (!parse_address(value, &at))
        return UNKNOWN;
    info->domain = at.domain;
    info->bus = at.bus;
    info->device = at.device;
    info->device_id = (unsigned)state_number(0, "gpu.%d.pci_device_id", gpu);
    info->subsystem_id = (unsigned)state_number(0, "gpu.%d.pci_subsystem_id", gpu);
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", at.domain, at.bus, at.device);
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:%02X.0", at.domain & 0xffff, at.bus & 0xff,
             at.device & 0xff);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info)
{
    int gpu;
    nvmlReturn_t code = enter("nvmlDeviceGetPciInfo_v3", device, &gpu);
    if (code != SUCCESS)
        return code;
    if (!garbage("nvmlDeviceGetPciInfo_v3", gpu))
        return give_pci(gpu, info);
    memset(info, 0xff, sizeof *info);
    return SUCCESS;
}

/* ---- Field values ---- */

static nvmlValueType_t type_named(const char *name)
{
    static const char *const names[] = {"d", "ui", "ul", "ull", "sll", "si", "us"};
    unsigned type = 0;
    while (type < VALUE_TYPES && strcmp(names[type], name) != 0)
        type++;
    return type;
}

/* Store a value of this type; false where there is no such type or it is no such value. */
static bool store_field(nvmlFieldValue_t *field, nvmlValueType_t type, const char *value)
{
    uint64_t number = 0;
    if (type != DOUBLE && !word_number(value, 0, &number))
        return false;
    switch (type) {
    case DOUBLE: field->value.d = strtod(value, NULL); break;
    case UINT: field->value.ui = (unsigned)number; break;
    case ULONG: field->value.ul = (unsigned long)number; break;
    case ULONG_LONG: field->value.ull = number; break;
    case LONG_LONG: field->value.sll = (int64_t)number; break;
    case INT: field->value.si = (int)number; break;
    case USHORT: field->value.us = (unsigned short)number; break;
    case VALUE_TYPES: return false;
    }
    field->type = type;
    return true;
}

/* Fill in what the text `TYPE:VALUE` or `ret:CODE` says. */
static void give_field(nvmlFieldValue_t *field, char *text)
{
    char *value = strchr(text, ':');
    uint64_t code;
    field->code = UNKNOWN;
    if (!value)
        return;
    *value++ = '\0';
    if (strcmp(text, "ret") == 0) {
        if (word_number(value, 0, &code))
            field->code = (nvmlReturn_t)code;
        return;
    }
    if (store_field(field, type_named(text), value))
        field->code = SUCCESS;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *fields)
{
    int gpu;
    nvmlReturn_t code = enter("nvmlDeviceGetFieldValues", device, &gpu);
    if (code != SUCCESS)
        return code;
    if (count <= 0 || !fields)
        return INVALID_ARGUMENT;
    bool ones = garbage("nvmlDeviceGetFieldValues", gpu);
    for (nvmlFieldValue_t *field = fields; field < fields + count; field++) {
        char value[VALUE_SIZE];
        bool found = field->scope == 0
                         ? state_text(value, "gpu.%d.field.%u", gpu, field->field)
                         : state_text(value, "gpu.%d.field.%u.%u", gpu, field->field, field->scope);
        memset(&field->value, ones ? 0xff : 0, sizeof field->value);
        field->timestamp_us = now_us(CLOCK_REALTIME);
        field->latency_us = 0;
        field->code = ones ? SUCCESS : NOT_SUPPORTED;
        if (ones)
            field->type = ULONG_LONG;
        else if (found)
            give_field(field, value);
    }
    return SUCCESS;
}
