"""Lists the settings by heading, for docs/settings.md and the dashboard."""

from service.settings import Settings

# The first setting under each heading.
HEADINGS = {
    "data_dir": "Storage",
    "host": "API",
    "model": "Model and engine",
    "worker_name": "Workers",
    "metrics_host": "Metrics and cost",
    "secret_key": "Tenants and security",
    "step_limit_s": "Failures",
    "slice_requests": "Planning and running",
    "max_file_bytes": "Input files",
}


def grouped() -> dict[str, list[str]]:
    """Return the names of all settings by heading."""
    groups: dict[str, list[str]] = {}
    heading = ""
    for name in Settings.model_fields:
        heading = HEADINGS.get(name, heading)
        groups.setdefault(heading, []).append(name)
    return groups
