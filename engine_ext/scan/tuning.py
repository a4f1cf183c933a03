"""The numbers of the scan that no formula gives; what is derived or a mere name stands where it is used.

`python -m benchmarks.tuning DATA scan.NAME=VALUE` says what another value does to whole runs.
"""

# Which waiting request goes first
MOST_OVERTAKEN = 4096  # requests that came later and may go before one of the same urgency
LONGEST_WAIT_S = 1800.0  # for which requests that came later may go before it
AHEAD_S = 5.0  # of the engine's work, by which a project may be ahead of the others before it is not hurried any more
MOST_BEHIND_S = 60.0  # of the engine's work, by which a project may be behind the others
PROJECTS_KNOWN = 1000  # whose work is remembered

# Admission
SOON = 32  # steps for whose output tokens there must always be room
BURST = 4  # a step of prompts alone begins once this part of the largest step fits,
BURST_CACHE = 16  # or, in a small KV cache, this part of it,
BURST_SLOTS = 8  # and this part of all request slots is free
PASSED = 8  # requests behind an urgent one that does not fit, of which the first that does may go before it

# Footprints
SELDOM = 1e-6  # probability below which hazards say nothing any more
LIKELY = 0.1  # a left-end request must fit as long as it still runs with at least this probability
NEGLIGIBLE = 1e-3  # probability below which a request counts as ended

# Another plan
FEWEST_CHANGES = 32  # requests that must come or end before the scan plans again
PATIENCE = 32  # steps for which drift does not replace a plan, and for which a few new requests may have to wait
MORE_ANSWERS = 3.0  # new answers, in multiples of those that a plan knew, that make another plan worth its time

# Slowness
SLOWNESS_KEEPS = 0.995  # how much of a step's weight the next step keeps
LONGEST_STEP_S = 60.0  # a longer pause between two steps was no step
UNKNOWN_STEPS = 8.0  # steps, by their weight, before which nothing is said

# Sizes of steps
BURST_MARGIN = 0.75  # share of the margin that bursts keep
ALIGNMENT = 128  # tokens; step sizes are multiples of it, as GEMM tiles are (A.2)

# Sweeps
DRIFT = 0.05  # by how much compute's share of the remaining work may change
SWEEP = 96  # steps in which one sweep looks at every running request
HEADS = 64  # waiting requests at the left end that represent the next ones
ENOUGH = 1.75  # times the shortest sensible step: the compute of a step that the right end's share allows for
MOST_RIGHT = 0.8  # of the KV memory: prompts of the left side come in lumps, and a full cache retracts
MOST_IN_BURSTS = 0.95  # where prompts wait until they fit, so only so much that the left end never stops
DOUBTFUL = 0.3  # the doubt of a group that has seen about ten answers
GROUPS_AT_ONCE = 1  # groups whose outlook is updated in one step
GROUPS_LOOKED_AT = 64  # groups checked for news in one step

# Twins
TWIN_TOKENS = 16  # tokens; a shared prefix that is longer than this is worth waiting a step for
