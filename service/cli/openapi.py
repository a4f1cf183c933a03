"""`batchweave openapi`: describes the API."""

from service.settings import load_settings


def openapi() -> None:
    """Print the OpenAPI description of the HTTP API as YAML."""
    import yaml

    from service.app import create_app

    print(yaml.safe_dump(create_app(load_settings()).openapi(), sort_keys=False, allow_unicode=True, width=110), end="")
