"""Lets a worker's requests into its engine one a turn of the event loop, so that the loop stays quick for all else.

SGLang renders and tokenizes a prompt in the loop, which takes a millisecond or more. A slice of 256 requests that
started at once would hold leases, heartbeats and answers up for as long as all of them take together.
"""

import asyncio


class Feed:
    """Gives turns to all slices of one worker, in the order in which they ask."""

    def __init__(self) -> None:
        self._next = asyncio.Lock()

    async def turn(self) -> None:
        """Wait for a turn of the loop in which no other request starts."""
        async with self._next:
            await asyncio.sleep(0)
