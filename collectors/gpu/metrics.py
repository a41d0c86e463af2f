"""What the collector emits: every metric, its labels and its source in NVML (nvml.h) or the system."""

from __future__ import annotations

from agent.api import Kind, Metric

_GPU = ("gpu", "uuid")


def _gauge(name: str, text: str, source: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, text, (*_GPU, *labels), unit=_unit(name), source=source)


def _counter(name: str, text: str, source: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, text, (*_GPU, *labels), unit=_unit(name.removesuffix("_total")), source=source)


def _node(name: str, text: str, source: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, text, labels, unit=_unit(name), source=source)


def _unit(name: str) -> str:
    last = name.rpartition("_")[2]
    return last if last in {"ratio", "bytes", "celsius", "watts", "joules", "hertz", "seconds"} else ""


# The node

COUNT = _node(
    "gpu_count",
    "GPUs that a source shows, without those that the configuration excludes.",
    "nvmlDeviceGetCount; /proc/driver/nvidia/gpus; /dev/nvidia<N>; /sys/bus/pci/devices",
    "source",
)
EXPECTED_COUNT = _node(
    "gpu_expected_count",
    "GPUs that should be there, without those that the configuration excludes.",
    "configuration; VM size; GPUs seen since boot",
)
NVML_UP = _node("gpu_nvml_up", "1: the driver's library is initialised and answers.", "nvmlInitWithFlags")
NVML_RETURN_CODE = _node(
    "gpu_nvml_return_code", "Return code of NVML's last start, or of the call that ended the session.", "nvmlReturn_t"
)
DRIVER_INFO = _node(
    "gpu_driver_info",
    "Versions of the driver.",
    "nvmlSystemGet*Version; /proc/driver/nvidia/version",
    "driver_version",
    "cuda_version",
    "nvml_version",
    "kernel_module_version",
)

# Identity and availability

UP = _gauge(
    "gpu_up",
    "1: the GPU answers.",
    "nvmlDeviceGetUUID; nvmlDeviceGetTemperature, nvmlDeviceGetUtilizationRates or nvmlDeviceGetMemoryInfo",
)
ERROR = _gauge("gpu_error", "1: why the GPU does not answer.", "nvmlReturn_t", "reason")
INFO = _gauge(
    "gpu_info",
    "What the GPU is.",
    "nvmlDeviceGetName and its like",
    "name",
    "pci_bus_id",
    "serial",
    "minor",
    "vbios_version",
    "brand",
    "architecture",
    "compute_capability",
)
PERSISTENCE_MODE = _gauge(
    "gpu_persistence_mode_enabled",
    "1: the driver keeps the GPU initialised while nobody uses it.",
    "nvmlDeviceGetPersistenceMode",
)
PERFORMANCE_STATE = _gauge(
    "gpu_performance_state", "Performance state, 0 is the highest.", "nvmlDeviceGetPerformanceState"
)
RECOVERY_ACTION = _gauge(
    "gpu_recovery_action",
    "1: what the driver says the GPU needs.",
    "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION (230)",
    "action",
)
INVALID_SAMPLES = _counter(
    "gpu_invalid_samples_total",
    "Answers that cannot be true and were dropped, by the metric they were for.",
    "this agent",
    "metric",
)

# Utilisation and memory

UTILIZATION = _gauge(
    "gpu_utilization_ratio",
    "Share of the driver's last sample period in which any kernel ran.",
    "nvmlDeviceGetUtilizationRates gpu",
)
MEMORY_UTILIZATION = _gauge(
    "gpu_memory_utilization_ratio",
    "Share of the driver's last sample period in which memory was read or written; not how full it is.",
    "nvmlDeviceGetUtilizationRates memory",
)
_MEMORY_INFO = "nvmlDeviceGetMemoryInfo_v2, else nvmlDeviceGetMemoryInfo"
MEMORY_TOTAL = _gauge("gpu_memory_total_bytes", "Memory of the GPU.", _MEMORY_INFO)
MEMORY_USED = _gauge(
    "gpu_memory_used_bytes", "Memory allocated; with what is reserved where that is not told apart.", _MEMORY_INFO
)
MEMORY_FREE = _gauge("gpu_memory_free_bytes", "Memory not allocated.", _MEMORY_INFO)
MEMORY_RESERVED = _gauge(
    "gpu_memory_reserved_bytes", "Memory that driver and firmware keep for themselves.", "nvmlDeviceGetMemoryInfo_v2"
)

# Temperature, power, clocks

