"""The numbers of the plan that no formula gives; what is derived or a mere name stands where it is used.

`python -m benchmarks.tuning DATA plan.NAME=VALUE` says what another value does to whole runs.
"""

# Urgency, and turns of tenants
TIERS_PER_DOUBLING = 4  # of the time until a deadline; requests of one tier are as urgent as each other
HASTE = 1.25  # a deadline later than this many times the predicted end moves no request
FAIR_LAG = 0.1  # how far a tenant may fall behind, as a part of its own share of the window's work

# Order
KEEP_SHARING = 0.99  # of what prefixes can save: node splits give up the rest for an even mix (5.2)
BISECTIONS = 24  # of the price of lost sharing, until its end is known to a part in 2^24

# Families
LARGEST_FAMILY = 16  # prompts of a family; where more share a prefix, computing it once more matters little

# Groups
SMALLEST_GROUP = 32  # fewest requests of a node that makes a group
SMALLEST_TASK = 8  # the same for a task: a system prompt or a kind, whose few answers may be the longest of all
MOST_SMALL_TASKS = 16  # more are cases of one task, such as the sessions of an agent; each would take from the sample
MOST_NODES = 512  # most nodes that make groups; kinds may double the number of groups
UNLIKE = 0.05  # how many of a group's own answers its parent's estimate counts for, where tasks differ
ALIKE = 3.0  # the same, where only prompt lengths differ

# Lengths
PRIOR_MEAN = 256.0  # tokens, before anything is known

# Profiles of earlier batches
FEWEST_IN_PROFILE = 8  # answers to requests with one beginning that make a profile
MOST_LENT = 256.0  # answers that a profile counts for in a new batch, however many it has seen
MOST_DOUBT = 4.0  # chi-square of new answers against a profile, above which it lends nothing: by chance, one in twenty

# The sample
SAMPLE = 0.01  # as in the paper, where 1% does about as well as 100% (section 5.4)
SAMPLE_FEW = 8  # requests of a group that may always be sampled
SAMPLE_MOST = 16  # one group's sample is at most this many times its share
