"""Documents of a packed sequence: runs of equal segment ids."""

from collections.abc import Callable, Sequence

PADDING = -1


def documents(segment_ids_L: Sequence[int]) -> list[int]:
    """Returns the number of each token's document, counted along the sequence, and PADDING where the id is 0.

    A run ends where the id changes, so an id used again after another one is a new document.
    """
    numbers, before, number = [], None, 0
    for segment_id in segment_ids_L:
        number += segment_id != before
        before = segment_id
        numbers.append(PADDING if segment_id == 0 else number)
    return numbers


def offsets(segment_ids_L: Sequence[int]) -> list[int]:
    """Returns the position of each token in its run."""
    positions, before = [], None
    for segment_id in segment_ids_L:
        positions.append(positions[-1] + 1 if segment_id == before else 0)
        before = segment_id
    return positions


def visibility(
    segment_ids_L: Sequence[int], causal: bool, prefix_L: Sequence[int] | None = None
) -> Callable[[int, int], bool]:
    """Returns sees(t, u): whether query t sees key u; the first prefix_L[t] keys of its document are always visible."""
    document, position = documents(segment_ids_L), offsets(segment_ids_L)

    def sees(t: int, u: int) -> bool:
        in_prefix = prefix_L is not None and position[u] < prefix_L[t]
        return document[t] == document[u] != PADDING and (u <= t or not causal or in_prefix)

    return sees
