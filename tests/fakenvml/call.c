/* Faults are read from the state at each call, so that a test gives and takes them while the library is in use. */

#define _GNU_SOURCE
#include "call.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

enum { MAX_FUNCTIONS = 128 };

struct nvmlDevice_st devices[MAX_GPUS];
static atomic_int initialisations;

int64_t now_us(int clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

void log_call(const char *function, int gpu)
{
    const char *path = getenv("FAKENVML_CALLS");
    int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644) : -1;
    if (file < 0)
        return;
    char number[16] = "-";
    if (gpu != NO_GPU)
        snprintf(number, sizeof number, "%d", gpu);
    dprintf(file, "%s %s %d %lld\n", function, number, (int)gettid(), (long long)now_us(CLOCK_MONOTONIC));
    close(file);
}

void hang(uint64_t duration_ms)
{
    if (duration_ms == 0)
        return;
    int64_t until_us = now_us(CLOCK_MONOTONIC) + (int64_t)duration_ms * 1000;
    struct timespec until = {.tv_sec = until_us / 1000000, .tv_nsec = until_us % 1000000 * 1000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0)
        continue;
}

/* Return the number a fault has for this function, else the one it has for every call; 0 where there is none. */
static uint64_t fault(const char *kind, int gpu, const char *function, bool every_call)
{
    uint64_t every = every_call ? state_number(0, "gpu.%d.%s.*", gpu, kind) : 0;
    return state_number(every, "gpu.%d.%s.%s", gpu, kind, function);
}

bool absent(int gpu)
{
    return state_number(0, "gpu.%d.absent", gpu) != 0;
}

nvmlReturn_t enter_init(const char *function)
{
    log_call(function, NO_GPU);
    hang(state_number(0, "init.hang_ms"));
    if (!state_readable())
        return DRIVER_NOT_LOADED;
    nvmlReturn_t code = (nvmlReturn_t)state_number(SUCCESS, "init.return");
    if (code == SUCCESS)
        atomic_fetch_add(&initialisations, 1);
    return code;
}

nvmlReturn_t enter_system(const char *function)
{
    log_call(function, NO_GPU);
    return atomic_load(&initialisations) > 0 ? SUCCESS : UNINITIALIZED;
}

nvmlReturn_t enter_shutdown(const char *function)
{
    nvmlReturn_t code = enter_system(function);
    if (code == SUCCESS)
        atomic_fetch_sub(&initialisations, 1);
    return code;
}

nvmlReturn_t enter(const char *function, nvmlDevice_t device, int *gpu)
{
    bool known = device >= devices && device < devices + MAX_GPUS;
    *gpu = known ? (int)(device - devices) : NO_GPU;
    log_call(function, *gpu);
    if (atomic_load(&initialisations) == 0)
        return UNINITIALIZED;
    if (!known)
        return INVALID_ARGUMENT;
    hang(fault("hang_ms", *gpu, function, true));
    if (fault("crash", *gpu, function, true))
        raise(SIGSEGV);
    if (absent(*gpu))
        return GPU_IS_LOST;
    return (nvmlReturn_t)fault("return", *gpu, function, true);
}

/* What every call with a handle suffers leaves look-ups alone, except that a GPU that always hangs hangs here, too. */
nvmlReturn_t enter_lookup(const char *function, int gpu, nvmlReturn_t not_found)
{
    log_call(function, gpu);
    if (atomic_load(&initialisations) == 0)
        return UNINITIALIZED;
    if (gpu == NO_GPU)
        return not_found;
    hang(fault("hang_ms", gpu, function, true));
    if (fault("crash", gpu, function, false))
        raise(SIGSEGV);
    return (nvmlReturn_t)fault("return", gpu, function, false);
}

bool garbage(const char *function, int gpu)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct {
        const char *function;
        uint64_t calls;
    } counters[MAX_GPUS][MAX_FUNCTIONS];
    uint64_t every = fault("garbage", gpu, function, true);
    uint64_t calls = 0;
    if (every == 0)
        return false;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_FUNCTIONS && calls == 0; i++) {
        if (!counters[gpu][i].function)
            counters[gpu][i].function = function;
        if (strcmp(counters[gpu][i].function, function) == 0)
            calls = ++counters[gpu][i].calls;
    }
    pthread_mutex_unlock(&lock);
    return calls % every == 0;
}
