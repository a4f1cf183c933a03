"""The numbers of a step that no formula gives."""

# Room, and chunks
ROOM_PAGES = 2  # pages of each decode for which there must be room if some are left out; a step may still run
OWED_CHUNKS = 8  # parts of the largest step; of what batches are owed they get one part in a step

# Plans of a running engine
REMEMBERED = 4096  # ended requests that are kept to estimate similar ones
MOST_EVENTS = 1 << 15  # since a plan was begun; then another one takes note of them
MOST_REFUSED = 3  # times that the engine may refuse the request that an end admits first

# What batches are owed
MOST_OWED_S = 10.0  # or batches that waited long would take whole seconds at once from online requests

# Making way
MOST_MADE_WAY = 3  # times that one request makes way for online ones; for a prompt, those with little gained since
