"""What a field of any size costs: measures the example field and writes docs/scale.md from it.

    python benchmarks/scale.py                     grades the example field, a cell at a time, then
                                                   writes the results and the page
    python benchmarks/scale.py --entrant gold      the same for some entrants only
    python benchmarks/scale.py --page-only         writes the page from the results that are there

The page is never written by hand; a test holds it to the committed results.
"""

import argparse
import json
import os
import platform
import tempfile
import time
import zlib
from pathlib import Path
from statistics import mean, median

from trapline.arena.challenge import load_all
from trapline.arena.judge.grade import versions
from trapline.arena.record import Cell
from trapline.arena.runs.executor import choose_level
from trapline.arena.runs.field import EXAMPLE_FIELD, find_entries
from trapline.arena.runs.run import Options, check_machine, grade_field, open_run
from trapline.arena.runs.store import Store, canonical

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "scale.md"
#: The field that is calculated.
ENTRANTS, ATTEMPTS = 1000, 5
#: Assumptions, named on the page; replace the prices by your own.
MACHINE_PRICE, STORAGE_PRICE, UTILISATION = 0.10, 0.10, 0.8
FLEETS = (1, 10, 50, 100)
BLOCK = 4096


def measure(entrants: list[str], full: bool) -> dict[str, object]:
    """Grades a field as a cluster does: one cell at a time, a machine for itself."""
    level = choose_level()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, open_run(folder) as store:
        entries = find_entries(EXAMPLE_FIELD, [])
        wanted = [one for one in entries if not entrants or one.entrant in entrants]
        rigs = {name: _timed(lambda c=c: check_machine(c, level)) for name, c in load_all().items()}
        started = time.perf_counter()
        cells = []
        for cell in grade_field(wanted, store, Options(level, full, workers=1)):
            print(f"{cell.entrant:20} {cell.challenge:26} {cell.seconds:7.1f} s", flush=True)
            cells.append(cell)
        elapsed = time.perf_counter() - started
        return {
            "device": f"cpu-{platform.machine()}",
            "cores": len(os.sched_getaffinity(0)),
            "load_before": round(load_before, 2),
            "versions": versions(),
            "level": level,
            "full": full,
            "entrants": sorted({cell.entrant for cell in cells}),
            "cells": len(cells),
            "elapsed_seconds": round(elapsed, 1),
            "challenges": {name: _of(name, cells, store, rigs[name]) for name in load_all()},
            "store": _store_costs(store, cells),
        }


