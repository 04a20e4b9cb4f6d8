"""Ranks on one machine: on plain loopback, on rate-limited links, that share a GPU, or one rank that emulates the others.

``with Links(2, bits_per_second=1e9) as links: links.run([sys.executable, "script.py"])`` starts one process per rank, each
in its own Linux network namespace and pinned to a core. A token bucket (``tc ... tbf``) limits the rate at which a rank
sends, which takes time but almost no CPU. Two namespaces are connected by a veth pair, more by a bridge in its own
namespace, so deleting the namespaces deletes everything.

:class:`Links` needs root, ``ip`` and ``tc`` (Debian: ``apt-get install iproute2``). :class:`Loopback` needs none of them,
and does not limit the rate. :func:`share_gpu` lets several ranks use one GPU.

:func:`join_emulated_ranks` joins a process group of which only rank 0 exists, so that one GPU shows how communication
overlaps with compute. A gather fills the whole output from the rank's own shard, a reduction averages the rows of its
input, so both move in memory what they would move in truth, and every number stays finite. Then a kernel of one block
occupies a stream for the rest of the time that a link would take. A real collective also takes some multiprocessors from
compute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_MTU = 65000  # large packets: few interrupts, so that a transfer takes little CPU
_BURST = 256 * 1024  # bytes that a rank may send at once after a pause
_BUFFERS = "4096 4194304 33554432"  # minimum, default and maximum bytes of a TCP socket's buffer
_CYCLES = 50_000_000  # for which a kernel waits to measure their rate


def why_not() -> str | None:
    """Return the reason why this machine cannot create links, or ``None`` if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: apt-get install iproute2"
    return None


