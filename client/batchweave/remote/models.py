"""`batchweave models`: list the models that requests can name."""

import time

from batchweave.remote.session import LOCAL_URL, NO_KEY, KeyOption, UrlOption, service_at
from batchweave.remote.shapes import Model
from batchweave.terminal import JsonOption, duration, print_json, print_table, said


def models(as_json: JsonOption = False, url: UrlOption = LOCAL_URL, key: KeyOption = NO_KEY) -> None:
    """List the models that requests can name.

    A model is known once a process of the service was started with it. A batch for a model that no worker serves now
    waits for one.
    """
    with service_at(url, key) as client:
        found = [Model.of(each) for each in client.every("/models")]
        if as_json:
            print_json([model.raw for model in found])
            return
        rows = [(model.id, f"{duration(time.time() - model.created)} ago") for model in found]
        print_table(("model", "first seen"), rows)
    if not found:
        said.print("No model is known yet. Start a worker of one: batchweave worker --model MODEL")