def _of(name: str, cells: list[Cell], store: Store, rig: float) -> dict[str, float]:
    own = [cell for cell in cells if cell.challenge == name]
    texts = [canonical(store.bundle(cell.bundle)).encode() for cell in own]
    seconds = [cell.seconds for cell in own]
    return {
        "cells": len(own),
        "mean_seconds": round(mean(seconds), 2),
        "median_seconds": round(median(seconds), 2),
        "largest_seconds": round(max(seconds), 2),
        "rig_seconds": round(rig, 2),
        "bundle_bytes": round(mean(map(len, texts))),
        "bundle_blocks": round(mean(-(-len(text) // BLOCK) * BLOCK for text in texts)),
        "bundle_compressed": round(mean(len(zlib.compress(text)) for text in texts)),
        "record_bytes": round(mean(len(cell.model_dump_json()) for cell in own)),
    }


def _store_costs(store: Store, cells: list[Cell]) -> dict[str, float]:
    """Milliseconds to read a record, and to save a cell with its evidence."""
    reading = min(_timed(store.cells) for _ in range(5)) / len(cells)
    saves = []
    with tempfile.TemporaryDirectory() as folder, open_run(folder) as fresh:
        for bundle in [store.bundle(cell.bundle) for cell in cells]:
            saves.append(_timed(lambda one=bundle: fresh.save(one)))
    return {"read_ms": round(1e3 * reading, 3), "save_ms": round(1e3 * median(saves), 3)}


def _timed(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def page(result: dict) -> str:
    """docs/scale.md, whole."""
    challenges = result["challenges"]
    per_challenge = ENTRANTS * ATTEMPTS
    total = per_challenge * len(challenges)
    seconds = per_challenge * sum(one["mean_seconds"] for one in challenges.values())
    hours = seconds / 3600
    paid = hours / UTILISATION
    rig = sum(one["rig_seconds"] for one in challenges.values())
    return "\n".join(
        [
            "# What a large field costs",
            "",
            f"{ENTRANTS:,} entrants × {len(challenges)} challenges × {ATTEMPTS} attempts = "
            f"**{total:,} cells**. This page is written by `python benchmarks/scale.py` from",
            f"`benchmarks/results/{result['device']}/scale.json`; nothing in it is typed by hand.",
            "",
            *_measured(result),
            "",
            "## Machine hours",
            "",
            f"{total:,} cells take **{hours:,.0f} machine hours**, one at a time on a machine:",
            "every challenge is timed, and a timed cell has its machine to itself. Before its",
            "first cell of a challenge a machine shows that it can judge it, which takes",
            f"{rig:,.0f} s a machine for all challenges.",
            "",
            *_fleets(seconds, rig),
            "",
            "## Storage",
            "",
            *_storage(challenges, per_challenge),
            "",
            "Only the newest grade of a cell counts, but none is ever deleted: a field graded",
            "twice needs twice the space.",
            "",
            "## The store as a bottleneck",
            "",
            *_bottleneck(result, total),
            "",
            "## Cost",
            "",
            *_cost(paid, challenges, per_challenge),
            "",
            "## Assumptions",
            "",
            *_assumptions(result),
            "",
        ]
    )


def _measured(result: dict) -> list[str]:
    busy = result["load_before"] > 0.5 * result["cores"]
    note = " **The machine was busy: times are too long.**" if busy else ""
    kind = "full" if result["full"] else "quick"
    names = ", ".join(result["entrants"])
    rows = [
        f"| {name} | {one['cells']} | {one['mean_seconds']:.1f} | {one['median_seconds']:.1f} "
        f"| {one['largest_seconds']:.1f} | {60 / one['mean_seconds']:.1f} "
        f"| {one['bundle_bytes'] / 1e3:.1f} | {one['record_bytes'] / 1e3:.1f} |"
        for name, one in result["challenges"].items()
    ]
    return [
        "## Measured",
        "",
        f"{result['cells']} cells of the example field ({names}), {kind} grades, isolation "
        f"{result['level']}, on {result['device']} with {result['cores']} cores;",
        f"load before the measurement {result['load_before']}.{note}",
        "",
        "| challenge | cells | mean s | median s | largest s | cells a minute | bundle kB "
        "| record kB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *rows,
    ]


def _fleets(seconds: float, rig: float) -> list[str]:
    rows = [
        f"| {count} | {(seconds / count + rig) / UTILISATION / 3600:,.1f} "
        f"| {(seconds / count + rig) / UTILISATION / 86400:,.2f} |"
        for count in FLEETS
    ]
    return ["| machines | hours | days |", "|---:|---:|---:|", *rows]


def _storage(challenges: dict, per_challenge: int) -> list[str]:
    sizes = _sizes(challenges, per_challenge)
    return [
        "| what | GB |",
        "|---|---:|",
        f"| evidence bundles, their bytes | {sizes['bundles']:.2f} |",
        f"| the same as files in blocks of {BLOCK} bytes | {sizes['blocks']:.2f} |",
        f"| the same compressed one by one (zlib) | {sizes['compressed']:.2f} |",
        f"| records in the table of cells | {sizes['records']:.2f} |",
    ]


def _sizes(challenges: dict, per_challenge: int) -> dict[str, float]:
    keys = {
        "bundles": "bundle_bytes",
        "blocks": "bundle_blocks",
        "compressed": "bundle_compressed",
        "records": "record_bytes",
    }
    return {
        name: per_challenge * sum(one[key] for one in challenges.values()) / 1e9
        for name, key in keys.items()
    }


def _bottleneck(result: dict, total: int) -> list[str]:
    save, read = result["store"]["save_ms"], result["store"]["read_ms"]
    average = mean(one["mean_seconds"] for one in result["challenges"].values())
    return [
        f"Saving a cell with its evidence takes {save:.1f} ms in a folder, and writers take turns: "
        f"{60e3 / save:,.0f} cells a minute at most, which",
        f"{1e3 * average / save:,.0f} machines would reach. Reading all {total:,} records, as "
        f"`rank` does, takes {total * read / 1e3:,.0f} s.",
    ]


def _cost(paid: float, challenges: dict, per_challenge: int) -> list[str]:
    sizes = _sizes(challenges, per_challenge)
    kept = sizes["blocks"] + sizes["records"]
    machines, storage = paid * MACHINE_PRICE, kept * STORAGE_PRICE
    cells = per_challenge * len(challenges)
    return [
        "| what | calculation | cost |",
        "|---|---|---:|",
        f"| machines | {paid:,.0f} paid hours × {MACHINE_PRICE:.2f} | {machines:,.2f} |",
        f"| storage, a month | {kept:.2f} GB × {STORAGE_PRICE:.2f} | {storage:,.2f} |",
        f"| **together** | {(machines + storage) / cells * 1e3:.3f} for 1,000 cells "
        f"| **{machines + storage:,.2f}** |",
    ]


def _assumptions(result: dict) -> list[str]:
    return [
        f"- Entrants are like those of the example field ({len(result['entrants'])} measured): "
        "answers that fail early are cheaper than right ones,",
        "  larger ones need more space.",
        f"- A machine is like the measured one: {result['cores']} cores, {result['device']}. More "
        "cores do not grade more cells, because times are",
        "  taken alone: many small machines are better than few large ones.",
        f"- A machine that is paid for grades {UTILISATION:.0%} of the time; the rest is starting, "
        "waiting and cells run again.",
        f"- A machine hour costs {MACHINE_PRICE:.2f} and a GB for a month {STORAGE_PRICE:.2f}, in "
        "whatever currency: put in your own prices.",
        "- Letting models write the answers is not included: it depends on the model, not on us.",
        "- The CPU track only.",
    ]


def main() -> None:
    """Measures, unless the options say otherwise, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entrant", action="append", default=[])
    parser.add_argument("--full", action="store_true", help="full grades instead of quick ones")
    parser.add_argument("--page-only", action="store_true")
    parser.add_argument("--device", default=f"cpu-{platform.machine()}")
    arguments = parser.parse_args()
    path = ROOT / "benchmarks" / "results" / arguments.device / "scale.json"
    if not arguments.page_only:
        path.parent.mkdir(parents=True, exist_ok=True)
        result = measure(arguments.entrant, arguments.full)
        path.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(page(json.loads(path.read_text())))
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
