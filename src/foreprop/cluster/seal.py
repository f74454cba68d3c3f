"""What the store has is signed: what others than the job's own processes wrote does not count.

Loaded only where ``secret_file`` is set, or where several machines take part without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreprop.config import LOGGER, Config
from foreprop.core.authentication import maybe_signed, sign
from foreprop.core.wire import SIGNED
from foreprop.errors import HandshakeError
from foreprop.link.secret import load_key

if TYPE_CHECKING:
    from foreprop.cluster.world import World

_REPORTS = 5
"""A stranger who writes much into the store does not fill the log."""


class Seal:
    """Signs what a part of the store is given, and opens what it has.

    ``scope`` is that part's name, so that an entry counts in no other. Any thread.
    """

    def __init__(self, key: bytes, scope: str, who: str) -> None:
        self._key = key
        self._scope = scope
        self._who = who
        self._refused: dict[str, str] = {}
        """By key: what was wrong with what was there last."""

    def sign(self, key: str, value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else value
        return sign(self._key, f"{self._scope}/{key}", data)

    def maybe_open(self, key: str, entry: bytes | None) -> bytes | None:
        """Its value; None if there is none, or none that counts: it may still come."""
        value = None if entry is None else maybe_signed(self._key, f"{self._scope}/{key}", entry)
        if value is not None:
            self._refused.pop(key, None)
        elif entry is not None:
            signed = entry.startswith(SIGNED)
            self._note(key, "signed with another secret" if signed else "not signed")
        return value

    def _note(self, key: str, why: str) -> None:
        known = key in self._refused
        self._refused[key] = why
        if known or len(self._refused) > _REPORTS:
            return
        LOGGER.warning(
            "%s: the store's entry %r is %s, and does not count: a rank without this job's secret"
            " (FOREPROP_SECRET_FILE), another job at the same rendezvous, or a stranger wrote it",
            self._who,
            key,
            why,
        )

    def check_refused(self, key: str) -> None:
        """After a wait for ``key`` in vain: raises `HandshakeError` if it was there, unsigned."""
        if why := self._refused.get(key):
            raise HandshakeError(
                f"{self._who} has a secret, and the store's entry {key!r} is {why}: set"
                " FOREPROP_SECRET_FILE to a copy of the same file on every machine. If it is set"
                " everywhere, another job meets at the same rendezvous: give this one another port"
            )


def make_seal(secret_file: str, scope: str, who: str) -> Seal:
    """Raises `ConfigError` if the file cannot be used."""
    return Seal(load_key(secret_file), scope, who)


def use_secret(world: World, config: Config) -> None:
    """For all that this process has in the store; without a secret, rank 0 says what that means."""
    if config.secret_file is None:
        report_no_secret()
        return
    for entries, scope in ((world.entries, world.scope), (world.raw_entries, "raw")):
        if entries.seal is None:
            entries.seal = make_seal(config.secret_file, scope, f"rank {world.rank}")


def open_entry(seal: Seal | None, key: str, entry: bytes | None, who: str) -> bytes | None:
    """Its value, if it counts; raises `HandshakeError` if only the other side signs."""
    if seal is not None:
        return seal.maybe_open(key, entry)
    if entry is not None and entry.startswith(SIGNED):
        raise HandshakeError(
            f"{who} has no secret, and the store's entry {key!r} is signed with one: set"
            " FOREPROP_SECRET_FILE to a copy of the same file on every machine, or use another"
            " rendezvous, if that is another job's"
        )
    return entry


def report_no_secret() -> None:
    """Once per job of several machines that authenticate nobody."""
    LOGGER.warning(
        "no secret is set: whoever can reach these machines' ports may join as a rank, read and"
        " change gradients, or end the training. Make a file by (umask 077 && openssl rand -hex 32"
        " > job.secret), copy it to every machine, and set FOREPROP_SECRET_FILE to its path;"
        " `foreprop run` does so by itself (docs/strangers.md)"
    )
