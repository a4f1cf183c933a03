from tests.integration.conftest import house, tokenizer

__all__ = ["house", "tokenizer"]
