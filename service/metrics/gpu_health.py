"""What the GPUs of a worker say of themselves through NVML: memory, use, heat and memory errors."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

READ_S = 10.0
LABELS = ("gpu", "product")
# Maps each field of GpuState to the metric's name and HELP text.
FIGURES = {
    "memory_used_bytes": ("memory_used_bytes", "Memory in use on the GPU, by all processes"),
    "memory_bytes": ("memory_bytes", "Memory of the GPU"),
    "busy": ("busy_ratio", "Share of the last second or less in which a kernel ran"),
    "celsius": ("temperature_celsius", "Temperature of the GPU"),
    "uncorrected_errors": (
        "uncorrected_memory_errors",
        "Memory errors since the driver started that ECC did not correct",
    ),
    "is_lost": ("lost", "1 if the driver no longer reaches the GPU, otherwise 0"),
}
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU as its driver sees it; what it does not say is None. `gpu`: its number or UUID."""

    gpu: str
    product: str
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    busy: float | None = None  # 0 to 1
    celsius: int | None = None
    uncorrected_errors: int | None = None
    is_lost: bool = False


class GpuHealth(Collector):
    """Reads the GPUs every ten seconds in a thread of its own: a driver in trouble may not answer for minutes."""

    def __init__(self, gpus: Sequence[tuple[str, str]]) -> None:
        """`gpus`: number or UUID, and product, of each."""
        self._gpus = list(gpus)
        self._latest: list[GpuState] = []
        if self._gpus:
            threading.Thread(target=self._run, name="gpu-health", daemon=True).start()

    @property
    def latest(self) -> list[dict[str, Any]]:
        """Return the newest state of each GPU; empty before the first one, and where NVML is missing."""
        return [asdict(each) for each in self._latest]

    def collect(self) -> Iterable[Metric]:
        for field, (name, text) in FIGURES.items():
            family = GaugeMetricFamily(f"batchweave_gpu_{name}", text, labels=LABELS)
            for state in self._latest:
                if (value := getattr(state, field)) is not None:
                    family.add_metric([state.gpu, state.product], float(value))
            yield family

    def _run(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # no package or no driver, or one that does not fit it
            log.warning("NVML does not say how the GPUs are", error=repr(error))
            return
        pause = threading.Event()
        while True:
            self._latest = [_read(pynvml, *each) for each in self._gpus]
            pause.wait(READ_S)


def _read(nvml: Any, gpu: str, product: str) -> GpuState:
    lost = nvml.NVMLError_GpuIsLost

    def of(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except lost:
            raise
        except nvml.NVMLError:  # such as a part of a GPU (MIG), which has no utilisation of its own
            return None

    try:
        handle = of(
            lambda: nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdigit() else nvml.nvmlDeviceGetHandleByUUID(gpu)
        )
        if handle is None:
            return GpuState(gpu, product)
        memory = of(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        use = of(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return GpuState(
            *(gpu, product),
            *((None, None) if memory is None else (int(memory.used), int(memory.total))),
            None if use is None else use.gpu / 100,
            of(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            of(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since)),
        )
    except lost:
        return GpuState(gpu, product, is_lost=True)
