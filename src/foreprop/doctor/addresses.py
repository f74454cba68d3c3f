"""Findings about names and addresses, and who reaches whom."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from foreprop.doctor.records import Examination, Facts, Finding
from foreprop.doctor.words import both_stayed, differing, is_address, known_facts
from foreprop.link.stream import is_loopback
from foreprop.link.traffic import Attempt


# Names and addresses.
def find_names(examination: Examination) -> Iterator[Finding]:
    known = known_facts(examination)
    for name in sorted({entry.name for _, facts in known for entry in facts.names}):
        if not is_address(name) and name != "localhost":
            yield from _find_one_name(examination, name)
    for host, facts in known:
        yield from _find_own_name(host, facts)


def _find_one_name(examination: Examination, name: str) -> Iterator[Finding]:
    meeting = name == examination.rendezvous
    first: dict[str, Hashable] = {}
    for number, host in enumerate(examination.hosts):
        for entry in host.facts.names if host.facts is not None else ():
            if entry.name != name:
                continue
            own = number == 0 if meeting else host.name == name
            if entry.error is not None or not entry.addresses:
                yield _unresolved(host.name, name, entry.error or "no address", meeting=meeting)
            elif is_loopback(entry.addresses[0]):
                if not own:
                    yield _leads_to_itself(host.name, name, entry.addresses[0], meeting=meeting)
            else:
                first[host.name] = entry.addresses[0]
    yield from differing(
        f"the name {name!r} means different addresses",
        first,
        severity="warning",
        check="names",
        advice="make /etc/hosts or DNS say the same on all hosts, or use addresses",
    )


def _unresolved(host: str, name: str, error: str, *, meeting: bool) -> Finding:
    if meeting:
        advice = f"add {name} to /etc/hosts or DNS there, or give its address with --master-addr"
    else:
        advice = "training does without; ssh from there and other programs do not"
    return Finding(
        severity="error" if meeting else "hint",
        check="names",
        hosts=[host],
        found=f"{host} cannot resolve the name {name!r}"
        + (", where the rendezvous is" if meeting else "")
        + f": {error}",
        advice=advice,
    )


def _leads_to_itself(host: str, name: str, address: str, *, meeting: bool) -> Finding:
    return Finding(
        severity="error" if meeting else "warning",
        check="names",
        hosts=[host],
        found=f"on {host} the name {name!r} means {address}, which is {host} itself",
        advice=f"correct the line of {name} in /etc/hosts on {host}",
    )


def _find_own_name(host: str, facts: Facts) -> Iterator[Finding]:
    own = facts.own_name
    usable = own.addresses and not is_loopback(own.addresses[0])
    if usable or facts.gloo_interface or facts.address is None or is_loopback(facts.address):
        return
    means = own.addresses[0] if own.addresses else "no address"
    yield Finding(
        severity="hint",
        check="names",
        hosts=[host],
        found=f"{host}: the own host name {own.name!r} means {means} there",
        advice="foreprop does not mind; gloo under DistributedDataParallel does: set"
        f" GLOO_SOCKET_IFNAME={facts.interface or 'INTERFACE'} there, or correct /etc/hosts",
    )


def find_addresses(examination: Examination) -> Iterator[Finding]:
    for name, facts in known_facts(examination):
        if facts.address_error is not None:
            yield _bad_address(examination.rendezvous, name, facts)
        if facts.rendezvous_error is not None:
            yield Finding(
                severity="error",
                check="ports",
                hosts=[name],
                found=f"{name}: {facts.rendezvous_error}, where the rendezvous is to be",
                advice="end what listens there, give another --port, or none: then a free one is"
                " taken",
            )
    addresses: dict[str, list[str]] = {}
    for name, facts in known_facts(examination):
        if facts.address is not None and not is_loopback(facts.address):
            addresses.setdefault(facts.address, []).append(name)
    for address, names in addresses.items():
        if len(names) > 1:
            yield Finding(
                severity="warning",
                check="address",
                hosts=names,
                found=f"{', '.join(names)} have the same address, {address}",
                advice="name each machine once, with workers=N for several workers; or give each"
                " machine an address of its own",
            )


def _bad_address(rendezvous: str, name: str, facts: Facts) -> Finding:
    if facts.address is not None and is_loopback(facts.address):
        resolved = (entry.addresses for entry in facts.names if entry.name == rendezvous)
        means = next((addresses[0] for addresses in resolved if addresses), facts.address)
        return Finding(
            severity="error",
            check="names",
            hosts=[name],
            found=f"on {name} the rendezvous {rendezvous!r} means {means}, so {name} would"
            " tell others an address that they cannot reach",
            advice=f"take that line out of /etc/hosts on {name} (127.0.1.1 is the usual one), name"
            " the host by its address, or set FOREPROP_INTERFACE there",
        )
    return Finding(
        severity="error",
        check="address",
        hosts=[name],
        found=f"{name} has no address to be reached at: {facts.address_error}",
        advice="set FOREPROP_INTERFACE there to the interface or address to use, and see that"
        f" there is a route to {rendezvous}",
    )


# Who reaches whom.
def find_unreached(examination: Examination) -> Iterator[Finding]:
    for attempt in examination.attempts:
        stayed = both_stayed(examination, attempt.source, attempt.to)
        if attempt.outcome != "connected" and stayed:
            yield _unreached(examination, attempt)


def _unreached(examination: Examination, attempt: Attempt) -> Finding:
    source, to = examination.hosts[attempt.source], examination.hosts[attempt.to]
    where = f"{to.name} at {attempt.address} port {attempt.port}"
    if attempt.purpose == "rendezvous":
        where += " (the rendezvous)"
    ports = _port_range(to.facts, attempt)
    found, advice = {
        "timeout": (
            f"{source.name} gets no answer from {where}: a firewall that drops, or no way there",
            f"let {source.name} connect to {to.name} on {ports} (firewall, security group), or set"
            " FOREPROP_INTERFACE on both to a network that joins them",
        ),
        "refused": (
            f"{source.name} is refused by {where}, though a probe listens there",
            f"a firewall rejects it, or the address leads elsewhere: let {source.name} connect to"
            f" {to.name} on {ports}, and see what {attempt.address} means on {source.name}",
        ),
        "stranger": (
            f"{source.name} reaches something else at {where}: {attempt.error}",
            f"see what {attempt.address} means on {source.name} (address translation, a proxy, an"
            " address given twice)",
        ),
        "failed": (
            f"{source.name} cannot connect to {where}: {attempt.error}",
            f"see the routes on {source.name} (ip route get {attempt.address}), or set"
            " FOREPROP_INTERFACE on both to a network that joins them",
        ),
    }[attempt.outcome]
    return Finding(
        severity="error",
        check="reach",
        hosts=[source.name, to.name],
        found=found,
        advice=advice,
    )


def _port_range(facts: Facts | None, attempt: Attempt) -> str:
    """Sessions listen on ports that the kernel chooses."""
    if facts is None or facts.first_port is None or facts.last_port is None:
        return f"port {attempt.port} and all others that the kernel may choose"
    return f"all ports from {facts.first_port} to {facts.last_port}, which the kernel chooses from"
