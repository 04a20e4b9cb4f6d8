"""Machines as data: FLOP/s, memory and network bandwidth of one device, and the sources of these figures.

``CLUSTERS`` holds presets by name, which ``python -m thunder_fsdp_sched clusters`` lists. Another machine is
another :class:`ClusterSpec`; ``dataclasses.replace`` changes one. ``benchmarks/this_machine.py`` measures a machine.

[Note: Figures of a preset]
Peaks are the vendor's, for dense matrices and one direction of a link. The share that a program reaches is separate, in
:class:`Efficiency`, so that facts are distinct from assumptions. Protocols and the share of
NVLink in the NVIDIA presets are the constants by which NCCL itself chooses how to communicate: ``src/graph/tuning.cc``
(rings, microseconds of start, of a hop over NVLink, of a hop over the network: 8.4, 3.4, 14.0 for Simple; 14.0, 1.9,
4.0 for LL128 at 92 % of the bandwidth) and ``src/graph/topo.h`` (20.0, 20.6 and 40.1 GB/s a link of NVLink 3, 4 and 5,
of the datasheets' 25, 25 and 50).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from ...errors import coded_error
from ...sizes import parse_bytes

Whole: TypeAlias = int
Rate: TypeAlias = float
Factor: TypeAlias = float
Amount: TypeAlias = float
Fraction: TypeAlias = float
Share: TypeAlias = float
Backend: TypeAlias = Literal["nccl", "gloo"]
Peaks: TypeAlias = Mapping[torch.dtype, float]


def _number(holds: Callable[[float], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and holds(value)


_is_peak = _number(lambda value: 0 < value < math.inf)

NUMBERS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {  # NaN breaks all of them
    "Whole": ("a positive whole number", _number(lambda value: 0 < value < 2**63 and value == int(value))),
    "Rate": ("positive", _number(lambda value: value > 0)),
    "Factor": ("positive, and finite", _is_peak),
    "Amount": ("zero or positive, and finite", _number(lambda value: 0 <= value < math.inf)),
    "Fraction": ("in [0, 1)", _number(lambda value: 0 <= value < 1)),
    "Share": ("more than 0 and at most 1", _number(lambda value: 0 < value <= 1)),
}
RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **NUMBERS,
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "str": ("text", lambda value: isinstance(value, str)),
    "Backend": ("'nccl' or 'gloo'", lambda value: value in ("nccl", "gloo")),
    "tuple[Protocol, ...]": (
        "a tuple of at least one protocol",
        lambda value: isinstance(value, tuple) and len(value) > 0,
    ),
    "Peaks": (
        "positive and finite for each of at least one dtype of torch",
        lambda value: (
            bool(value) and all(isinstance(dtype, torch.dtype) and _is_peak(peak) for dtype, peak in value.items())
        ),
    ),
}
"""For each type of attribute, its rule as text, and a function that tells whether a value follows it."""


class _Checked:
    """A dataclass that raises an error for an attribute that breaks the rule of its type."""

    def __post_init__(self) -> None:
        owner = f"{type(self).__name__} {getattr(self, 'name', '')}".rstrip()
        for each in dataclasses.fields(self):  # type: ignore[arg-type]
            rule, holds = RULES.get(str(each.type), ("", lambda value: True))
            if not holds(value := getattr(self, each.name)):
                raise coded_error(
                    ValueError,
                    "plan.cluster-attribute-breaks-rule",
                    owner=owner,
                    name=each.name,
                    rule=rule,
                    value=value,
                )


@dataclass(frozen=True)
class Protocol(_Checked):
    """A protocol by which the communication library sends data around a ring; it uses the fastest for each size.

    Attributes:
        start: fixed cost of a collective in seconds, for any size.
        intra_node_hop: seconds of one hop inside a node, without the data.
        inter_node_hop: seconds of one hop between nodes, without the data.
        bandwidth_share: share of the links' bandwidth that carries data.
    """

    start: Amount
    intra_node_hop: Amount
    inter_node_hop: Amount
    bandwidth_share: Share = 1.0


@dataclass(frozen=True)
class Efficiency(_Checked):
    """Shares of the peaks, between 0 and 1, that a training step is assumed to reach. Assumptions, not datasheet values.

    Attributes:
        flops: share of the peak FLOP/s in a large matrix multiplication.
        memory: share of the memory bandwidth in an elementwise kernel.
        intra_node: share of the bandwidth of a device's link inside the node, in a ring.
        inter_node: share of the bandwidth of a device's link between nodes, in a ring.
        host: share of the bandwidth of a device's link to its host, in a copy of pinned memory.
    """

    flops: Share = 1.0
    memory: Share = 1.0
    intra_node: Share = 1.0
    inter_node: Share = 1.0
    host: Share = 1.0


@dataclass(frozen=True)
class ClusterSpec(_Checked):
    """A cluster of equal nodes. Units are seconds, bytes, FLOP (an addition or a multiplication), and their ratios.

    Attributes:
        source: the sources of the figures.
        devices_per_node: ranks of one node; consecutive ranks share a node.
        memory: bytes of one device.
        flops: peak FLOP/s of one device by dtype, dense matrices.
        memory_bandwidth: bytes/s of one device's memory, reads and writes together.
        intra_node_bandwidth: bytes/s that one device can send to others in its node, one direction.
        inter_node_bandwidth: bytes/s that one device can send to other nodes, one direction.
        protocols: latencies of the communication library.
        launch_overhead: seconds of the host for one bound symbol.
        backend: the backend of the ranks' process groups, ``"nccl"`` or ``"gloo"``, on which the chosen transport depends.
        kernel_overhead: seconds of the device between two kernels, in addition to their work.
        synchronous: whether the host itself computes (CPU) instead of running ahead of a device.
        contention: share of compute speed that is lost while a collective runs, because it occupies processors.
        reduce_scatter_factor: bytes that a reduce-scatter sends, relative to a ring. 2 for gloo, which reduces
            everything on all ranks and discards the rest.
        efficiency: assumed shares of the peaks.
        host_bandwidth: bytes/s between one device and its host's memory, one direction; 0 if it is not known.
    """

    name: str
    source: str
    devices_per_node: Whole
    memory: Whole
    flops: Peaks = field(hash=False)
    memory_bandwidth: Rate
    intra_node_bandwidth: Rate
    inter_node_bandwidth: Rate
    protocols: tuple[Protocol, ...]
    launch_overhead: Amount
    backend: Backend = "nccl"
    kernel_overhead: Amount = 0.0
    synchronous: bool = False
    contention: Fraction = 0.0
    reduce_scatter_factor: Factor = 1.0
    efficiency: Efficiency = Efficiency()
    host_bandwidth: Amount = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.synchronous and self.backend != "gloo":
            raise coded_error(ValueError, "plan.cluster-synchronous-needs-gloo", name=self.name, backend=self.backend)

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """Return the FLOP/s that one device reaches in ``dtype``; without a peak, those of the slowest known dtype."""
        return self.flops.get(dtype, min(self.flops.values())) * self.efficiency.flops

    @property
    def device_type(self) -> str:
        """The type of its devices, ``"cpu"`` or ``"cuda"``."""
        return "cpu" if self.synchronous else "cuda"

    @property
    def bytes_per_second(self) -> float:
        """The bytes/s that one device reads and writes."""
        return self.memory_bandwidth * self.efficiency.memory

    @property
    def host_bytes_per_second(self) -> float:
        """The bytes/s that one device copies to or from its host's memory.

        Raises:
            ValueError: they are not known.
        """
        if not self.host_bandwidth:
            raise coded_error(ValueError, "plan.cluster-lacks-host-bandwidth", name=self.name)
        return self.host_bandwidth * self.efficiency.host


_NCCL = (Protocol(8.4e-6, 3.4e-6, 14e-6), Protocol(14e-6, 1.9e-6, 4e-6, bandwidth_share=0.92))
GLOO: dict[str, Any] = {"backend": "gloo", "synchronous": True, "reduce_scatter_factor": 2.0}
_ASSUMED = (
    "Protocols and NVLink's share: NCCL's tuning constants. Assumed: 75 % of peak FLOP/s in large matrix "
    "multiplications, 85 % of memory bandwidth, 90 % of the network, 85 % of PCIe, 6 us of host time a bound symbol, and "
    "the share of SMs that NCCL's 16 channels take while it communicates"
)


def _nvidia(
    name: str,
    source: str,
    memory: int,
    flops: Sequence[float],
    memory_bandwidth: float,
    link: tuple[float, float],
    network: float,
    pcie: float,
    processors: int,
) -> ClusterSpec:
    """Return a node of 8 GPUs.

    Args:
        flops: peaks for float64 (with tensor cores), float32 (without TF32, as PyTorch's default), 16 bits, and 8 bits if it
            computes in them.
        link: bytes/s of NVLink, and the share of them that NCCL reaches.
        network: bytes/s to other nodes.
        pcie: bytes/s to host memory.
        processors: streaming multiprocessors; NCCL occupies 16 while it communicates.
    """
    eight = ((torch.float8_e4m3fn, torch.float8_e5m2),) if len(flops) == 4 else ()
    dtypes = ((torch.float64,), (torch.float32,), (torch.bfloat16, torch.float16), *eight)
    return ClusterSpec(
        name=name,
        source=f"NVIDIA {source}. {_ASSUMED}",
        devices_per_node=8,
        memory=memory,
        flops={dtype: peak for of_peak, peak in zip(dtypes, flops, strict=True) for dtype in of_peak},
        memory_bandwidth=memory_bandwidth,
        intra_node_bandwidth=link[0],
        inter_node_bandwidth=network,
        host_bandwidth=pcie,
        contention=16 / processors,
        efficiency=Efficiency(flops=0.75, memory=0.85, intra_node=link[1], inter_node=0.9, host=0.85),
        protocols=_NCCL,
        # An eager PyTorch call keeps the host busy for 5 us or more; a kernel starts about 2 us after the one before it
        # ends.
        launch_overhead=6e-6,
        kernel_overhead=2e-6,
    )


_H100 = "H100 Tensor Core GPU datasheet (SXM5, dense) and DGX H100 datasheet (400 Gb/s a GPU)"
_H200 = "H200 Tensor Core GPU datasheet (SXM, dense) and DGX H200 datasheet (400 Gb/s a GPU)"
_A100 = "A100 80GB datasheet (SXM4, dense) and DGX A100 datasheet (200 Gb/s a GPU)"
_B200 = "DGX B200 and HGX B200 datasheets (a GPU's share, dense; 400 Gb/s a GPU)"
_HOPPER = (67e12, 67e12, 989.4e12, 1978.9e12)
_AMPERE = (19.5e12, 19.5e12, 312e12)
_BLACKWELL = (40e12, 80e12, 2250e12, 4500e12)
_PCIE4, _PCIE5 = 32e9, 64e9  # 16 lanes

_PRESETS = (
    _nvidia("h100-sxm", _H100, 80 * 10**9, _HOPPER, 3.35e12, (450e9, 20.6 / 25), 50e9, _PCIE5, 132),
    _nvidia("h200-sxm", _H200, 141 * 10**9, _HOPPER, 4.8e12, (450e9, 20.6 / 25), 50e9, _PCIE5, 132),
    _nvidia("a100-sxm", _A100, 80 * 10**9, _AMPERE, 2.039e12, (300e9, 20.0 / 25), 25e9, _PCIE4, 108),
    _nvidia("b200", _B200, 180 * 10**9, _BLACKWELL, 8e12, (900e9, 40.1 / 50), 50e9, _PCIE5, 148),
    ClusterSpec(
        name="cpu-2core",
        source="measured (`python benchmarks/this_machine.py`) on 2 cores of a shared AMD EPYC server with 25 GB: 2 ranks, "
        "a thread and a core each, torch 2.13.0, gloo over the loopback device",
        devices_per_node=2,
        memory=12_600_000_000,
        flops={torch.float64: 5.2e10, torch.float32: 9.4e10, torch.bfloat16: 4.3e11},
        memory_bandwidth=3.9e10,
        intra_node_bandwidth=6.1e8,
        inter_node_bandwidth=6.1e8,
        protocols=(Protocol(0.0, 4.0e-4, 4.0e-4),),
        launch_overhead=9.0e-7,
        **GLOO,
    ),
)

CLUSTERS: Mapping[str, ClusterSpec] = {spec.name: spec for spec in _PRESETS}
"""The presets, keyed by name."""


def cluster(name: str | ClusterSpec) -> ClusterSpec:
    """Return the preset of that name; a spec is returned unchanged.

    Raises:
        ValueError: no preset has that name; the message lists all presets.
    """
    if isinstance(name, ClusterSpec):
        return name
    if not isinstance(name, str) or name not in CLUSTERS:
        raise coded_error(ValueError, "plan.cluster-unknown-name", name=name, known=", ".join(sorted(CLUSTERS)))
    return CLUSTERS[name]


_GPUS = {
    "h100-sxm": ("H100 80GB HBM3", 9),
    "h200-sxm": ("H200", 9),
    "a100-sxm": ("A100-SXM4-80GB", 8),
    "b200": ("B200", 10),
}
"""The name that the driver reports for the GPU of each preset, and the major number of its compute capability."""


def preset_of_gpu(device_name: str) -> ClusterSpec | None:
    """Return the preset of a GPU by the name that its driver reports, or ``None`` if there is none.

    The whole name must fit: an H100 PCIe or NVL and an A100 with 40 GB have other links or another memory, a GH200 has
    another link to its host, and a MIG slice is only a part of a GPU.
    """
    model = device_name.removeprefix("NVIDIA ").strip()
    return next((CLUSTERS[preset] for preset, (name, _) in _GPUS.items() if name == model), None)


def cluster_of_this_process() -> ClusterSpec:
    """Return the preset of the current GPU, or that of a CPU with 2 cores if there is no GPU.

    A GPU without a preset gets that of the nearest generation, among these the one with the nearest memory. Then, and
    for any CPU, a warning names the device and the preset.
    """
    if not torch.cuda.is_available():
        found, preset = f"this CPU ({os.cpu_count()} cores)", CLUSTERS["cpu-2core"]
    else:
        found = torch.cuda.get_device_name()
        if (known := preset_of_gpu(found)) is not None:
            return known
        properties = torch.cuda.get_device_properties()

        def distance(preset: str) -> tuple[int, float]:
            memory = CLUSTERS[preset].memory
            return abs(_GPUS[preset][1] - properties.major), abs(math.log(memory / properties.total_memory))

        preset = CLUSTERS[min(_GPUS, key=distance)]
    warnings.warn(
        f"cluster: no preset is known for {found}, so its speed is assumed to be that of {preset.name!r}, the nearest one. "
        f"Name a preset, fsdp(cluster={preset.name!r}), or describe the machine with a ClusterSpec if its compute, memory "
        f"or links differ (benchmarks/this_machine.py measures a CPU)",
        stacklevel=2,
    )
    return preset


def as_json(spec: ClusterSpec) -> str:
    """Return a cluster as the content of a file that :func:`read_cluster` reads."""
    values = dataclasses.asdict(spec)
    values["flops"] = {str(dtype).removeprefix("torch."): peak for dtype, peak in spec.flops.items()}
    return json.dumps(values, indent=2)


def read_cluster(name: str, changes: Sequence[str] = ()) -> ClusterSpec:
    """Return a cluster by the name of a preset or the path of a JSON file, with some of its values changed.

    A file holds an object with the attributes of :class:`ClusterSpec`; ``"like"`` names the preset that has those that
    are left out::

        {"like": "h100-sxm", "name": "our H100", "inter_node_bandwidth": "25GB", "flops": {"bfloat16": 8e14}}

    Args:
        name: a preset, or a path that ends with ``.json``.
        changes: ``attribute=value``, such as ``inter_node_bandwidth=25GB`` (bytes/s) or ``devices_per_node=4``.

    Raises:
        ValueError: there is no such preset, file or attribute, or a value is invalid.
    """
    values: dict[str, Any] = {}
    like: Any = name
    if name.endswith(".json"):
        path = Path(name)
        try:
            values = {**json.loads(path.read_text())}
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise coded_error(ValueError, "plan.cluster-file-not-readable", path=path, error=error) from error
        like = values.pop("like", None)
        source = path.name if like is None else f"{path.name}, like {like}"
        values = {"name": path.stem, "source": source, **values}
    for change in changes:
        key, found, value = change.partition("=")
        if not found:
            raise coded_error(ValueError, "plan.cluster-change-without-value", change=change)
        values[key.strip()] = value.strip()
    base = None if like is None else cluster(like)
    if base is not None and not values:
        return base
    types = {f.name: str(f.type) for f in dataclasses.fields(ClusterSpec)}
    if unknown := sorted(values.keys() - types.keys()):
        raise coded_error(
            ValueError,
            "plan.cluster-unknown-attributes",
            place=name,
            unknown=", ".join(unknown),
            known=", ".join(types),
        )
    required = {f.name for f in dataclasses.fields(ClusterSpec) if f.default is dataclasses.MISSING}
    if base is None and (missing := sorted(required - values.keys())):
        raise coded_error(ValueError, "plan.cluster-file-lacks-attributes", path=name, missing=", ".join(missing))
    for key, value in values.items():
        try:
            values[key] = _read(types[key], value, None if base is None else getattr(base, key))
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise coded_error(
                ValueError, "plan.cluster-attribute-invalid", place=name, name=key, value=value, error=error
            ) from error
    return ClusterSpec(**values) if base is None else dataclasses.replace(base, **values)


def _read(of: str, value: Any, base: Any) -> Any:
    """Return the value of an attribute of type ``of``; ``base`` is the preset's, which a file may change in part."""
    if of == "Peaks":
        return {**(base or {}), **{getattr(torch, dtype): peak for dtype, peak in value.items()}}
    if of == "Efficiency":
        return dataclasses.replace(base or Efficiency(), **value)
    if of == "tuple[Protocol, ...]":
        return tuple(Protocol(**protocol) for protocol in value)
    if of == "bool":
        return {"true": True, "false": False}.get(value, value)
    if not isinstance(value, str) or of not in NUMBERS:
        return value
    number = float(parse_bytes("value", value) if value[-1:].isalpha() else value)
    return int(number) if number.is_integer() else number
