"""Both sides of the handshake as pure machines: all moves that are right, and all that are not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.authentication import (
    CHALLENGE_BYTES,
    NO_SECRET,
    NONCE_BYTES,
    OPENING_BYTES,
    PROOF_BYTES,
    QUESTION,
    AcceptingSide,
    ConnectingSide,
    Subject,
    key_of,
    maybe_rank_opening,
    maybe_signed,
    seed_of,
    sign,
    token_of,
)
from foreprop.core.wire import HEADER_BYTES
from foreprop.engine.connection import greeting
from foreprop.errors import HandshakeError, RemoteProtocolError, TransportError

KEY, OTHER_KEY = key_of(b"a secret of this job"), key_of(b"a secret of another job")
SUBJECT = Subject("session-1", "server 3")
NONCES = [bytes([n]) * NONCE_BYTES for n in range(4)]


def connecting(
    key: bytes = KEY, subject: Subject = SUBJECT, rank: int = 7, nonce: int = 0
) -> ConnectingSide:
    return ConnectingSide(key, subject, rank, NONCES[nonce])


def accepting(key: bytes = KEY, subject: Subject = SUBJECT, nonce: int = 1) -> AcceptingSide:
    return AcceptingSide(key, subject, NONCES[nonce])


def shake_hands(near: ConnectingSide, far: AcceptingSide) -> list[bytes]:
    """All that is said, in turn; ends with the first error."""
    said = [near.opening, b"", b"", b""]
    said[1] = far.receive(said[0])
    said[2] = near.receive(said[1])
    said[3] = far.receive(said[2])
    assert near.receive(said[3]) == b""
    return said


def test_both_sides_know_each_other_after_four_messages_of_fixed_size() -> None:
    near, far = connecting(), accepting()
    said = shake_hands(near, far)
    sizes = [OPENING_BYTES, CHALLENGE_BYTES, PROOF_BYTES, PROOF_BYTES]
    assert [len(message) for message in said] == sizes == [44, 40, 32, 32]
    assert (near.wanted, far.wanted, far.rank) == (0, 0, 7)


@pytest.mark.parametrize("encrypted", [False, True])
def test_who_asks_where_servers_are_need_not_know_the_session(encrypted: bool) -> None:
    """Any server answers that, and such a connection is for nothing else."""
    near = ConnectingSide(KEY, QUESTION, 7, NONCES[0])
    far = AcceptingSide(KEY, SUBJECT._replace(encrypted=encrypted), NONCES[1])
    assert not far.is_question
    shake_hands(near, far)
    assert far.is_question
    assert near.channel == far.channel
    assert maybe_rank_opening(near.opening) == 7
    other = AcceptingSide(OTHER_KEY, SUBJECT, NONCES[1])
    with pytest.raises(HandshakeError, match="different secrets"):
        shake_hands(ConnectingSide(KEY, QUESTION, 7, NONCES[0]), other)


ENCRYPTED = SUBJECT._replace(encrypted=True)


def test_both_sides_make_the_same_seeds_and_each_way_has_its_own() -> None:
    near, far = connecting(subject=ENCRYPTED), AcceptingSide(KEY, ENCRYPTED, NONCES[1])
    shake_hands(near, far)
    assert near.channel == far.channel
    assert near.channel == (ENCRYPTED, 7, NONCES[0] + NONCES[1])
    to_accepting = seed_of(KEY, near.channel, "to accepting")
    assert to_accepting == seed_of(KEY, far.channel, "to accepting")
    others = [seed_of(KEY, near.channel, "to connecting")]
    others.append(seed_of(OTHER_KEY, near.channel, "to accepting"))
    for changes in (
        {"rank": 6},
        {"nonces": NONCES[1] + NONCES[0]},
        {"subject": ENCRYPTED._replace(target="server 4")},
        {"subject": ENCRYPTED._replace(session="session-2")},
    ):
        others.append(seed_of(KEY, near.channel._replace(**changes), "to accepting"))
    assert len({to_accepting, *others}) == len(others) + 1
    assert {len(seed) for seed in others} == {32}


@pytest.mark.parametrize("connecting_encrypts", [True, False])
def test_a_side_that_encrypts_and_one_that_does_not_are_both_told(
    connecting_encrypts: bool,
) -> None:
    subjects = (SUBJECT, ENCRYPTED)
    near = connecting(subject=subjects[connecting_encrypts])
    far = AcceptingSide(KEY, subjects[not connecting_encrypts], NONCES[1])
    names = ("rank 7", "server 3") if connecting_encrypts else ("server 3", "rank 7")
    expected = "{} encrypts and {} does not: set encryption".format(*names)
    challenge = far.receive(near.opening)
    assert (far.wanted, far.refused) == (0, far.refused or "")
    assert expected in str(far.refused)
    with pytest.raises(HandshakeError, match=expected):
        near.receive(challenge)


def test_a_changed_mark_does_not_make_two_sides_agree() -> None:
    """Somebody on the path tells each that the other encrypts as it does: proofs differ."""
    near, far = connecting(subject=ENCRYPTED), accepting()
    plain = connecting().opening
    challenge = far.receive(plain[:8] + near.opening[8:])
    tls = AcceptingSide(KEY, ENCRYPTED, NONCES[1]).receive(near.opening)
    proof = near.receive(tls[:8] + challenge[8:])
    with pytest.raises(HandshakeError, match="have different secrets, or mean different"):
        far.receive(proof)


def test_a_server_without_a_secret_knows_both_openings() -> None:
    for subject in (SUBJECT, ENCRYPTED):
        assert maybe_rank_opening(connecting(subject=subject).opening) == 7


def pieces(message: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = [0, *sorted(cut % (len(message) + 1) for cut in cuts), len(message)]
    for start, stop in itertools.pairwise(places):
        if stop > start:
            yield message[start:stop]


@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_it_does_not_matter_how_the_bytes_are_split(cuts: list[int]) -> None:
    near, far = connecting(), accepting()
    message = near.opening
    for turn in range(4):
        side = near if turn % 2 else far
        replies = [side.receive(piece) for piece in pieces(message, cuts)]
        assert not any(replies[:-1])  # nothing is said before the whole message is there
        message = replies[-1]
    assert (near.wanted, far.wanted) == (0, 0)


def test_no_secret_and_no_proof_is_on_the_wire() -> None:
    said = b"".join(shake_hands(connecting(), accepting()))
    for secret in (KEY, b"a secret of this job"):
        assert secret not in said


DIFFERENT = {
    "another key": {"key": OTHER_KEY},
    "another session": {"subject": Subject("session-2", "server 3")},
    "another server": {"subject": Subject("session-1", "server 4")},
    "a relay to it": {"subject": Subject("session-1", "relay 0 to server 3")},
    "session and target moved": {"subject": Subject("session-1s", "erver 3")},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_sides_that_do_not_mean_the_same_refuse_each_other(name: str) -> None:
    near, far = connecting(**DIFFERENT[name]), accepting()  # type: ignore[arg-type]
    challenge = far.receive(near.opening)
    proof = near.receive(challenge)
    expected = r"rank 7 and server 3 have different secrets, or mean different sessions: set FORE"
    with pytest.raises(HandshakeError, match=expected):
        far.receive(proof)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_server_that_does_not_mean_the_same_is_refused(name: str) -> None:
    """One that lets everybody in: what it can answer is not what was asked for."""
    near, false = connecting(), accepting(**DIFFERENT[name])  # type: ignore[arg-type]
    near.receive(false.receive(near.opening))
    again = connecting(**DIFFERENT[name])  # type: ignore[arg-type]
    other = accepting(**DIFFERENT[name])  # type: ignore[arg-type]
    with pytest.raises(HandshakeError, match="rank 7 and server 3 have different secrets"):
        near.receive(other.receive(again.receive(other.receive(again.opening))))


def test_a_rank_cannot_be_changed_on_the_way() -> None:
    near, far = connecting(rank=7), accepting()
    challenge = far.receive(connecting(rank=8).opening)  # the same nonce
    with pytest.raises(HandshakeError, match="rank 8 and server 3"):
        far.receive(near.receive(challenge))


def test_what_was_said_once_does_not_serve_again() -> None:
    """A recorded handshake is of no use: each side has a new nonce."""
    heard = shake_hands(connecting(), accepting())
    far = accepting(nonce=2)
    far.receive(heard[0])
    with pytest.raises(HandshakeError):
        far.receive(heard[2])
    near = connecting(nonce=3)
    near.receive(heard[1])
    with pytest.raises(HandshakeError):
        near.receive(heard[3])


def test_a_proof_cannot_be_sent_back() -> None:
    """Roles differ."""
    near = connecting()
    proof = near.receive(accepting().receive(near.opening))
    with pytest.raises(HandshakeError):
        near.receive(proof)
    said = shake_hands(connecting(), accepting())
    assert said[2] != said[3]


def test_a_part_of_a_proof_is_none() -> None:
    for size in range(PROOF_BYTES):
        near, far = connecting(), accepting()
        proof = near.receive(far.receive(near.opening))
        assert far.receive(proof[:size]) == b"", size
        assert far.wanted == PROOF_BYTES - size
        wrong = bytes(byte ^ 1 for byte in proof[size:])
        with pytest.raises(HandshakeError):
            far.receive(wrong)


def test_more_than_was_asked_for_is_refused() -> None:
    near, far = connecting(), accepting()
    with pytest.raises(RemoteProtocolError, match="45 bytes where 44 were to come"):
        far.receive(near.opening + b"x")
    done = accepting()
    shake_hands(connecting(), done)
    with pytest.raises(RemoteProtocolError, match="1 bytes where 0 were to come"):
        done.receive(b"x")


@pytest.mark.parametrize("session", ["", "a-session", "session-of-thirty-two-characters"])
def test_a_rank_without_a_secret_is_named(session: str) -> None:
    """It sends a frame, which may be shorter than an opening."""
    hello = greeting(session, 5)
    far = accepting()
    expected = "rank 5 has no secret, server 3 has one: set FOREPROP_SECRET_FILE to a copy of the"
    far.receive(hello[: HEADER_BYTES - 1])
    with pytest.raises(HandshakeError, match=expected):
        far.receive(hello[HEADER_BYTES - 1 : OPENING_BYTES])


def test_a_server_without_a_secret_is_named() -> None:
    near = connecting()
    assert maybe_rank_opening(near.opening) == 7
    assert maybe_rank_opening(near.opening[:HEADER_BYTES]) == 7
    assert maybe_rank_opening(greeting("session-1", 7)) is None
    with pytest.raises(HandshakeError, match="rank 7 has a secret, server 3 has none: set FORE"):
        near.receive(NO_SECRET)


def test_what_it_means_that_the_connection_ends() -> None:
    near = connecting()
    assert isinstance(near.at_end(), TransportError)  # it may be tried again
    near.receive(accepting().receive(near.opening))
    assert isinstance(near.at_end(), HandshakeError)


@given(data=st.binary(max_size=OPENING_BYTES + PROOF_BYTES + 8), size=st.integers(1, 80))
def test_no_bytes_of_a_stranger_come_through(data: bytes, size: int) -> None:
    """Any bytes, in any pieces: refused or not enough, never anything else, never an answer."""
    far, answered = accepting(), b""
    try:
        for start in range(0, len(data), size):
            answered += far.receive(data[start : start + size])
    except (HandshakeError, RemoteProtocolError):
        pass
    assert far.wanted > 0
    assert answered == b""  # not even a challenge, without the mark


@given(nonce=st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES), proof=st.binary(max_size=40))
def test_a_guessed_proof_gets_a_challenge_and_no_more(nonce: bytes, proof: bytes) -> None:
    far = accepting()
    challenge = far.receive(connecting().opening[:-NONCE_BYTES] + nonce)
    assert len(challenge) == CHALLENGE_BYTES
    try:
        assert far.receive(proof) == b""
    except (HandshakeError, RemoteProtocolError):
        return
    assert far.wanted > 0


@given(data=st.binary(min_size=CHALLENGE_BYTES, max_size=CHALLENGE_BYTES))
def test_a_false_server_gets_no_proof_for_what_is_no_challenge(data: bytes) -> None:
    with pytest.raises(HandshakeError):
        connecting().receive(data)


# The secret and the store.
def test_a_secret_is_long_enough() -> None:
    assert len(key_of(bytes(16))) == 32
    assert key_of(b"x" * 16) == key_of(b"x" * 16 + b"\r\n")
    assert key_of(b"x" * 16) != key_of(b"x" * 17)
    with pytest.raises(ValueError, match="15 bytes; it must be at least 16"):
        key_of(b"x" * 15 + b"\n")


@given(name=st.text(max_size=20), value=st.binary(max_size=60))
def test_an_entry_counts_under_its_name_with_its_key(name: str, value: bytes) -> None:
    entry = sign(KEY, name, value)
    assert maybe_signed(KEY, name, entry) == value
    assert maybe_signed(OTHER_KEY, name, entry) is None
    assert maybe_signed(KEY, name + "/", entry) is None
    for place in range(0, len(entry), 7):
        changed = entry[:place] + bytes([entry[place] ^ 1]) + entry[place + 1 :]
        assert maybe_signed(KEY, name, changed) is None
    assert maybe_signed(KEY, name, value) is None


@given(name=st.text(max_size=20), entry=st.binary(max_size=200))
def test_no_bytes_of_a_stranger_are_an_entry(name: str, entry: bytes) -> None:
    assert maybe_signed(KEY, name, entry) is None


def test_a_name_and_a_value_cannot_be_moved_into_each_other() -> None:
    assert sign(KEY, "ab", b"c")[-1:] == b"c"
    moved = sign(KEY, "ab", b"c")[:-1] + b"bc"
    assert maybe_signed(KEY, "a", moved) is None


def test_tokens_of_two_purposes_and_two_secrets_differ() -> None:
    made = {token_of(key, text, 16) for key in (KEY, OTHER_KEY) for text in ("links of 1", "of 2")}
    assert len(made) == 4
    assert all(len(token) == 16 for token in made)
