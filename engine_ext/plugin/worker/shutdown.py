"""Shuts an SGLang engine down, so that the end of its processes does not end this one."""

import signal

from sglang.srt.entrypoints.engine import Engine


def shut_down(engine: Engine) -> None:
    """Kill the engine's processes and wait for their end; call it in the main thread.

    SGLang kills them one after another. A rank that sees another one die reports a fault by SIGQUIT, on which SGLang
    kills this process too, in the midst of its own shutdown. Afterwards SIGQUIT does what it does by default: SGLang's
    handler was for an engine that is not there any more.
    """
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        engine.shutdown()
    finally:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
