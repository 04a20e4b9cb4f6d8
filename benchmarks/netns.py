"""Ranks on one machine behind links of a given rate, which take time but next to no CPU: Linux network namespaces.

``with Links(2, bits_per_second=1e9) as links: links.run([sys.executable, "script.py"])`` starts one process a rank, each in
a namespace of its own, pinned to a core. A token bucket (``tc ... tbf``) limits what a rank sends. Two ranks are joined by
one veth pair, more by a bridge in a namespace of its own, so that removing the namespaces removes everything. Several
rates make several links, each with an interface of its own: ``eth0``, ``eth1``, ...

Needs root, ``ip`` and ``tc`` (Debian: ``apt-get install iproute2``). :class:`Loopback` needs neither, and limits nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

__all__ = ["Links", "Loopback", "add_link_options", "join_ranks", "run_on_ranks", "sent_bytes", "why_not"]

_MTU = 65000  # large packets: few interrupts, so that a transfer takes little CPU
_BUFFERS = "4096 4194304 33554432"  # least, default and most bytes of a TCP socket's buffer


def why_not() -> str | None:
    """Why this machine cannot make the links, ``None`` if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: apt-get install iproute2"
    return None


def sent_bytes(interface: str) -> int:
    """Bytes that this namespace has sent through ``interface`` so far, as the kernel counts them: headers included."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def add_link_options(parser: argparse.ArgumentParser) -> None:
    """The options that :func:`run_on_ranks` reads."""
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e9, help="bits/s that a rank can send")
    parser.add_argument("--no-limit", action="store_true", help="plain loopback instead, which needs no root")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds until a rank counts as hanging")


def run_on_ranks(
    script: str,
    arguments: argparse.Namespace,
    run_rank: Callable[[argparse.Namespace], object],
    *,
    bits_per_second: float | Sequence[float],
) -> None:
    """In a rank ``run_rank(arguments)``; else starts ``script`` with the same arguments on all, and prints what rank 0 does.

    Ends the process with a message if the links cannot be made.

    Args:
        arguments: those of :func:`add_link_options` among them.
        bits_per_second: what a rank can send; of each link, if there are several.
    """
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    reason = None if arguments.no_limit else why_not()
    if reason is not None:
        sys.exit(f"cannot make rate-limited links: {reason} (or give --no-limit, for plain loopback)")
    ranks = arguments.ranks
    with Loopback(ranks) if arguments.no_limit else Links(ranks, bits_per_second=bits_per_second) as links:
        command = [sys.executable, "-W", "ignore", script, *sys.argv[1:]]
        print(links.run(command, timeout=arguments.timeout, show_progress=True)[0], end="")


def join_ranks() -> tuple[int, int]:
    """Makes the default process group of a rank that was started here, with one thread; its rank and their number."""
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=os.environ["INIT_METHOD"], rank=rank, world_size=world_size)
    return rank, world_size


class Loopback:
    """Ranks on the machine's own loopback, whose rate nobody limits.

    Args:
        world_size: ranks.
        cores: the core of each rank; default is one after the other, again from the first if there are fewer cores.
    """

    interface = "lo"
    """What gloo uses unless it is told otherwise."""

    def __init__(self, world_size: int, *, cores: Sequence[int] | None = None) -> None:
        available = sorted(os.sched_getaffinity(0))
        self.world_size = world_size
        self.cores = list(cores) if cores is not None else [available[r % len(available)] for r in range(world_size)]
        self._folder = Path(tempfile.mkdtemp(prefix="links-"))
        self._runs = 0

    def __enter__(self) -> Loopback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._clean_up()

    def run(self, command: Sequence[str], *, timeout: float = 3600.0, show_progress: bool = False) -> list[str]:
        """Runs ``command`` once for each rank and returns what each wrote to stdout.

        The environment tells ``RANK``, ``WORLD_SIZE`` and ``INIT_METHOD`` (for ``init_process_group``), and gloo which
        interface to use.

        Args:
            timeout: seconds.
            show_progress: pass on what rank 0 writes to stderr, as it comes.

        Raises:
            RuntimeError: a rank failed or did not end within ``timeout`` seconds, with what it wrote to stderr.
        """
        store = self._folder / f"store-{self._runs}"
        self._runs += 1
        processes = []
        logs = [(self._folder / f"out-{r}", self._folder / f"err-{r}") for r in range(self.world_size)]
        for rank, (out, err) in enumerate(logs):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "INIT_METHOD": f"file://{store}",
                "GLOO_SOCKET_IFNAME": self.interface,
                "OMP_NUM_THREADS": "1",
            }
            prefix = [*self._prefix(rank), "taskset", "-c", str(self.cores[rank])]
            with out.open("w") as stdout, err.open("w") as stderr:
                processes.append(
                    subprocess.Popen([*prefix, *command], env=environment, stdout=stdout, stderr=stderr, text=True)
                )
        deadline = time.monotonic() + timeout
        progress = logs[0][1].open()
        try:
            while any(p.poll() is None for p in processes):
                if show_progress:
                    print(progress.read(), end="", file=sys.stderr, flush=True)
                failed = [r for r, p in enumerate(processes) if p.poll() not in (None, 0)]
                if failed:
                    deadline = min(deadline, time.monotonic() + 5.0)  # the others may have more to say
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        finally:
            progress.close()
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        for rank, process in enumerate(processes):
            if process.returncode != 0:
                raise RuntimeError(
                    f"rank {rank} ended with {process.returncode} (or was stopped after {timeout:g} s):\n"
                    f"{logs[rank][1].read_text()[-4000:]}"
                )
        return [out.read_text() for out, _ in logs]

    def _prefix(self, rank: int) -> list[str]:
        """What stands before the command of a rank."""
        return []

    def _clean_up(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class Links(Loopback):
    """Network namespaces for ``world_size`` ranks, each with an interface ``eth0``, and one more for each further rate.

    Args:
        world_size: ranks.
        bits_per_second: what one rank can send; of each link, if there are several.
        burst: bytes that may leave at once after a pause.
        cores: the core of each rank; default is one after the other, again from the first if there are fewer cores.

    Raises:
        RuntimeError: no root, or tools are missing, or the kernel refuses.
    """

    interface = "eth0"

    def __init__(
        self,
        world_size: int,
        *,
        bits_per_second: float | Sequence[float],
        burst: int = 256 * 1024,
        cores: Sequence[int] | None = None,
    ) -> None:
        reason = why_not()
        if reason is not None:
            raise RuntimeError(f"cannot make network namespaces: {reason}")
        super().__init__(world_size, cores=cores)
        self.rates = [bits_per_second] if isinstance(bits_per_second, (int, float)) else list(bits_per_second)
        self.burst = burst
        self._tag = f"fsdp{os.getpid()}"
        self._namespaces: list[str] = []

    def __enter__(self) -> Links:
        try:
            for rank in range(self.world_size):
                self._add_namespace(self._name(rank))
            for link, rate in enumerate(self.rates):
                self._join(link)
                for rank in range(self.world_size):
                    self._set_up(rank, link, rate)
        except BaseException:
            self._clean_up()
            raise
        return self

    def _prefix(self, rank: int) -> list[str]:
        return ["ip", "netns", "exec", self._name(rank)]

    def _name(self, rank: int) -> str:
        return f"{self._tag}r{rank}"

    def _add_namespace(self, name: str) -> None:
        _ip(f"netns add {name}")
        self._namespaces.append(name)

    def _join(self, link: int) -> None:
        """Gives each rank an interface on a link of its own number."""
        if self.world_size == 2:
            ends = [f"eth{link} netns {self._name(rank)}" for rank in range(2)]
            _ip(f"link add {ends[0]} type veth peer name {ends[1]}")
            return
        hub = f"{self._tag}hub{link}"
        self._add_namespace(hub)
        _ip(f"-n {hub} link add bridge mtu {_MTU} type bridge")
        _ip(f"-n {hub} link set bridge up")
        for rank in range(self.world_size):
            _ip(f"link add eth{link} netns {self._name(rank)} type veth peer name port{rank} netns {hub}")
            _ip(f"-n {hub} link set port{rank} mtu {_MTU} master bridge up")

    def _set_up(self, rank: int, link: int, rate: float) -> None:
        name, interface = self._name(rank), f"eth{link}"
        _ip(f"-n {name} addr add 10.99.{link}.{rank + 1}/24 dev {interface}")
        _ip(f"-n {name} link set lo up")
        _ip(f"-n {name} link set {interface} mtu {_MTU} up")
        for knob in ("tcp_wmem", "tcp_rmem"):
            _call(["ip", "netns", "exec", name, "sysctl", "-q", "-w", f"net.ipv4.{knob}={_BUFFERS}"])
        limit = f"rate {round(rate)}bit burst {self.burst} limit {16 * 1024 * 1024}"
        _call(f"tc -n {name} qdisc add dev {interface} root tbf {limit}".split())

    def _clean_up(self) -> None:
        for name in self._namespaces:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        self._namespaces.clear()
        super()._clean_up()


def _ip(arguments: str) -> None:
    _call(["ip", *arguments.split()])


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
