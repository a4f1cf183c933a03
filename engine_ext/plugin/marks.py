"""What a worker writes into a request for the scheduler: SGLang carries its `custom_params` between the processes."""

KIND = "batchweave_kind"  # requests of one kind are alike in more than their prompts, such as those of one batch
UNTOLD = "batchweave_untold"  # beside it: the request ends at max_tokens, and the scheduler is not told so
RESERVED = frozenset({KIND, UNTOLD})
