"""Says which deadlines are about equally urgent, for the service's queue and for an engine's scan alike."""

HOUR_S = 3600.0
# Upper bounds of the seconds that are left; the last pool has no bound. Few pools keep shared prefixes together.
POOLS_S = (0.25 * HOUR_S, HOUR_S, 4 * HOUR_S, 12 * HOUR_S)
