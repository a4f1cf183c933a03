"""The numbers of the step beside online requests that no formula gives."""

# Governor
CUT = 0.5  # what a cut leaves of the share
RISE = 0.1  # by how much of itself the share grows in 1 / (1 - percentile) requests that are in time
LEAST_OF_LIMIT = 1 / 16  # the smallest share
SPARE = 2.0  # late requests that may come together after enough others were in time

# Which decodes rest
MOST_SKIPPED = 32  # steps running that a decode may be left out; then it goes before all others
AGE = 64  # KV tokens by which a decode moves forward for each step that it was left out

# Limit of a step
GUARD = 0.25  # of the TTFT: the longest step, since a request may come as it begins
LEAST_CHUNK = 128  # prompt tokens that any step has room for, and that an online request gets, however late others are

# Predictor
PREDICTOR_KEEPS = 0.998  # how much of a step's weight the next step keeps
RIDGE = 1e-3  # of a step's weight, against a regression of what never varies
REFIT = 32  # steps between two regressions
RECENT = 256  # steps whose errors make the margin
LEAST_PREDICTED = 0.25  # of the cost model's time: no regression predicts less
OUTLIER = 4.0  # times the prediction: a longer step was held up, or else the prediction follows over some regressions
MARGIN_QUANTILE = 0.9  # of recent errors, which the margin covers

# Reserve for online requests
BINS = 128  # of the share of the KV cache that online requests hold
BEFORE_S = 600.0  # without online requests, as if before the first step: one request alone reserves nothing
RESERVE_MEMORY_S = 3600.0  # after which what was seen counts a third
LEAST_RESERVE = 0.02  # of the KV cache, always kept for them
TOO_SELDOM = 1e-3  # of the time: online requests that were there for less are forgotten
RESERVE_QUANTILE = 0.95  # of the time, in which they held no more
