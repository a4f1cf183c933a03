"""Finds other packages that have files in ours, whose names are plain words: `service`, `engine_ext`, `migrations`."""

from importlib.metadata import packages_distributions

OURS = ("service", "engine_ext", "migrations")
NAME = "batchweave-server"


def strangers() -> str | None:
    """Return which package has files in one of ours, and what to do; None if none has."""
    owners = packages_distributions()
    for package in OURS:
        for owner in owners.get(package, ()):
            if owner != NAME:
                return (
                    f"the package {owner} has files in {package}/, where batchweave-server has its own. Install it "
                    "into an environment of its own (uv tool install, pipx install, or a new venv)."
                )
    return None
