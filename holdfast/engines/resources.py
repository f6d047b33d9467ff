"""The CPUs and GPUs of this machine, and who has them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.engines.base import Node, ProcessSpec
from holdfast.errors import EngineError

_SLACK = 1e-6  # ten times 0.1 GPUs are one GPU


def this_machine(environ: Mapping[str, str] = os.environ) -> Node:
    """Returns what this process may use: its CPUs (`HOLDFAST_CPUS` says otherwise) and its GPUs."""
    return Node(id="local", host=socket.gethostname(), cpus=_cpus(environ), gpus=_gpus(environ))


def _cpus(environ: Mapping[str, str]) -> float:
    said = environ.get("HOLDFAST_CPUS")
    if not said:
        return float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        return float(said)
    except ValueError:
        raise EngineError(f"HOLDFAST_CPUS is {said!r}; it must be a number, for example 8") from None


def _gpus(environ: Mapping[str, str], drivers: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[str, ...]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return () if names[0] in ("", "-1") else tuple(names)
    return tuple(str(index) for index in range(len(list(drivers.iterdir())))) if drivers.is_dir() else ()


@dataclass
class Share:
    """What one process has: so many CPUs, and of each GPU so much."""

    cpus: float
    gpus: dict[str, float] = field(default_factory=dict)


class Ledger:
    """Counts what running gangs have of one machine."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._cpus_free = node.cpus
        self._gpus_free = dict.fromkeys(node.gpus, 1.0)

    def check(self, ranks: Sequence[ProcessSpec]) -> None:
        """Says whether these ranks fit on the machine when nothing else runs.

        Raises:
            EngineError: they do not.
        """
        Ledger(self._node)._take(ranks, "this machine has", _advice(ranks, self._node))

    def take(self, ranks: Sequence[ProcessSpec]) -> list[Share]:
        """Gives each rank its share; all or none.

        Raises:
            EngineError: they need more than there is, or than others have left.
        """
        self.check(ranks)
        return self._take(ranks, f"of its {_number(self._node.cpus)} this machine has left", "wait until others end")

    def give_back(self, share: Share) -> None:
        """Takes back the share of a process that is gone."""
        self._cpus_free += share.cpus
        for gpu, part in share.gpus.items():
            self._gpus_free[gpu] += part

    def _take(self, ranks: Sequence[ProcessSpec], found: str, advice: str) -> list[Share]:
        needed = sum(rank.cpus for rank in ranks)
        if needed > self._cpus_free + _SLACK:
            raise EngineError(f"{_asked(ranks)}, {found} {_number(self._cpus_free)}: {advice}")
        shares: list[Share] = []
        for rank in ranks:
            share = self._share(rank.cpus, rank.gpus)
            if share is None:
                for taken in shares:
                    self.give_back(taken)
                raise EngineError(self._too_few_gpus(ranks, advice))
            shares.append(share)
        return shares

    def _share(self, cpus: float, gpus: float) -> Share | None:
        if gpus > 1 and gpus != int(gpus):
            raise EngineError(f"a worker asks for {gpus} GPUs; it may have a part of one, or a whole number of them")
        each = min(gpus, 1.0)
        count = max(1, int(gpus)) if gpus > 0 else 0
        chosen = [gpu for gpu, free in self._gpus_free.items() if free >= each - _SLACK][:count]
        if len(chosen) < count:
            return None
        for gpu in chosen:
            self._gpus_free[gpu] -= each
        self._cpus_free -= cpus
        return Share(cpus, dict.fromkeys(chosen, each))

    def _too_few_gpus(self, ranks: Sequence[ProcessSpec], advice: str) -> str:
        there = len(self._node.gpus)
        free = sum(self._gpus_free.values())
        asked = f"{_workers(ranks)} of {_number(max(rank.gpus for rank in ranks))} GPU"
        found = f"this machine has {there}" + (f", {_number(free)} of them free" if there else "")
        return f"{asked} cannot be placed: {found}: {advice}"


def _workers(ranks: Sequence[ProcessSpec]) -> str:
    return f"{len(ranks)} worker{'s' * (len(ranks) != 1)}"


def _asked(ranks: Sequence[ProcessSpec]) -> str:
    needed = _number(sum(rank.cpus for rank in ranks))
    need = "needs" if len(ranks) == 1 else "need"
    each = {rank.cpus for rank in ranks}
    of = f" of {_number(each.pop())} CPU" if len(each) == 1 else ""
    return f"{_workers(ranks)}{of} {need} {needed} CPUs"


def _advice(ranks: Sequence[ProcessSpec], node: Node) -> str:
    """What would fit: workers that share cores or GPUs, down to a quarter of one; else fewer of them."""
    fewer = ["lower num_workers"] if len(ranks) > 1 else []
    if sum(rank.cpus for rank in ranks) > node.cpus:
        return " or ".join([*fewer, *_smaller("CPU", node.cpus, len(ranks))])
    return " or ".join([*fewer, "set use_gpu=False", *_smaller("GPU", len(node.gpus), len(ranks))])


def _smaller(resource: str, there: float, workers: int) -> list[str]:
    share = int(min(1.0, there / workers) * 100) / 100
    return [f"set resources_per_worker={{'{resource}': {_number(share)}}}"] if share > 0 else []


def _number(value: float) -> str:
    return f"{value:.6g}"
