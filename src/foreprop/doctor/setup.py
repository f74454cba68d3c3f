"""Findings about single hosts: what did not start, versions, processors, limits."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from foreprop.doctor.records import Examination, Examined, Facts, Failure, Finding, Severity
from foreprop.doctor.words import Known, differing, groups, known_facts

_BASE_FILES = 128
"""What torch and Python open by themselves, rounded up."""


# What has not started, or not gone on.
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
        "try `{command}`, then foreprop's probe by hand: python -m foreprop.doctor.probe",
    ),
    "defect": (
        "the probe there failed: {text}",
        "if this is a setting, correct it there; else it is a defect of foreprop to be reported",
    ),
}


def find_failures(examination: Examination) -> Iterator[Finding]:
    for host in examination.hosts:
        if host.failure is not None:
            yield _failure(host, host.failure)


def _failure(host: Examined, failure: Failure) -> Finding:
    found, advice = _FAILURES[failure.kind]
    command = failure.command or f"ssh {host.name} true"
    return Finding(
        severity="error",
        check="start",
        hosts=[host.name],
        found=f"{host.name}: {found.format(text=failure.text)}",
        advice=advice.format(command=command),
    )


def find_directories(examination: Examination) -> Iterator[Finding]:
    for name, facts in known_facts(examination):
        if facts.directory_error is not None:
            yield Finding(
                severity="error",
                check="directory",
                hosts=[name],
                found=f"{name}: {facts.directory_error}",
                advice="make it there with the script in it, or give --directory, here and to run",
            )


# What is installed.
def find_versions(examination: Examination) -> Iterator[Finding]:
    known = known_facts(examination)
    for name, facts in known:
        if facts.torch is None:
            yield Finding(
                severity="error",
                check="versions",
                hosts=[name],
                found=f"{name}: torch cannot be imported: {facts.torch_error}",
                advice=f"install the same torch on all hosts ({groups(_torches(known)) or 'none'})",
            )
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
        told = f"{what} differs"
        yield from differing(told, values, severity=severity, check="versions", advice=advice)


def _torches(known: Known) -> dict[str, Hashable]:
    return {name: facts.torch for name, facts in known if facts.torch is not None}


# Processors and limits.
def find_processors(examination: Examination) -> Iterator[Finding]:
    for host in examination.hosts:
        if host.facts is not None:
            yield from _find_threads(host, host.facts)
            yield from _find_load(host.name, host.facts)
    cpus: dict[str, Hashable] = {name: facts.cpus for name, facts in known_facts(examination)}
    yield from differing(
        "the number of CPUs differs",
        cpus,
        severity="hint",
        check="processors",
        advice="where the CPU computes, every step waits for the slowest host",
    )


def _find_threads(host: Examined, facts: Facts) -> Iterator[Finding]:
    if facts.threads is None:
        threads = 1 if host.workers > 1 else facts.cpus  # as torchrun sets it
    elif facts.threads.isascii() and facts.threads.isdigit() and int(facts.threads) > 0:
        threads = int(facts.threads)
    else:
        yield Finding(
            severity="warning",
            check="processors",
            hosts=[host.name],
            found=f"{host.name}: OMP_NUM_THREADS is {facts.threads!r}, which is no number",
            advice=f"set it to {max(1, facts.cpus // host.workers)} there, or to nothing",
        )
        return
    fair = max(1, facts.cpus // host.workers)
    if threads * host.workers > facts.cpus:
        yield Finding(
            severity="warning",
            check="processors",
            hosts=[host.name],
            found=f"{host.name}: {host.workers} worker(s) with {threads} thread(s) each share"
            f" {facts.cpus} CPU(s)",
            advice=f"set OMP_NUM_THREADS={fair} and no more workers than CPUs, or threads wait for"
            " each other",
        )
    elif 2 * threads * host.workers <= facts.cpus:
        yield Finding(
            severity="hint",
            check="processors",
            hosts=[host.name],
            found=f"{host.name}: {host.workers} worker(s) with {threads} thread(s) each use"
            f" {threads * host.workers} of {facts.cpus} CPUs",
            advice=f"if the CPU computes, set OMP_NUM_THREADS={fair} (torchrun sets 1 where there"
            " are several workers)",
        )


def _find_load(name: str, facts: Facts) -> Iterator[Finding]:
    if facts.load > facts.cpus:
        yield Finding(
            severity="hint",
            check="processors",
            hosts=[name],
            found=f"{name}: busy: in the last minute {facts.load:.1f} threads wanted to run on"
            f" {facts.cpus} CPU(s)",
            advice="rates and round trips may be better than measured now; look again when nothing"
            " else runs, because training would share the CPUs too",
        )


def find_open_files(examination: Examination) -> Iterator[Finding]:
    """A process has at most two connections with each worker, and each server."""
    workers = sum(host.workers for host in examination.hosts)
    need = _BASE_FILES + 4 * workers
    for name, facts in known_facts(examination):
        if facts.open_files < need:
            yield Finding(
                severity="error",
                check="open files",
                hosts=[name],
                found=f"{name}: a process may open {facts.open_files} files; {workers} worker(s)"
                f" need about {need}",
                advice="raise it there: ulimit -n 65536, or nofile in /etc/security/limits.conf",
            )