class Loopback:
    """Ranks on the loopback interface of the machine, without a limit on the rate.

    Args:
        world_size: number of ranks.
    """

    interface = "lo"
    """The interface that gloo uses by default."""

    def __init__(self, world_size: int) -> None:
        available = sorted(os.sched_getaffinity(0))
        self.world_size = world_size
        self.cores = [available[rank % len(available)] for rank in range(world_size)]
        self._folder = Path(tempfile.mkdtemp(prefix="links-"))

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *error: object) -> None:
        self._clean_up()

    def run(self, command: Sequence[str], *, timeout: float = 3600.0) -> list[str]:
        """Run ``command`` once for each rank and return what each wrote to stdout; forward rank 0's stderr immediately.

        The environment contains ``RANK``, ``WORLD_SIZE`` and ``INIT_METHOD`` (for ``init_process_group``), the
        interface for gloo, and ``RANK_CORE``, the core on which the rank should run.

        Args:
            timeout: limit in seconds.

        Raises:
            RuntimeError: a rank failed or did not finish within ``timeout`` seconds; the message has its stderr.
        """
        processes = []
        logs = [(self._folder / f"out-{r}", self._folder / f"err-{r}") for r in range(self.world_size)]
        for rank, (out, err) in enumerate(logs):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "RANK_CORE": str(self.cores[rank]),
                "WORLD_SIZE": str(self.world_size),
                "INIT_METHOD": f"file://{self._folder}/store",
                "GLOO_SOCKET_IFNAME": self.interface,
                "OMP_NUM_THREADS": "1",
            }
            with out.open("w") as stdout, err.open("w") as stderr:
                prefixed = [*self._prefix(rank), *command]
                processes.append(subprocess.Popen(prefixed, env=environment, stdout=stdout, stderr=stderr, text=True))
        deadline = time.monotonic() + timeout
        progress = logs[0][1].open()
        try:
            while any(p.poll() is None for p in processes):
                print(progress.read(), end="", file=sys.stderr, flush=True)
                failed = [r for r, p in enumerate(processes) if p.poll() not in (None, 0)]
                if failed:
                    deadline = min(deadline, time.monotonic() + 5.0)  # so that the others can report their errors
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
        """Return the start of a rank's command line."""
        return []

    def _clean_up(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class Links(Loopback):
    """Ranks in network namespaces, each with an interface ``eth0``.

    Args:
        world_size: number of ranks.
        bits_per_second: the rate at which a rank can send.

    Raises:
        RuntimeError: the kernel refuses. :func:`why_not` says what else may be missing.
    """

    interface = "eth0"

    def __init__(self, world_size: int, *, bits_per_second: float) -> None:
        super().__init__(world_size)
        self.rate = bits_per_second
        self._tag = f"fsdp{os.getpid()}"
        self._namespaces: list[str] = []

    def __enter__(self) -> Links:
        try:
            for rank in range(self.world_size):
                self._add_namespace(self._name(rank))
            self._join()
            for rank in range(self.world_size):
                self._set_up(rank)
        except BaseException:
            self._clean_up()
            raise
        return self

    def _prefix(self, rank: int) -> list[str]:
        return ["ip", "netns", "exec", self._name(rank)]

    def _name(self, rank: int) -> str:
        return f"{self._tag}n{rank}"

    def _add_namespace(self, name: str) -> None:
        _ip(f"netns add {name}")
        self._namespaces.append(name)

    def _join(self) -> None:
        """Create the link, with an interface in each rank's namespace."""
        if self.world_size == 2:
            ends = [f"eth0 netns {self._name(rank)}" for rank in range(2)]
            _ip(f"link add {ends[0]} type veth peer name {ends[1]}")
            return
        hub = f"{self._tag}hub"
        self._add_namespace(hub)
        _ip(f"-n {hub} link add bridge mtu {_MTU} type bridge")
        _ip(f"-n {hub} link set bridge up")
        for rank in range(self.world_size):
            _ip(f"link add eth0 netns {self._name(rank)} type veth peer name port{rank} netns {hub}")
            _ip(f"-n {hub} link set port{rank} mtu {_MTU} master bridge up")

    def _set_up(self, rank: int) -> None:
        name = self._name(rank)
        _ip(f"-n {name} addr add 10.99.0.{rank + 1}/24 dev eth0")
        _ip(f"-n {name} link set lo up")
        _ip(f"-n {name} link set eth0 mtu {_MTU} up")
        for knob in ("tcp_wmem", "tcp_rmem"):
            _call(["ip", "netns", "exec", name, "sysctl", "-q", "-w", f"net.ipv4.{knob}={_BUFFERS}"])
        limit = f"rate {round(self.rate)}bit burst {_BURST} limit {16 * 1024 * 1024}"
        _call(f"tc -n {name} qdisc add dev eth0 root tbf {limit}".split())

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


def share_gpu(rank: int) -> None:
    """Let several ranks share one GPU through NCCL, which by itself refuses that.

    It sets the environment of a rank, before it creates a process group. NCCL compares hosts and devices; a host name of its
    own for each rank passes. All bytes then travel through sockets on the loopback interface: right for results, order and
    hangs, meaningless for times.
    """
    os.environ.update(
        NCCL_HOSTID=f"rank{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_SOCKET_FAMILY="AF_INET",
        NCCL_NVLS_ENABLE="0",
        NCCL_CUMEM_ENABLE="0",
        NCCL_MAX_NCHANNELS="2",
        NCCL_ALGO="Ring",
        NCCL_PROTO="Simple",
        TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1",
    )


class EmulatedLink:
    """The speed of an emulated link, and what was sent on it.

    Attributes:
        bytes_per_second: that a rank sends; infinity waits for nothing. It may change at any time.
        sent: bytes that the rank has sent.
    """

    def __init__(self) -> None:
        self.bytes_per_second, self.sent = float("inf"), 0.0
        self._cycles_per_second = 0.0

    def occupy(self, nbytes: float) -> None:
        """Let the current stream wait for as long as the link takes."""
        self.sent += nbytes
        seconds = nbytes / self.bytes_per_second
        if seconds:
            torch.cuda._sleep(int(seconds * self._rate()))

    def _rate(self) -> float:
        """Return the cycles per second that the waiting kernel counts, measured once."""
        if not self._cycles_per_second:
            for _ in range(2):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                torch.cuda._sleep(_CYCLES)
                end.record()
                torch.cuda.synchronize()
                self._cycles_per_second = _CYCLES / start.elapsed_time(end) * 1e3
        return self._cycles_per_second


def join_emulated_ranks(world_size: int) -> EmulatedLink:
    """Join, as rank 0, a default process group over an emulated link, and return the link."""
    link = EmulatedLink()

    def create(common: Any, options: Any) -> dist.ProcessGroup:
        return _Group(link, common.group_rank, common.group_size)

    dist.Backend.register_backend("emulated_link", create, extended_api=True, devices=["cuda"])
    dist.init_process_group("cpu:fake,cuda:emulated_link", store=dist.HashStore(), rank=0, world_size=world_size)
    return link


class _Work:
    """A collective on the link's stream; ``wait`` lets the current stream wait for it."""

    def __init__(self, tensors: Sequence[torch.Tensor], done: torch.cuda.Event | None) -> None:
        self._tensors, self._done = list(tensors), done

    def wait(self, timeout: object = None) -> bool:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        self._tensors.clear()  # as NCCL's work, it keeps the tensors until then
        return True

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()

    def exception(self) -> None:
        return None


class _Group(dist.ProcessGroup):
    def __init__(self, link: EmulatedLink, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._link, self._share = link, (size - 1) / size
        self._stream: Any = None
        self._last: Any = None  # collectives of one communicator run one after the other, on whichever streams they are
        self._group_name = self._description = ""

    def getBackendName(self) -> str:
        return "emulated_link"

    @property
    def group_name(self) -> str:
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    def _run(self, tensors: Sequence[torch.Tensor], options: Any, collective: Callable[[], float]) -> _Work:
        """Run what a collective does in memory, and wait for the bytes that it returns.

        An asynchronous one runs on the link's stream, as with NCCL.
        """
        if tensors[0].device.type != "cuda":
            self._link.sent += collective()
            return _Work((), None)
        current = torch.cuda.current_stream()
        if not getattr(options, "asyncOp", True):  # as NCCL, on the current stream
            self._on(current, collective)
            return _Work((), None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)
        self._stream.wait_stream(current)
        return _Work(tensors, self._on(self._stream, collective))

    def _on(self, stream: torch.cuda.Stream, collective: Callable[[], float]) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            if self._last is not None:
                stream.wait_event(self._last)
            self._link.occupy(collective())
            self._last = torch.cuda.Event()
            self._last.record()
        return self._last

    def _gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], options: Any = None) -> _Work:
        def collective() -> float:
            for output, own in zip(outputs, inputs, strict=True):
                rows = output.view(self.size(), own.numel())
                rows[1:].copy_(own.view(-1))
                if own.data_ptr() != output.data_ptr():  # FSDP2 gathers in place
                    rows[0].copy_(own.view(-1))
            return sum(output.nbytes for output in outputs) * self._share

        return self._run([*outputs, *inputs], options, collective)

    def _reduce(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], options: Any = None) -> _Work:
        def collective() -> float:
            for output, whole in zip(outputs, inputs, strict=True):
                output.copy_(whole.view(self.size(), *output.shape).mean(0))
            return sum(whole.nbytes for whole in inputs) * self._share

        return self._run([*outputs, *inputs], options, collective)

    def _gather_one(self, output: torch.Tensor, own: torch.Tensor, *options: Any) -> _Work:
        return self._gather([output], [own], *options[-1:])

    def _reduce_one(self, output: torch.Tensor, whole: torch.Tensor, *options: Any) -> _Work:
        return self._reduce([output], [whole], *options[-1:])

    _allgather_base = all_gather_single = _gather_one
    _reduce_scatter_base = reduce_scatter_single = _reduce_one
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _gather
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _reduce

    def alltoall_base(self, output: torch.Tensor, own: torch.Tensor, *options: Any) -> _Work:
        def collective() -> float:
            output.copy_(own)
            return output.nbytes * self._share

        return self._run([output, own], options[-1], collective)

    all_to_all_single = alltoall_base

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any = None) -> _Work:
        return _Work((), None)  # once, before training

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> _Work:
        return self._run(tensors, options, lambda: 2 * sum(t.nbytes for t in tensors) * self._share)

    def barrier(self, options: Any = None) -> _Work:
        return _Work((), None)

    def shutdown(self) -> None:
        pass
