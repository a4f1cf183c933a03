"""openapi.yaml says what the application does."""

from pathlib import Path

import yaml

from service.app import create_app
from service.settings import load_settings


def test_openapi_yaml_is_fresh() -> None:
    written = yaml.safe_load((Path(__file__).parents[3] / "openapi.yaml").read_text())
    assert written == create_app(load_settings()).openapi(), "openapi.yaml is stale: run `make openapi`"
