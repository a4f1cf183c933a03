"""What the GPUs of a worker say of themselves through NVML: memory, use, heat and memory errors."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

READ_S = 10.0
STALE_S = 60.0  # after which a state is no longer believed: the driver hangs
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
        self._read_at = time.monotonic()
        if self._gpus:
            threading.Thread(target=self._run, name="gpu-health", daemon=True).start()

    @property
    def latest(self) -> list[dict[str, Any]]:
        """Return the newest state of each GPU; empty before the first one, once it is stale, and without NVML."""
        return [asdict(each) for each in self._believed]

    @property
    def _believed(self) -> list[GpuState]:
        return self._latest if time.monotonic() - self._read_at < STALE_S else []

    def collect(self) -> Iterable[Metric]:
        for field, (name, text) in FIGURES.items():
            family = GaugeMetricFamily(f"batchweave_gpu_{name}", text, labels=LABELS)
            for state in self._believed:
                if (value := getattr(state, field)) is not None:
                    family.add_metric([state.gpu, state.product], float(value))
            yield family
        age = GaugeMetricFamily("batchweave_gpu_read_age_seconds", "Time since the driver last said how the GPUs are")
        if self._gpus:
            age.add_metric([], time.monotonic() - self._read_at)
        yield age

    def _run(self) -> None:
        """Read again and again. A driver that fails, or is started again, is opened again at the next turn."""
        pause, told = threading.Event(), ""
        while True:
            try:
                import pynvml

                pynvml.nvmlInit()
                try:
                    self._latest = [_read(pynvml, *each) for each in self._gpus]
                finally:
                    pynvml.nvmlShutdown()
                self._read_at, told = time.monotonic(), ""
            except Exception as error:  # no package or no driver, or one that does not fit it
                if repr(error) != told:
                    log.warning("NVML does not say how the GPUs are", error=repr(error))
                told = repr(error)
            pause.wait(READ_S)


def _read(nvml: Any, gpu: str, product: str) -> GpuState:
    gone = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED, nvml.NVML_ERROR_UNKNOWN)

    def of(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except nvml.NVMLError as error:
            if error.value in gone:
                raise
            return None  # such as a part of a GPU (MIG), which has no utilisation of its own

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
    except nvml.NVMLError:
        return GpuState(gpu, product, is_lost=True)
