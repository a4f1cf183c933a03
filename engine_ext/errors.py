"""The error tree of planning and engines. Each message says what is wrong and, where it can, what would be right.

BatchweaveError
├── InputError         a value from outside that cannot be planned with; a ValueError too
│   ├── ConfigError        a model's config lacks a field, or has a wrong one
│   ├── UnknownHardware    no preset has this name
│   ├── HardwareError      a description of hardware lacks a field, or has a wrong one
│   ├── DoesNotFit         the model's weights leave no memory for KV cache
│   ├── SegmentError       the segments of a prompt are wrong
│   └── TooLarge           no KV cache of this size can hold the request
├── EngineError        an engine does not do what it should
│   ├── EngineStartError   it did not start, or without batchweave's plugin
│   └── RanksDiverged      its ranks decided differently about one step
└── ServiceError       see service/errors.py
"""


class BatchweaveError(Exception):
    """The root of all errors that batchweave raises for others to handle."""


class InputError(BatchweaveError, ValueError):
    """A value from outside cannot be planned with; the message names it."""


class ConfigError(InputError):
    """A model's config lacks a field or has a wrong one; the message names it."""


class UnknownHardware(InputError):
    """No preset has this name; the message lists those that exist."""


class HardwareError(InputError):
    """A description of hardware lacks a field or has a wrong one; the message names it."""


class DoesNotFit(InputError):
    """The model's weights leave no memory for KV cache on this machine."""


class SegmentError(InputError):
    """The segments of a prompt are wrong, or contradict those of the prompt `other`; prompts count from 0."""

    def __init__(self, number: int, problem: str, other: int | None = None) -> None:
        super().__init__(f"prompt {number}: {problem}" + (f" (as in prompt {other})" if other is not None else ""))
        self.number = number
        self.problem = problem
        self.other = other


class TooLarge(InputError):
    """No KV cache of this size can hold a request; `number` counts requests from 0."""

    def __init__(self, number: int, tokens: int, capacity: int) -> None:
        super().__init__(f"request {number} needs {tokens:,} tokens of KV cache, and there are {capacity:,}")
        self.number = number


class EngineError(BatchweaveError):
    """An engine does not do what it should."""


class EngineStartError(EngineError):
    """SGLang did not start, or it started without batchweave's plugin in its scheduler."""


class RanksDiverged(EngineError):
    """The ranks of a tensor-parallel engine decided differently about one step, so none of them may run it."""

    def __init__(self, admitted: int, budget: int) -> None:
        super().__init__(
            f"the ranks of this engine decided differently about one step (here: {admitted} requests, {budget} prompt "
            f"tokens); its requests will be run again. Please report this. Without the dual scan, "
            f"BATCHWEAVE_SCHEDULING=sglang, it cannot happen"
        )


class EngineEnded(Exception):
    """The engine of which this process runs a part has ended."""
