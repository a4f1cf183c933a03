import os
import subprocess
import sys
from pathlib import Path

OVERFLOWS = """
import ctypes, faulthandler, threading
from tests import crashes
crashes.install()

faulthandler.enable()
again = ctypes.CFUNCTYPE(None)(lambda: again())
def deep():
    import sys
    sys.setrecursionlimit(10**9)
    again()
threading.stack_size(256 * 1024)
thread = threading.Thread(target=deep)
thread.start()
thread.join()
"""


def test_a_stack_that_overflows_in_a_thread_says_where() -> None:
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", OVERFLOWS], env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert found.returncode == -11
    assert "Fatal Python error: Segmentation fault" in found.stderr
    assert "in deep" in found.stderr or "in <lambda>" in found.stderr
