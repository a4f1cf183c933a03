"""Formats SGLang's log lines as JSON, so that a worker's log has one form; SGLang reads the settings from a file."""

import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure() -> None:
    """Make SGLang's processes log as JSON and draw no progress bars, unless the environment says otherwise."""
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("SGLANG_LOGGING_CONFIG_PATH", str(Path(__file__).with_name("logging.json")))
