"""`batchweave models`: list the models that requests can name."""

import time
from typing import Any

from service.errors import CommandError
from service.remote.session import LOCAL_URL, NO_KEY, KeyOption, UrlOption, service_at
from service.terminal import JsonOption, duration, print_json, print_table, said


def models(as_json: JsonOption = False, url: UrlOption = LOCAL_URL, key: KeyOption = NO_KEY) -> None:
    """List the models that requests can name.

    A model is known from its first worker on. A batch for a model that no worker serves now waits for one.
    """
    with service_at(url, key) as client:
        found: Any = client.get("/models")
        if not isinstance(found, dict) or "data" not in found:
            raise CommandError(f"{url} lists no models: is this a batchweave service?")
        if as_json:
            print_json(found["data"])
            return
        print_table(
            ("model", "known for"), [(each["id"], duration(time.time() - each["created"])) for each in found["data"]]
        )
    if not found["data"]:
        said.print("No model is known yet. Start a worker of one: batchweave worker --model …")
