"""Ranks that freeze and unfreeze alike are never told otherwise, and others always are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.freezing import NOTHING_TURNED, TrainableWords, Turned, what_turned

STEPS = 5
TURNED = [NOTHING_TURNED, Turned(frozen=(0,)), Turned((0,), (1, 2))]
HISTORY = st.lists(st.sampled_from(TURNED), min_size=STEPS, max_size=STEPS)


@given(HISTORY, HISTORY, st.lists(st.booleans(), min_size=2 * STEPS, max_size=2 * STEPS))
def test_a_difference_is_seen_when_both_have_gone_on(
    first: list[Turned], second: list[Turned], turns: list[bool]
) -> None:
    """Each says what it has turned as it ends a step, and begins the next one."""
    words, done, found = TrainableWords(["a", "b", "c"]), [0, 0], set[int]()
    for turn in [*turns, *([False] * STEPS), *([True] * STEPS)]:
        if done[turn] == STEPS:
            continue
        done[turn] = step = done[turn] + 1
        if (said := (first, second)[turn][step - 1]) != NOTHING_TURNED:
            words.tell(turn, step, said)
        for peer in (0, 1):  # as a word comes, and as a push does: whoever is in a later step
            for begun in range(2, done[peer] + 2):
                differs = words.differing(peer, begun, [0, 1])
                found |= {begun - 1} if differs and done[1 - peer] >= begun - 1 else set()
    assert found == {n for n in range(1, STEPS + 1) if first[n - 1] != second[n - 1]}


def test_it_says_who_has_done_what() -> None:
    words = TrainableWords(["a", "b", "c", "d"])
    words.tell(0, 7, Turned((0, 1, 2, 3), ()))
    words.tell(1, 7, Turned((1,), (0,)))
    assert words.differing(1, 8, [0, 1]) == (7, 0)
    assert words.differing(1, 8, [1]) is None
    assert words.describe(7, [(0, "rank 0"), (1, "rank 1"), (2, "rank 2")]) == (
        "step 7: rank 0 has frozen a, b, c and 1 more, and rank 1 has frozen b and has unfrozen a,"
        " and rank 2 has changed nothing since the step before: set requires_grad alike on every"
        " rank, before the same step"
    )


def test_old_words_are_let_go() -> None:
    words = TrainableWords(["a"])
    for step in range(1, 200):
        words.tell(0, step, Turned((0,), ()))
    assert words.differing(1, 2, [0, 1]) is None
    assert words.differing(1, 200, [0, 1]) == (199, 0)


def test_what_has_turned() -> None:
    assert what_turned([True, False, True, None], [False, True, True, True]) == Turned((0,), (1,))
