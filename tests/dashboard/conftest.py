from tests.integration.conftest import house, tokenizer, url

__all__ = ["house", "tokenizer", "url"]
