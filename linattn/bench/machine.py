"""What a measurement needs to be believed: the machine, the versions, the commit, and how busy the machine was."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import linattn


def environment() -> dict[str, Any]:
    """All of it, as plain JSON. Taken before the first measurement, since that makes its own load."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "load_average": load_average(),
    }


def machine() -> dict[str, Any]:
    gpu = torch.cuda.is_available()
    return {
        "cpu": cpu_name(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": total_memory(),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory if gpu else None,
    }


def versions() -> dict[str, str | None]:
    return {
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "linattn": linattn.__version__,
    }


def checkout() -> Path | None:
    """The folder of the repository that this package lies in, None for an installed one."""
    root = Path(linattn.__file__).parents[1]
    return root if (root / "pyproject.toml").is_file() and (root / "benchmarks").is_dir() else None


def results_folder() -> Path:
    """Where measurements are kept: benchmarks/results in a checkout, the current folder elsewhere."""
    root = checkout()
    return Path.cwd() if root is None else root / "benchmarks" / "results"


def result_name(environment: dict[str, Any], what: str) -> str:
    """<date>-<machine>-<what>.json"""
    about = environment["machine"]
    name = f"{about['cpu']} {about['cores']} cores" + (f" {about['gpu']}" if about["gpu"] else "")
    return f"{environment['date'][:10]}-{slug(name)}-{slug(what)}.json"


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", text.lower())).strip("-")


def commit() -> dict[str, Any] | None:
    """The checkout's commit, and whether there is more than it; None outside one and before the first commit."""
    root = checkout()
    if root is None:
        return None
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return None
    changes = _git(root, "status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {"hash": head, "dirty": changes != ""}


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.MULTILINE)
        if named:
            return named[1].strip()
    if platform.system() == "Darwin":
        named = _output(["sysctl", "-n", "machdep.cpu.brand_string"])
        if named:
            return named
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def total_memory() -> int | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def resident_memory() -> int | None:
    """Bytes of memory that this process holds now, None where the system does not tell."""
    status = Path("/proc/self/status")
    found = re.search(r"^VmRSS:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    return int(found[1]) * 1024 if found else None


def available_memory(device: str = "cpu") -> int:
    """Bytes that can be allocated now. Where the system does not tell: half of all, or 4 GB."""
    if torch.device(device).type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for later
        return torch.cuda.mem_get_info(device)[0] + held
    known = [size for size in (_available_on_linux(), _left_in_container()) if size is not None]
    if known:
        return min(known)
    total = total_memory()
    return 4 * 10**9 if total is None else total // 2


def _available_on_linux() -> int | None:
    meminfo = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable: +(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.exists() else None
    return int(found[1]) * 1024 if found else None


def _left_in_container() -> int | None:
    """What a container's limit (cgroup 2) leaves, None without one."""
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if not (limit.exists() and used.exists()) or limit.read_text().strip() == "max":
        return None
    return max(0, int(limit.read_text()) - int(used.read_text()))


def _git(root: Path, *arguments: str) -> str | None:
    return _output(["git", "-C", str(root), *arguments])


def _output(command: list[str]) -> str | None:
    """What a command prints, None where it fails or does not exist."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()
