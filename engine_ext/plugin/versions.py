"""Says with which versions of SGLang the hooks were tested; the hooks wrap functions that other versions may lack."""

import importlib.metadata

from engine_ext.errors import EngineStartError

TESTED = ("0.5.17",)


def check(allowed: str | None = None) -> None:
    """Check that the installed SGLang is one of those, or the `allowed` one. Raises EngineStartError."""
    found = importlib.metadata.version("sglang")
    if found in TESTED or found == allowed:
        return
    tested = TESTED[-1]
    raise EngineStartError(
        f"SGLang {found} is installed, but batchweave was tested with {', '.join(TESTED)} only. "
        f"Run: pip install 'sglang=={tested}'. To try {found} at your own risk, set BATCHWEAVE_SGLANG={found}."
    )
