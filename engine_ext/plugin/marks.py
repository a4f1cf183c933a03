"""Names the marks that a worker puts into a request's `custom_params`, which SGLang carries to the scheduler."""

KIND = "batchweave_kind"  # requests of one kind are alike in more than their prompts, such as those of one batch
UNTOLD = "batchweave_untold"  # beside KIND: the request ends at max_tokens, and the scheduler is not told
RESERVED = frozenset({KIND, UNTOLD})
