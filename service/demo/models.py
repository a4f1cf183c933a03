"""The two models that the project makes by itself: the demo's, and a tiny one of random weights."""

from pathlib import Path

from service.demo.prompts import corpus
from service.demo.smollm import ensure_smollm
from service.demo.tiny import ensure_tiny_model
from service.settings import DEMO_MODEL, TINY_MODEL, Settings


def ensure_model(settings: Settings) -> None:
    """Make the model of `settings` if it is one of ours and not there yet. Raises StartError."""
    folder = Path(settings.model_source)
    if settings.own_model == DEMO_MODEL:
        ensure_smollm(folder)
    elif settings.own_model == TINY_MODEL:
        ensure_tiny_model(folder, corpus())
