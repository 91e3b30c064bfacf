"""What a training step moves: shardings by hand beside derived ones, in bytes one device receives.

    python tests/bench/traffic.py                              every program, both meshes
    python tests/bench/traffic.py --only gpt2 --only ssm       some programs
    python tests/bench/traffic.py --mesh data2xtensor4         one mesh
    python tests/bench/traffic.py --only gpt2 --variants       every variant by hand, not only the best
    python tests/bench/traffic.py --only gpt2 --list           the collectives of each, and the derived specs
    python tests/bench/traffic.py --hand                       do not derive

Figures by hand are kept in `.scratch/traffic/handwritten.json`, by program, mesh and specs.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib.util
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # whoever collects doctests imports this too, and keeps the environment of its own
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

from redco_cli.sharding.compiled.traffic import CompiledCollective, total_bytes  # noqa: E402
from tests.sharding.measure import MESHES, moved  # noqa: E402
from tests.sharding.programs.catalogue import FAMILIES, NAMES, Program, program  # noqa: E402
from tests.sharding.programs.megatron import references, share, variants  # noqa: E402

KEPT = ROOT / ".scratch" / "traffic" / "handwritten.json"


def by_hand(one: Program, mesh: str, listed: bool) -> dict[str, dict[str, Any]]:
    """Bytes, share of the parameters on a device and whether it is a reference, of each variant by hand."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    before = kept.get(f"{one.name}|{mesh}", {})
    found: dict[str, dict[str, Any]] = {}
    measured = references(one.name, MESHES[mesh])
    for variant, placed in variants(one.name, MESHES[mesh]).items():
        signature = hashlib.sha256(repr(jax.tree.leaves((placed.specs, placed.gathered))).encode()).hexdigest()[:16]
        entry = before.get(variant, {})
        if listed or entry.get("specs") != signature:
            collected = moved(one.loss_fn, one.params, one.batch, placed.specs, placed.gathered, MESHES[mesh])
            entry = {"specs": signature, "bytes": total_bytes(collected)}
            if listed:
                show(f"by hand, {variant}", collected)
        held = round(share(one.params, placed.specs, MESHES[mesh]), 4)
        found[variant] = {**entry, "share": held, "reference": variant in measured}
    if found != before:
        kept[f"{one.name}|{mesh}"] = found
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        written = KEPT.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(kept, indent=1))
        written.replace(KEPT)
    return found


def derived(one: Program, mesh: str, listed: bool) -> tuple[int, float]:
    """Bytes of the derived plan, and the share of the parameters on a device."""
    from redco_cli.sharding.derive import derive

    began = time.perf_counter()
    plan = derive(one.loss_fn, one.params, one.batch, MESHES[mesh])
    if listed:
        print(f"-- derived in {time.perf_counter() - began:.2f} s")
        for row in plan.rows:
            print(f"   {row.path} {row.shape}: {row.spec}, used {row.gathered}: {row.reason}")
    collected = moved(one.loss_fn, one.params, one.batch, plan.specs, plan.gathered, MESHES[mesh])
    if listed:
        show("derived", collected)
    return total_bytes(collected), share(one.params, plan.specs, MESHES[mesh])


def show(title: str, collected: tuple[CompiledCollective, ...]) -> None:
    """Prints what is moved, most first."""
    print(f"-- {title}: {total_bytes(collected):,} bytes ({total_bytes(collected, loops=False):,} without loops)")
    grouped: dict[Any, list[int]] = collections.defaultdict(lambda: [0, 0])
    for one in collected:
        shape = one.shape if len(one.shape) < 60 else one.shape[:57] + "..."
        source = re.sub(r"\d+", "#", re.sub(r"jit\((?:loss|at_use|loss_fn)\)/", "", one.source))
        entry = grouped[one.kind, "+".join(one.axes), shape, source[:110], one.trip_count_known]
        entry[0] += one.bytes * one.count
        entry[1] += one.count
    for (kind, axes, shape, source, trip_count_known), (size, count) in sorted(
        grouped.items(), key=lambda item: -item[1][0]
    ):
        print(f"   {size:>10,} {count:>3}{'' if trip_count_known else '?'} {kind:<18} {axes:<12} {shape:<40} {source}")


def _figures(entry: dict[str, Any]) -> tuple[str, str]:
    return str(entry["bytes"]), f"{entry['share']:.3f}"


def _line(name: str, mesh: str, *columns: str) -> str:
    *figures, note = columns
    widths = (10, 6, 10, 6, 6, 5)
    return f"{name:<26} {mesh:<14} " + " ".join(f"{c:>{w}}" for c, w in zip(figures, widths, strict=True)) + f"  {note}"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="a program; also `families` or `small`")
    parser.add_argument("--mesh", choices=list(MESHES))
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--hand", action="store_true")
    arguments = parser.parse_args()
    groups = {"families": FAMILIES, "small": NAMES[len(FAMILIES) :]}
    names = [name for asked in arguments.only or NAMES for name in groups.get(asked, (asked,))]
    derivable = not arguments.hand and importlib.util.find_spec("redco_cli.sharding.derive") is not None
    print(_line("program", "mesh", "by hand", "share", "derived", "share", "ratio", "s", "best by hand"))
    ratios = []
    for name in names:
        for mesh in [arguments.mesh] if arguments.mesh else MESHES:
            began = time.perf_counter()
            one = program(name)
            hand = by_hand(one, mesh, arguments.list)
            best = min((variant for variant in hand if hand[variant]["reference"]), key=lambda v: hand[v]["bytes"])
            figures = ["", "", ""]
            if derivable:
                size, held = derived(one, mesh, arguments.list)
                ratios.append(size / max(hand[best]["bytes"], 1))
                figures = [str(size), f"{held:.3f}", f"{ratios[-1]:.3f}"]
            spent = f"{time.perf_counter() - began:.1f}"
            print(_line(name, mesh, *_figures(hand[best]), *figures, spent, best), flush=True)
            for variant, entry in hand.items() if arguments.variants else ():
                mark = "" if entry["reference"] else " (no reference)"
                print(_line("", "", *_figures(entry), "", "", "", "", variant + mark))
    if ratios:
        middle = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}; {len(ratios)} cases)"
        print(f"=> bytes moved, derived / best by hand: {middle}")


if __name__ == "__main__":
    main()
