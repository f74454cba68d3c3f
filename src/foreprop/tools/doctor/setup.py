"""Findings about single hosts: what did not start, versions, processors, limits, devices."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from foreprop.engine.stream import is_loopback
from foreprop.engine.traffic import Attempt
from foreprop.quantities import counted
from foreprop.tools.doctor.records import (
    Examination,
    Examined,
    Facts,
    Finding,
    Known,
    Severity,
    both_stayed,
    differing,
    error,
    groups,
    hint,
    known_facts,
    warning,
)
from foreprop.tools.run.plan import maybe_address

_BASE_FILES = 128
"""How many files torch and Python open by themselves, rounded up."""


# Hosts that did not start, or stopped.
_FAILURES: Mapping[str, tuple[str, str]] = {
    "unreachable": (
        "cannot be reached by ssh: {text}",
        "see that `{command}` works without a question: name, key (BatchMode asks nothing), sshd",
    ),
    "no_python": (
        "Python cannot be started: {text}",
        "install it there at the same path, or give --python",
    ),
    "no_foreprop": (
        "foreprop cannot be imported: {text}",
        "install the same version of foreprop there for the Python that --python names, or pass"
        " the path on with --env PYTHONPATH",
    ),
    "other_version": (
        "another version of foreprop: {text}",
        "install the same version of foreprop on all hosts",
    ),
    "silent": (
        "the probe there does not answer: {text}",
        "see whether the machine is up and not overloaded; a slow one may need a longer --wait",
    ),
    "ended": (
        "the probe there ended early: {text}",
        "try `{command}`, then foreprop's probe by hand: python -m foreprop.tools.doctor.probe",
    ),
    "defect": (
        "the probe there failed: {text}",
        "if this is a setting, correct it there; else it is a defect of foreprop to be reported",
    ),
}


def find_failures(examination: Examination) -> Iterator[Finding]:
    for host in examination.hosts:
        if host.failure is not None:
            found, advice = _FAILURES[host.failure.kind]
            text = f"{host.name}: {found.format(text=host.failure.text)}"
            command = host.failure.command or f"ssh {host.name} true"
            yield error("start", [host.name], text, advice.format(command=command))


def find_directories(examination: Examination) -> Iterator[Finding]:
    advice = "make it there with the script in it, or give --directory, here and to run"
    for name, facts in known_facts(examination):
        if facts.directory_error is not None:
            yield error("directory", [name], f"{name}: {facts.directory_error}", advice)


# Versions.
def find_versions(examination: Examination) -> Iterator[Finding]:
    known = known_facts(examination)
    for name, facts in known:
        if facts.torch is None:
            text = f"{name}: torch cannot be imported: {facts.torch_error}"
            advice = f"install the same torch on all hosts ({groups(_torches(known)) or 'none'})"
            yield error("versions", [name], text, advice)
    if not known:
        return
    ours = {name: facts.foreprop for name, facts in known}
    orders = {name: facts.byteorder for name, facts in known}
    pythons = {name: ".".join(facts.python.split(".")[:2]) for name, facts in known}
    one_order = "foreprop sends numbers as they are in memory: use machines of one byte order"
    versions: list[tuple[str, Mapping[str, Hashable], Severity, str]] = [
        ("foreprop", ours, "error", "install the same foreprop everywhere"),
        ("torch", _torches(known), "error", "install the same torch everywhere"),
        ("byte order", orders, "error", one_order),
        ("Python", pythons, "warning", "use the same Python everywhere"),
    ]
    for what, values, severity, advice in versions:
        yield from differing(severity, "versions", f"{what} differs", values, advice)


def _torches(known: Known) -> dict[str, Hashable]:
    return {name: facts.torch for name, facts in known if facts.torch is not None}


# Processors and limits.
def find_processors(examination: Examination) -> Iterator[Finding]:
    for host in examination.hosts:
        if host.facts is not None:
            yield from _find_threads(host, host.facts)
            yield from _find_load(host.name, host.facts)
    counts = {name: facts.cpus for name, facts in known_facts(examination)}
    advice = "where the CPU computes, every step waits for the slowest host"
    yield from differing("hint", "processors", "the number of CPUs differs", counts, advice)


def _find_threads(host: Examined, facts: Facts) -> Iterator[Finding]:
    name, workers, cpus = host.name, host.workers, facts.cpus
    fair = max(1, cpus // workers)
    if facts.threads is None:
        threads = 1 if workers > 1 else cpus  # as torchrun sets it
    elif facts.threads.isascii() and facts.threads.isdigit() and int(facts.threads) > 0:
        threads = int(facts.threads)
    else:
        text = f"{name}: OMP_NUM_THREADS is {facts.threads!r}, which is no number"
        yield warning("processors", [name], text, f"set it to {fair} there, or to nothing")
        return
    each = f"{name}: {counted(workers, 'worker')} with {counted(threads, 'thread')} each"
    if threads * workers > cpus:
        yield warning(
            "processors",
            [name],
            f"{each}, on {counted(cpus, 'CPU')}",
            f"set OMP_NUM_THREADS={fair} and no more workers than CPUs, or threads wait for"
            " each other",
        )
    elif 2 * threads * workers <= cpus:
        yield hint(
            "processors",
            [name],
            f"{each}, {threads * workers} of {cpus} CPUs",
            f"if the CPU computes, set OMP_NUM_THREADS={fair} (torchrun sets 1 where there"
            " are several workers)",
        )


def _find_load(name: str, facts: Facts) -> Iterator[Finding]:
    if facts.load > facts.cpus:
        yield hint(
            "processors",
            [name],
            f"{name}: busy: in the last minute {facts.load:.1f} threads wanted to run on"
            f" {counted(facts.cpus, 'CPU')}",
            "rates and round trips may be better than measured now; look again when nothing"
            " else runs, because training would share the CPUs too",
        )


def find_open_files(examination: Examination) -> Iterator[Finding]:
    # a process has at most two connections with each worker, and with each server
    workers = sum(host.workers for host in examination.hosts)
    need = _BASE_FILES + 4 * workers
    for name, facts in known_facts(examination):
        if facts.open_files < need:
            yield error(
                "open files",
                [name],
                f"{name}: a process may open {facts.open_files} files; for"
                f" {counted(workers, 'worker')} it needs about {need}",
                "raise it there: ulimit -n 65536, or nofile in /etc/security/limits.conf",
            )


# Names and addresses.
def find_names(examination: Examination) -> Iterator[Finding]:
    known = known_facts(examination)
    for name in sorted({entry.name for _, facts in known for entry in facts.names}):
        if maybe_address(name) is None and name != "localhost":
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
                    text = f"on {host.name} the name {name!r} means {entry.addresses[0]}, which is"
                    advice = f"correct the line of {name} in /etc/hosts on {host.name}"
                    found = error if meeting else warning
                    yield found("names", [host.name], f"{text} {host.name} itself", advice)
            else:
                first[host.name] = entry.addresses[0]
    text = f"the name {name!r} means different addresses"
    advice = "make /etc/hosts or DNS say the same on all hosts, or use addresses"
    yield from differing("warning", "names", text, first, advice)


def _unresolved(host: str, name: str, why: str, *, meeting: bool) -> Finding:
    text = f"{host} cannot resolve the name {name!r}"
    if not meeting:
        advice = "training does without; ssh from there and other programs do not"
        return hint("names", [host], f"{text}: {why}", advice)
    advice = f"add {name} to /etc/hosts or DNS there, or give its address with --master-addr"
    return error("names", [host], f"{text}, where the rendezvous is: {why}", advice)


def _find_own_name(host: str, facts: Facts) -> Iterator[Finding]:
    own = facts.own_name
    usable = own.addresses and not is_loopback(own.addresses[0])
    if usable or facts.gloo_interface or facts.address is None or is_loopback(facts.address):
        return
    means = own.addresses[0] if own.addresses else "no address"
    yield hint(
        "names",
        [host],
        f"{host}: the own host name {own.name!r} means {means} there",
        "foreprop does not mind; gloo under DistributedDataParallel does: set"
        f" GLOO_SOCKET_IFNAME={facts.interface or 'INTERFACE'} there, or correct /etc/hosts",
    )


def find_addresses(examination: Examination) -> Iterator[Finding]:
    for name, facts in known_facts(examination):
        if facts.address_error is not None:
            yield _bad_address(examination.rendezvous, name, facts)
        if facts.rendezvous_error is not None:
            text = f"{name}: {facts.rendezvous_error}, where the rendezvous is to be"
            advice = "end what listens there, give another --port, or none: then a free one is"
            yield error("ports", [name], text, f"{advice} taken")
    addresses: dict[str, list[str]] = {}
    for name, facts in known_facts(examination):
        if facts.address is not None and not is_loopback(facts.address):
            addresses.setdefault(facts.address, []).append(name)
    for address, names in addresses.items():
        if len(names) > 1:
            yield warning(
                "address",
                names,
                f"{', '.join(names)} have the same address, {address}",
                "name each machine once, with workers=N for several workers; or give each"
                " machine an address of its own",
            )


def _bad_address(rendezvous: str, name: str, facts: Facts) -> Finding:
    if facts.address is not None and is_loopback(facts.address):
        resolved = (entry.addresses for entry in facts.names if entry.name == rendezvous)
        means = next((addresses[0] for addresses in resolved if addresses), facts.address)
        return error(
            "names",
            [name],
            f"on {name} the rendezvous {rendezvous!r} means {means}, so {name} would"
            " tell others an address that they cannot reach",
            f"take that line out of /etc/hosts on {name} (127.0.1.1 is the usual one), name"
            " the host by its address, or set FOREPROP_INTERFACE there",
        )
    return error(
        "address",
        [name],
        f"{name} has no address to be reached at: {facts.address_error}",
        "set FOREPROP_INTERFACE there to the interface or address to use, and see that"
        f" there is a route to {rendezvous}",
    )


# Which hosts reach each other.
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
    facts, ports = to.facts, f"port {attempt.port} and all others that the kernel may choose"
    if facts is not None and facts.first_port is not None and facts.last_port is not None:
        ports = f"all ports from {facts.first_port} to {facts.last_port}, which the kernel chooses"
        ports += " from"
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
    return error("reach", [source.name, to.name], found, advice)


# Accelerators: those that torch does not see, that are shared, or far from the network.
_CHECK = "devices"


def find_devices(examination: Examination) -> Iterator[Finding]:
    for host in examination.hosts:
        if host.facts is not None:
            yield from _find_unseen(host.name, host.facts)
            yield from _find_shared(host.name, host.workers, host.facts)
            yield from _find_far(host.name, host.facts)
    known = known_facts(examination)
    models: dict[str, Hashable] = {
        name: ", ".join(sorted({device.model for device in facts.devices})) or "none"
        for name, facts in known
    }
    same = "every step waits for the slowest host"
    yield from differing("hint", _CHECK, "the devices differ", models, same)
    drivers: dict[str, Hashable] = {
        name: ", ".join(sorted({d.driver for d in facts.devices if d.driver})) or None
        for name, facts in known
    }
    yield from differing(
        "hint", _CHECK, "drivers differ", drivers, "install the same driver on all hosts"
    )
    nccl: dict[str, Hashable] = {name: facts.nccl for name, facts in known if facts.devices}
    advice = "ring between GPUs needs the same NCCL: install the same torch everywhere"
    yield from differing("warning", _CHECK, "NCCL differs", nccl, advice)


def _find_unseen(name: str, facts: Facts) -> Iterator[Finding]:
    if facts.devices or not (facts.devices_error or facts.unseen_devices):
        return
    there = ", ".join(facts.unseen_devices)
    on_the_bus = f"; on the PCI bus there is {there}" if there else ""
    why = f": {facts.devices_error}" if facts.devices_error else ""
    advice = (
        "if they are to train: see that their driver is loaded, and install a torch that is"
        " built for them; else set CUDA_VISIBLE_DEVICES to nothing"
    )
    text = f"{name}: torch {facts.torch} sees no device{why}{on_the_bus}"
    yield hint(_CHECK, [name], text, advice)


def _find_shared(name: str, workers: int, facts: Facts) -> Iterator[Finding]:
    count = len(facts.devices)
    if not 0 < count < workers:
        return
    seen = facts.visible_devices
    setting = "" if seen is None else f" (CUDA_VISIBLE_DEVICES is {seen!r})"
    advice = (
        f"start {counted(count, 'worker')} there, or make more devices visible; each worker"
        " takes the one at its LOCAL_RANK"
    )
    sees = f"but torch sees {counted(count, 'device')}{setting}"
    text = f"{name}: {counted(workers, 'worker')}, {sees}"
    yield warning(_CHECK, [name], text, advice)


def _find_far(name: str, facts: Facts) -> Iterator[Finding]:
    here = facts.interface_numa_node
    far = [device for device in facts.devices if device.numa_node not in (None, here)]
    if here is None or not far:
        return
    where = ", ".join(f"{device.name} at node {device.numa_node}" for device in far)
    yield hint(
        _CHECK,
        [name],
        f"{name}: {facts.interface} is at NUMA node {here}, {where}: gradients cross between them",
        "start the workers of each device on its own node (numactl --cpunodebind), or set"
        " FOREPROP_INTERFACE to a card that is nearer, if there is one",
    )
