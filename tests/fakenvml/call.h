/* What happens in every call before it answers: log, hang, crash, failure; and whether it answers garbage. */

#ifndef FAKENVML_CALL_H
#define FAKENVML_CALL_H

#include <stdbool.h>
#include <stdint.h>

#include "nvml.h"

#pragma GCC visibility push(hidden)

enum { MAX_GPUS = 64, NO_GPU = -1 };

/* Handles are addresses in here: gpu.N keeps its handle, whatever becomes of the others. */
extern struct nvmlDevice_st devices[MAX_GPUS];

/* Begin nvmlInit: it may hang, and fails as the state says; without a readable state file no driver is loaded. */
nvmlReturn_t enter_init(const char *function);

/* Begin a call that is about no GPU. */
nvmlReturn_t enter_system(const char *function);

/* Begin a call with a handle, and tell which gpu.N that is. */
nvmlReturn_t enter(const char *function, nvmlDevice_t device, int *gpu);

/* Begin a look-up that found this GPU, or NO_GPU: then it returns the code given for that. */
nvmlReturn_t enter_lookup(const char *function, int gpu, nvmlReturn_t not_found);

/* Undo one nvmlInit. */
nvmlReturn_t enter_shutdown(const char *function);

/* Tell whether this call is a K-th one that answers garbage; counted in this process from its first such call on. */
bool garbage(const char *function, int gpu);

/* Tell whether the driver does not enumerate this GPU. */
bool absent(int gpu);

/* Append a line to the call log. */
void log_call(const char *function, int gpu);

/* Sleep so long whatever signals come, as a call does that waits in the driver. */
void hang(uint64_t duration_ms);

int64_t now_us(int clock);

#pragma GCC visibility pop

#endif
