"""A session that outlives its workers: where its servers are, and a newcomer's beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreprop.errors import InternalError
from foreprop.link.stream import is_loopback
from foreprop.servers.served import ServedBackend

if TYPE_CHECKING:
    from foreprop.session.training import Training


def backend_of(training: Training) -> ServedBackend:
    backend = training.backends.all[0]
    if not isinstance(backend, ServedBackend):
        raise InternalError("an elastic session without servers")
    return backend


def begin_elastic(training: Training) -> None:
    """All servers have been joined. Training thread."""
    backend = backend_of(training)
    if backend.joined_at is not None:
        training.completed = backend.joined_at - 1
        if training.averaging is not None:
            training.averaging.rounds.begin_at(backend.joined_at)
        training.first.is_over = True  # the others have chosen, and ranked the parameters
        training.buffers.have_come()
    if training.config.max_workers is not None:
        _warn_of_strangers(training, backend)
    members = backend.members
    if members is not None and members.notices is not None:
        training.given_model = members.notices.model
    if members is not None and members.directory is not None:
        members.directory.tell()


def _warn_of_strangers(training: Training, backend: ServedBackend) -> None:
    """The start has done so if there were several machines by then (`World.use_secret`)."""
    world, address = training.world, backend.connections.address
    known = training.config.secret_file is not None or world.size > world.local_size
    if world.rank == 0 and not known and not is_loopback(address):
        from foreprop.cluster.seal import report_no_secret

        report_no_secret()


def joined_at(training: Training) -> int | None:
    """The first step of a newcomer, from the session's start; None for all others."""
    if training.config.join is None:
        return None
    return backend_of(training).joined_at
