"""Says in words what answers are worth, while a batch runs and after it."""

from service.queue.counts import Counts

FEWEST = 20  # answers from which on it is said while the batch runs
SHARE = 0.05  # of the answers, above which it is said


def words_of(counts: Counts, has_ended: bool) -> list[str]:
    """Return a sentence for each outcome that many answers have."""
    answers = counts.completed + counts.not_accepted
    if not answers or (answers < FEWEST and not has_ended):
        return []
    of = f"of {answers:,} {'answer' if answers == 1 else 'answers'}"
    found = list[str]()
    if counts.not_accepted > SHARE * answers:
        found.append(
            f"{counts.not_accepted:,} {of} {_were(counts.not_accepted)} not accepted: the error lines have them, and "
            "say why; allow more tokens or retries, or ask for less"
        )
    if counts.cut_off > SHARE * answers:
        at = round(counts.cut_off_tokens / counts.cut_off)
        found.append(
            f"{counts.cut_off:,} {of} {_were(counts.cut_off)} cut off by max_tokens or the model's context, after "
            f"{at:,} tokens on average: allow more, or ask for less"
        )
    if counts.looped > SHARE * answers:
        found.append(
            f"{counts.looped:,} {of} {_are(counts.looped)} the same words again and again until cut off: a "
            "frequency_penalty or a larger model may help, more tokens do not"
        )
    if counts.invalid > SHARE * answers:
        found.append(
            f"{counts.invalid:,} {of} {_are(counts.invalid)} not the JSON that the request asked for: accept "
            "only valid ones, with retries (--accept schema,retries=1)"
        )
    if counts.refused > SHARE * answers:
        found.append(f"{counts.refused:,} {of} {_were(counts.refused)} refused by the model or a filter")
    return found


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
