"""The slice size that suits the links, which are measured before servers are connected.

Results do not depend on the size: a link that is busy meanwhile makes steps a little slower, and
changes no bit. The size stays as usual where links cannot be measured, or are not: within one
machine, with a lossy codec, which counts by slices, and where a size or a rate is set. Nor are they
in an elastic session or with dedicated servers: who joins has not measured, nor have those servers.
"""

from __future__ import annotations

import secrets

import msgspec

from foreprop.config import LOGGER, Config
from foreprop.core.linkshares import slice_elems_at
from foreprop.core.slicing import SLICE_ELEMS
from foreprop.engine.rendezvous import Board, agree_on_session, decode_entry
from foreprop.engine.stream import is_loopback, local_address
from foreprop.engine.world import World
from foreprop.errors import TransportError
from foreprop.plan.linkprobe import slowest_rate
from foreprop.quantities import rate_text
from foreprop.session.backends import is_served
from foreprop.session.training import Training

_WINDOWS_OF_LARGE = 4
"""So much larger is the push window for large slices: the usual one holds so few that links are
idle (lab/docs/notebook/full-size.md)."""


def choose_slice_size(training: Training) -> None:
    """Set ``slice_elems``, on all ranks at the same time, in about half a second.

    Raises `HandshakeError` where ranks do not agree on what decides whether links are measured.
    """
    config, world = training.config, training.world
    per_node = config.workers_per_node or world.local_size
    nodes = -(-world.size // per_node)
    if nodes == 1 or config.join is not None or is_loopback(world.host):
        return
    world.limit_store(config)
    here, session = (
        Board(world, key, timeout_s=config.join_timeout_s, report_s=config.stall_report_s)
        for key in (f"slices/{world.sessions}", f"session/{world.sessions}")
    )
    try:
        rate = _slowest_rate(here, config, world, per_node, nodes)
    except BaseException as error:
        for board in (here, session):
            board.publish_failure(error)
        raise
    if rate is None:
        return
    elems = sum(parameter.numel() for _, parameter, _ in training.user.named)
    servers, uneven = config.servers_on(nodes), config.node_rates is not None
    suited = slice_elems_at(rate, servers=servers, elems=elems, uneven=uneven)
    if world.rank == 0:
        LOGGER.info("links of %s suit slices of %d elements", rate_text(rate), suited)
    window_bytes = config.push_window_bytes
    if suited > SLICE_ELEMS and window_bytes == Config().push_window_bytes:
        window_bytes *= _WINDOWS_OF_LARGE
    training.config = config.replace(slice_elems=suited, push_window_bytes=window_bytes)


def _slowest_rate(
    board: Board, config: Config, world: World, per_node: int, nodes: int
) -> float | None:
    """Bit/s, the same on all ranks; None if it is not measured, or cannot be."""
    names = ("slice_elems", "granularity", "architecture", "dedicated_servers", "elastic")
    shape: dict[str, object] = {name: getattr(config, name) for name in names}
    shape["compression"] = None if config.compression is None else str(config.compression)
    shape["link_rate_bits_per_s"] = "set" if config.link_rate_bits_per_s else None
    id_of_measuring = secrets.token_hex(8) if world.rank == 0 else ""
    id_of_measuring = agree_on_session(board, config, id_of_measuring, shape)
    elsewhere = config.dedicated_servers or config.elastic or not is_served(config)
    fixed = config.slice_elems is not None or config.granularity != "slice"
    if elsewhere or fixed or config.compression or config.link_rate_bits_per_s:
        return None
    node, place = divmod(world.rank, per_node)
    rate: float | None = None
    if place == 0:
        address = local_address(world.host, config.interface)
        session = id_of_measuring
        try:
            rate = slowest_rate(
                board, node=node, nodes=nodes, address=address, session=session, config=config
            )
        except TransportError as error:
            if world.rank == 0:
                LOGGER.warning("slices have the usual size: %s", error)
    if world.rank == 0:
        board.publish("rate", msgspec.json.encode(rate).decode())
    told = board.lookup("rate", "rank 0 to say how fast links are")
    found: float | None = decode_entry(told, float | None, "how fast links are")
    return found
