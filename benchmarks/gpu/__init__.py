"""Compare batchweave and SGLang's own policies on a real GPU; see `python -m benchmarks.gpu --help`."""
