"""batchweave and SGLang's own policies side by side on a real GPU; `python -m benchmarks.gpu --help`."""
