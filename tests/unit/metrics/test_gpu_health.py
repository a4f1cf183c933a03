"""What GPUs say of themselves, by NVIDIA's own binding and a library that stands in for the driver's.

No GPU is there to make these faults: one that is lost, one with memory errors, one that does not know its use.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from service.metrics.gpu_health import GpuHealth

# Of the functions that are called; handles are numbers from 1. Codes are nvml.h's.
LIBRARY = """
#include <string.h>
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define LOST 15
#define UNKNOWN 999
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, long *h) { *h = i + 1; return i < 3 ? 0 : i == 3 ? UNKNOWN : NOT_FOUND; }
int nvmlDeviceGetHandleByUUID(const char *u, long *h) { *h = 1; return strcmp(u, "GPU-a") ? NOT_FOUND : 0; }
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(long h, struct memory *m) {
    if (h == 3) return LOST;
    m->total = 80000000000ull; m->used = 60000000000ull; return 0;
}
struct use { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(long h, struct use *u) { if (h == 2) return NOT_SUPPORTED; u->gpu = 93; return 0; }
int nvmlDeviceGetTemperature(long h, int kind, unsigned *t) { *t = 71; return 0; }
int nvmlDeviceGetTotalEccErrors(long h, int kind, int since, unsigned long long *n) {
    *n = h == 2 && kind == 1 && since == 0 ? 5 : 0; return 0;
}
"""
READ = """
import json, sys, time
from service.metrics.gpu_health import GpuHealth
health = GpuHealth([(name, "NVIDIA H100") for name in json.loads(sys.argv[1])])
for _ in range(600):
    if health.latest:
        break
    time.sleep(0.1)
print(json.dumps([health.latest, {each.name: [s.value for s in each.samples] for each in health.collect()}]))
"""


def read(folder: Path, *gpus: str) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    source, library = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(LIBRARY)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    command = [sys.executable, "-c", READ, json.dumps(gpus)]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the stand-in for NVML needs gcc")
def test_each_gpu_says_what_it_knows(tmp_path: Path) -> None:
    states, served = read(tmp_path, "0", "1", "2", "GPU-a", "7", "3")
    fields = ("busy", "celsius", "uncorrected_errors", "is_lost", "memory_used_bytes")
    assert [[state[field] for field in fields] for state in states] == [
        [0.93, 71, 0, False, 60_000_000_000],
        [None, 71, 5, False, 60_000_000_000],
        [None, None, None, True, None],
        [0.93, 71, 0, False, 60_000_000_000],
        [None, None, None, False, None],
        [None, None, None, True, None],
    ]
    assert served["batchweave_gpu_busy_ratio"] == [0.93, 0.93]
    assert served["batchweave_gpu_uncorrected_memory_errors"] == [0, 5, 0]
    assert served["batchweave_gpu_lost"] == [0, 0, 1, 0, 0, 1]


def test_without_gpus_nothing_is_read() -> None:
    health = GpuHealth([])
    assert health.latest == []
    assert all(not each.samples for each in health.collect())