TEMPERATURE = _gauge(
    "gpu_temperature_celsius",
    "Temperature.",
    "nvmlDeviceGetTemperature; NVML_FI_DEV_MEMORY_TEMP (82)",
    "sensor",
)
POWER = _gauge(
    "gpu_power_watts",
    "Power drawn now.",
    "NVML_FI_DEV_POWER_INSTANT (186), else nvmlDeviceGetPowerUsage",
    "scope",
)
POWER_AVERAGE = _gauge(
    "gpu_power_average_watts", "Power drawn, the driver's own average.", "NVML_FI_DEV_POWER_AVERAGE (185)"
)
POWER_LIMIT = _gauge(
    "gpu_power_limit_watts",
    "Power limits.",
    "nvmlDeviceGetEnforcedPowerLimit, nvmlDeviceGetPowerManagementLimit and its like",
    "kind",
)
ENERGY = _counter(
    "gpu_energy_joules_total",
    "Energy used since the driver was loaded.",
    "NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION (83), else nvmlDeviceGetTotalEnergyConsumption",
)
CLOCK = _gauge("gpu_clock_hertz", "Clock rate.", "nvmlDeviceGetClockInfo", "domain")
CLOCK_MAX = _gauge("gpu_clock_max_hertz", "Highest clock rate.", "nvmlDeviceGetMaxClockInfo", "domain")
CLOCK_EVENT = _gauge(
    "gpu_clock_event_active",
    "1: a reason why the clocks are not at their highest.",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "reason",
)
THROTTLE = _counter(
    "gpu_throttle_seconds_total",
    "Time during which a policy held the clocks down.",
    "NVML_FI_DEV_PERF_POLICY_* (74 to 79)",
    "policy",
)

# Memory health

ECC_MODE = _gauge("gpu_ecc_mode_enabled", "1: ECC is on, now or after the next reset.", "nvmlDeviceGetEccMode", "state")
ECC_ERRORS = _counter(
    "gpu_ecc_errors_all_total",
    "ECC errors of all locations; volatile since the driver was loaded, aggregate over the GPU's life.",
    "NVML_FI_DEV_ECC_*_TOTAL (3 to 6), else nvmlDeviceGetTotalEccErrors",
    "type",
    "lifetime",
)
_REMAPPED = "NVML_FI_DEV_REMAPPED_* (142 to 145), else nvmlDeviceGetRemappedRows"
REMAPPED_ROWS = _counter("gpu_remapped_rows_total", "Memory rows replaced by spare ones.", _REMAPPED, "cause")
REMAP_PENDING = _gauge("gpu_row_remap_pending", "1: rows will be replaced at the next reset.", _REMAPPED)
REMAP_FAILURE = _gauge("gpu_row_remap_failure", "1: a row could not be replaced; the GPU has to be.", _REMAPPED)

# PCIe and NVLink

PCIE_GENERATION = _gauge(
    "gpu_pcie_link_generation", "PCIe generation in use; lower while idle.", "nvmlDeviceGetCurrPcieLinkGeneration"
)
PCIE_WIDTH = _gauge("gpu_pcie_link_width", "PCIe lanes in use.", "nvmlDeviceGetCurrPcieLinkWidth")
PCIE_MAX_GENERATION = _gauge(
    "gpu_pcie_link_max_generation",
    "Highest PCIe generation of GPU and slot together.",
    "nvmlDeviceGetMaxPcieLinkGeneration",
)
PCIE_MAX_WIDTH = _gauge(
    "gpu_pcie_link_max_width", "Most PCIe lanes of GPU and slot together.", "nvmlDeviceGetMaxPcieLinkWidth"
)
PCIE_REPLAYS = _counter(
    "gpu_pcie_replays_total",
    "PCIe packets sent again.",
    "NVML_FI_DEV_PCIE_REPLAY_COUNTER (94), else nvmlDeviceGetPcieReplayCounter",
)
NVLINK_LINKS = _gauge(
    "gpu_nvlink_links",
    "NVLinks that the GPU has.",
    "NVML_FI_DEV_NVLINK_LINK_COUNT (91), else nvmlDeviceGetNvLinkState",
)
NVLINK_ACTIVE = _gauge("gpu_nvlink_active_links", "NVLinks that are active.", "nvmlDeviceGetNvLinkState")
NVLINK_BYTES = _counter(
    "gpu_nvlink_bytes_total",
    "Bytes over all NVLinks; raw includes the protocol's own.",
    "NVML_FI_DEV_NVLINK_THROUGHPUT_* (138 to 141)",
    "direction",
    "kind",
)

METRICS: tuple[Metric, ...] = tuple(value for value in list(vars().values()) if isinstance(value, Metric))
